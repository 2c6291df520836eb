//! The sparse index (section 7 of the format): active groups of neurons and active heads, by task and layer.
//!
//! Old writers produced it. It is only displayed and copied, never used for computation.

use crate::error::{Result, bail};
use crate::format::arch::Arch;
use crate::format::bytes::u32_at;

/// Neurons per group.
const GROUP: usize = 32;
/// Bytes of an entry before its lists.
const ENTRY: usize = 16;

/// One task in one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexEntry {
    /// The `task_id` of the task's mask.
    pub task_id: u32,
    /// The layer, or the mask row if every loop has masks of its own.
    pub layer: u32,
    /// Groups of 32 neurons with an active one, ascending.
    pub groups: Vec<u16>,
    /// Active heads, ascending.
    pub heads: Vec<u8>,
}

/// Reads an index section.
///
/// Errors: `Bounds` for lists that are longer than the section; `Parse` for layers, groups and heads that the network does
/// not have or that are not ascending, for duplicate entries, and for trailing bytes.
pub fn parse(section: &[u8], arch: &Arch, rows: usize) -> Result<Vec<IndexEntry>> {
    let word = |at: usize| u32_at(section, at);
    let (Some(count), Some(_reserved)) = (word(0), word(4)) else {
        bail!(Bounds, "an index section has at least 8 bytes, found {}", section.len());
    };
    if count as usize > (section.len() - 8) / ENTRY {
        bail!(
            Bounds,
            "an index section of {} bytes is too short for {count} entries",
            section.len()
        );
    }
    let mut entries: Vec<IndexEntry> = Vec::new();
    let mut at = 8usize;
    for i in 0..count {
        let field = |n: usize| at.checked_add(4 * n).and_then(word);
        let [Some(task_id), Some(layer), Some(n_groups), Some(n_heads)] = [0, 1, 2, 3].map(field) else {
            bail!(
                Bounds,
                "entry {i} of the index starts at {at}, the section has {}",
                section.len()
            );
        };
        let (n_groups, n_heads) = (n_groups as usize, n_heads as usize);
        let lists = section.get(at + ENTRY..).unwrap_or_default();
        let bytes = n_groups.checked_mul(2).and_then(|n| n.checked_add(n_heads));
        let Some(lists) = bytes.and_then(|bytes| lists.get(..bytes)) else {
            bail!(
                Bounds,
                "entry {i} of the index has {n_groups} groups and {n_heads} heads, {} bytes are left",
                lists.len()
            );
        };
        let (groups, heads) = lists.split_at(2 * n_groups);
        let groups = groups.as_chunks().0.iter();
        let groups: Vec<u16> = groups.map(|&group| u16::from_le_bytes(group)).collect();
        let most_groups = arch.intermediate_size.div_ceil(GROUP);
        let fits = groups.is_sorted_by(|a, b| a < b)
            && heads.is_sorted_by(|a, b| a < b)
            && groups.last().is_none_or(|&group| usize::from(group) < most_groups)
            && heads
                .last()
                .is_none_or(|&head| usize::from(head) < arch.num_attention_heads);
        if !fits || layer as usize >= rows {
            bail!(
                Parse,
                "entry {i} of the index: a layer, group or head that the network does not have, or a list that is not ascending"
            );
        }
        at += (ENTRY + lists.len()).next_multiple_of(4);
        entries.push(IndexEntry {
            task_id,
            layer,
            groups,
            heads: heads.to_vec(),
        });
    }
    // The padding of the last entry may be missing.
    if at < section.len() {
        let rest = section.len() - at;
        bail!(Parse, "{rest} bytes follow the {count} entries of the index");
    }
    let mut keys: Vec<(u32, u32)> = entries.iter().map(|entry| (entry.task_id, entry.layer)).collect();
    keys.sort_unstable();
    if let Some([(task, layer), _]) = keys.array_windows().find(|[a, b]| a == b) {
        bail!(Parse, "the index has two entries for task {task} in layer {layer}");
    }
    Ok(entries)
}
