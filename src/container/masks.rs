//! Task masks: which neurons, heads, layers and experts a task uses (section 5 of the format).
//!
//! A mask is bits over weights that stay as they are. Knows bits and dimensions, not what is done with them.

use super::arch::Arch;
use super::hash::hash64;
use super::json::{self, without_nulls};
use crate::error::{Error, Kind, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::ops::Range;

/// Blobs start at multiples of this, counted from the start of the section.
const BLOB_ALIGN: usize = 8;
/// Bytes of the section before its JSON.
const HEAD: usize = 8;
/// The longest name of a task, in bytes.
const MAX_NAME: usize = 256;
/// The name that stands for "no mask"; no task has it.
pub const NO_TASK: &str = "none";

/// What the masks of a model range over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskShape {
    /// Layers of the stack.
    pub layers: usize,
    /// Rows of each kind of unit: one a layer, or one a visit of a layer when every pass has masks of its own.
    pub rows: usize,
    /// Neurons of a layer's FFN (the most that any layer has).
    pub ffn: usize,
    /// Query heads of a layer (the most that any layer has).
    pub heads: usize,
    /// Experts of a layer; 0 in networks without.
    pub experts: usize,
}

impl MaskShape {
    /// The dimensions of a network's masks; `by_pass`: every pass of a looped network has rows of its own.
    pub fn of(arch: &Arch, by_pass: bool) -> MaskShape {
        let passes = if by_pass { arch.num_loops } else { 1 };
        MaskShape {
            layers: arch.num_layers,
            // An `Arch` bounds the product.
            rows: arch.num_layers * passes,
            ffn: arch.intermediate_size,
            heads: arch.num_attention_heads,
            experts: arch.moe.as_ref().map_or(0, |moe| moe.num_experts),
        }
    }

    /// Bytes of a mask. `None` when they do not fit a `usize`.
    fn blob_bytes(&self, with_experts: bool) -> Option<usize> {
        let experts = if with_experts { self.experts.div_ceil(8) } else { 0 };
        let row = self.ffn.div_ceil(8) + self.heads.div_ceil(8) + experts;
        self.rows.checked_mul(row)?.checked_add(self.layers.div_ceil(8))
    }
}

/// Rows of bits, least significant first, a row padded to bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Bits {
    width: usize,
    bytes: Vec<u8>,
}

impl Bits {
    fn ones(rows: usize, width: usize) -> Bits {
        let mut row = vec![0xFF; width.div_ceil(8)];
        if let (Some(last), tail @ 1..) = (row.last_mut(), width % 8) {
            *last = (1 << tail) - 1;
        }
        Bits {
            width,
            bytes: row.repeat(rows),
        }
    }

    /// Errors: `Parse` when a row has bits past its width.
    fn parse(bytes: &[u8], width: usize, what: &str) -> Result<Bits> {
        let bits = Bits {
            width,
            bytes: bytes.to_vec(),
        };
        let tail = width % 8;
        if tail != 0 {
            for (row, bytes) in bytes.chunks_exact(width.div_ceil(8)).enumerate() {
                if bytes.last().is_some_and(|last| last >> tail != 0) {
                    bail!(Parse, "{what} of row {row}: bits past the {width} that there are");
                }
            }
        }
        Ok(bits)
    }

    fn row(&self, row: usize) -> &[u8] {
        let bytes = self.width.div_ceil(8);
        let start = row.saturating_mul(bytes);
        self.bytes
            .get(start..)
            .and_then(|rest| rest.get(..bytes))
            .unwrap_or_default()
    }

    fn get(&self, row: usize, bit: usize) -> Option<bool> {
        (bit < self.width).then(|| self.row(row).get(bit / 8).map(|byte| byte >> (bit % 8) & 1 == 1))?
    }

    fn set(&mut self, row: usize, bit: usize, on: bool) -> Result<()> {
        let index = (bit < self.width)
            .then(|| row.checked_mul(self.width.div_ceil(8))?.checked_add(bit / 8))
            .flatten();
        let Some(byte) = index.and_then(|index| self.bytes.get_mut(index)) else {
            bail!(Usage, "a mask has no bit {bit} in a row {row}");
        };
        match on {
            true => *byte |= 1 << (bit % 8),
            false => *byte &= !(1 << (bit % 8)),
        }
        Ok(())
    }

    /// Bits set in a row.
    fn count(&self, row: usize) -> usize {
        self.row(row).iter().map(|byte| byte.count_ones() as usize).sum()
    }

    fn all(&self, rows: usize) -> bool {
        (0..rows).all(|row| self.count(row) == self.width)
    }
}

/// The mask of one task.
///
/// Units are asked for by visit, pass · layers + layer, of the stack's own layers: those of a draft head are not masked.
/// Where passes have no rows of their own every pass reads those of its layer. What lies outside of the mask's dimensions is
/// not restricted: it is active.
#[derive(Clone, Debug, PartialEq)]
pub struct Mask {
    /// The number that the sparse index knows the task by.
    pub task_id: u32,
    /// The name it is asked for by.
    pub name: String,
    /// For people.
    pub description: Option<String>,
    /// The share of units that are off, as its maker counts.
    pub sparsity: Option<f64>,
    /// What was measured with the mask on; `None`: nothing.
    pub quality: Option<Value>,
    /// Members that this program has no use for.
    pub other: Map<String, Value>,
    shape: MaskShape,
    ffn: Bits,
    heads: Bits,
    gates: Bits,
    experts: Option<Bits>,
}

impl Mask {
    /// A mask that is open everywhere.
    pub fn open(task_id: u32, name: impl Into<String>, shape: MaskShape) -> Mask {
        Mask {
            task_id,
            name: name.into(),
            description: None,
            sparsity: None,
            quality: None,
            other: Map::new(),
            shape,
            ffn: Bits::ones(shape.rows, shape.ffn),
            heads: Bits::ones(shape.rows, shape.heads),
            gates: Bits::ones(1, shape.layers),
            experts: None,
        }
    }

    fn row(&self, visit: usize) -> usize {
        match self.shape.rows == self.shape.layers {
            true => visit % self.shape.layers.max(1),
            false => visit,
        }
    }

    /// What the mask ranges over.
    pub fn shape(&self) -> MaskShape {
        self.shape
    }

    /// Whether a neuron of the FFN is active at a visit.
    pub fn ffn(&self, visit: usize, neuron: usize) -> bool {
        self.ffn.get(self.row(visit), neuron).unwrap_or(true)
    }

    /// Whether a query head is active at a visit.
    pub fn head(&self, visit: usize, head: usize) -> bool {
        self.heads.get(self.row(visit), head).unwrap_or(true)
    }

    /// Whether a layer is active, in every pass.
    pub fn layer(&self, layer: usize) -> bool {
        self.gates.get(0, layer).unwrap_or(true)
    }

    /// Whether an expert may be chosen at a visit.
    pub fn expert(&self, visit: usize, expert: usize) -> bool {
        let experts = self.experts.as_ref();
        experts
            .and_then(|bits| bits.get(self.row(visit), expert))
            .unwrap_or(true)
    }

    /// Whether the mask says anything about experts.
    pub fn has_experts(&self) -> bool {
        self.experts.is_some()
    }

    /// Active neurons at a visit.
    pub fn ffn_count(&self, visit: usize) -> usize {
        self.ffn.count(self.row(visit))
    }

    /// Active heads at a visit.
    pub fn head_count(&self, visit: usize) -> usize {
        self.heads.count(self.row(visit))
    }

    /// Experts that may be chosen at a visit; all of them where the mask does not say.
    pub fn expert_count(&self, visit: usize) -> usize {
        let row = self.row(visit);
        self.experts.as_ref().map_or(self.shape.experts, |bits| bits.count(row))
    }

    /// The neurons of a visit as bits, least significant first, padded with zeros to whole bytes; empty past the last row.
    pub fn ffn_bits(&self, visit: usize) -> &[u8] {
        self.ffn.row(self.row(visit))
    }

    /// The heads of a visit as bits.
    pub fn head_bits(&self, visit: usize) -> &[u8] {
        self.heads.row(self.row(visit))
    }

    /// The experts of a visit as bits; `None` where the mask restricts none.
    pub fn expert_bits(&self, visit: usize) -> Option<&[u8]> {
        self.experts.as_ref().map(|bits| bits.row(self.row(visit)))
    }

    /// hash64 of all bits, to compare masks by.
    pub fn bits_hash(&self) -> u64 {
        hash64(&self.blob())
    }

    /// Whether everything is active: such a mask changes nothing and should cost nothing.
    pub fn is_open(&self) -> bool {
        let MaskShape { layers, rows, .. } = self.shape;
        let experts = self.experts.as_ref();
        self.ffn.all(rows)
            && self.heads.all(rows)
            && self.gates.count(0) == layers
            && experts.is_none_or(|bits| bits.all(rows))
    }

    /// Switches a neuron. Errors: `Usage` when there is none.
    pub fn set_ffn(&mut self, visit: usize, neuron: usize, on: bool) -> Result<()> {
        self.ffn.set(self.row(visit), neuron, on)
    }

    /// Switches a head. Errors: `Usage` when there is none.
    pub fn set_head(&mut self, visit: usize, head: usize, on: bool) -> Result<()> {
        self.heads.set(self.row(visit), head, on)
    }

    /// Switches a layer. Errors: `Usage` when there is none.
    pub fn set_layer(&mut self, layer: usize, on: bool) -> Result<()> {
        self.gates.set(0, layer, on)
    }

    /// Switches an expert. Errors: `Usage` when there is none.
    pub fn set_expert(&mut self, visit: usize, expert: usize, on: bool) -> Result<()> {
        let row = self.row(visit);
        let MaskShape { rows, experts, .. } = self.shape;
        self.experts
            .get_or_insert_with(|| Bits::ones(rows, experts))
            .set(row, expert, on)
    }

    /// Reads the bits of a blob whose length was checked.
    fn fill(&mut self, blob: &[u8], with_experts: bool) -> Result<()> {
        let MaskShape {
            layers,
            rows,
            ffn,
            heads,
            experts,
        } = self.shape;
        let mut rest = blob;
        let mut area = |rows: usize, width: usize, what: &str| {
            let (area, after) = rest.split_at_checked(rows * width.div_ceil(8)).unwrap_or_default();
            rest = after;
            Bits::parse(area, width, what)
        };
        self.ffn = area(rows, ffn, "neurons")?;
        self.heads = area(rows, heads, "heads")?;
        self.gates = area(1, layers, "layer gates")?;
        if with_experts {
            let bits = area(rows, experts, "experts")?;
            if let Some(row) = (0..rows).find(|&row| bits.count(row) == 0) {
                bail!(Parse, "experts of row {row}: none may be chosen");
            }
            self.experts = Some(bits);
        }
        Ok(())
    }

    fn blob(&self) -> Vec<u8> {
        let areas = [
            Some(&self.ffn),
            Some(&self.heads),
            Some(&self.gates),
            self.experts.as_ref(),
        ];
        areas
            .into_iter()
            .flatten()
            .flat_map(|bits| bits.bytes.iter().copied())
            .collect()
    }
}

/// All masks of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Masks {
    /// The task whose mask is active when nobody asks for one, if there is a mask of that name.
    pub default_task: Option<String>,
    /// The masks, in the file's order.
    pub masks: Vec<Mask>,
}

/// The JSON of a masks section.
#[derive(Deserialize, Serialize)]
struct Meta {
    #[serde(default)]
    default_task: Option<String>,
    #[serde(default)]
    masks: Vec<MaskMeta>,
}

#[derive(Deserialize, Serialize)]
struct MaskMeta {
    task_id: u32,
    name: String,
    #[serde(default)]
    description: Option<String>,
    #[serde(default)]
    sparsity: Option<f64>,
    #[serde(default)]
    quality: Option<Value>,
    #[serde(default)]
    has_expert_fields: bool,
    blob_off: u64,
    blob_len: u64,
    #[serde(flatten)]
    other: Map<String, Value>,
}

impl Masks {
    /// Reads a masks section.
    ///
    /// Errors: `Bounds` for what lies outside of the section or over something else, `Parse` for descriptions, names,
    /// lengths and bits that do not fit `shape`.
    pub fn parse(section: &[u8], shape: MaskShape) -> Result<Masks> {
        let word = |at: usize| {
            section
                .get(at..)
                .and_then(<[u8]>::first_chunk)
                .copied()
                .map(u32::from_le_bytes)
        };
        let (Some(count), Some(meta_len)) = (word(0), word(4)) else {
            bail!(
                Bounds,
                "a masks section takes at least {HEAD} bytes, found {}",
                section.len()
            );
        };
        let Some(text) = section[HEAD..].get(..meta_len as usize) else {
            bail!(
                Bounds,
                "a description of {meta_len} bytes does not fit the masks section of {}",
                section.len()
            );
        };
        let meta = Value::Object(json::parse_object(text, "masks")?);
        let meta: Meta = serde_json::from_value(without_nulls(&meta))
            .map_err(|err| Error::new(Kind::Parse, format!("masks: {err}")))?;
        if meta.masks.len() as u64 != u64::from(count) {
            bail!(
                Parse,
                "the masks section announces {count} masks and describes {}",
                meta.masks.len()
            );
        }
        let mut spans: Vec<Range<u64>> = Vec::with_capacity(1 + meta.masks.len());
        spans.push(0..(HEAD + text.len()) as u64);
        for meta in &meta.masks {
            let span = span(meta, section, shape).map_err(|err| err.context(format_args!("mask '{}'", meta.name)))?;
            spans.push(span);
        }
        spans.sort_unstable_by_key(|span| span.start);
        if let Some(pair) = spans.windows(2).find(|pair| pair[1].start < pair[0].end) {
            bail!(
                Bounds,
                "bytes {:?} and {:?} of the masks section overlap",
                pair[0],
                pair[1]
            );
        }
        let mut masks = Masks {
            default_task: meta.default_task,
            masks: Vec::with_capacity(meta.masks.len()),
        };
        for meta in meta.masks {
            let name = meta.name.clone();
            let mask = one(meta, section, shape).map_err(|err| err.context(format_args!("mask '{name}'")))?;
            masks.masks.push(mask);
        }
        masks.check_names()?;
        Ok(masks)
    }

    /// The section that [`Masks::parse`] reads back.
    ///
    /// Errors: `Usage` for names that could not be read back, masks of different shapes, a row without an expert.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        self.check_names().map_err(|err| Error::new(Kind::Usage, err.message))?;
        if self.masks.windows(2).any(|pair| pair[0].shape != pair[1].shape) {
            bail!(Usage, "masks of one model have one shape");
        }
        for mask in &self.masks {
            let rows = 0..mask.shape.rows;
            if mask.has_experts() && rows.clone().any(|row| mask.expert_count(row) == 0) {
                bail!(Usage, "mask '{}': a row without an expert", mask.name);
            }
        }
        let blobs: Vec<Vec<u8>> = self.masks.iter().map(Mask::blob).collect();
        // Offsets are part of the text whose length they depend on: they only grow until they fit.
        let mut meta_len = 0;
        loop {
            let (text, offsets) = self.meta(&blobs, meta_len)?;
            if text.len() != meta_len {
                meta_len = text.len();
                continue;
            }
            let head = u32::try_from(self.masks.len()).ok().zip(u32::try_from(text.len()).ok());
            let Some((count, meta_len)) = head else {
                bail!(Usage, "too many masks");
            };
            let mut section = [count.to_le_bytes(), meta_len.to_le_bytes()].concat();
            section.extend_from_slice(&text);
            for (blob, offset) in blobs.iter().zip(offsets) {
                section.resize(offset, 0);
                section.extend_from_slice(blob);
            }
            return Ok(section);
        }
    }

    /// The JSON, if it has `meta_len` bytes, and where each blob starts then.
    fn meta(&self, blobs: &[Vec<u8>], meta_len: usize) -> Result<(Vec<u8>, Vec<usize>)> {
        let mut end = HEAD + meta_len;
        let mut offsets = Vec::with_capacity(blobs.len());
        let described = self.masks.iter().zip(blobs).map(|(mask, blob)| {
            let offset = end.next_multiple_of(BLOB_ALIGN);
            end = offset + blob.len();
            offsets.push(offset);
            MaskMeta {
                task_id: mask.task_id,
                name: mask.name.clone(),
                description: mask.description.clone(),
                sparsity: mask.sparsity,
                quality: mask.quality.clone(),
                has_expert_fields: mask.has_experts(),
                blob_off: offset as u64,
                blob_len: blob.len() as u64,
                other: mask.other.clone(),
            }
        });
        let meta = Meta {
            default_task: self.default_task.clone(),
            masks: described.collect(),
        };
        let text = serde_json::to_vec(&meta).map_err(|err| Error::new(Kind::Usage, format!("masks: {err}")))?;
        Ok((text, offsets))
    }

    /// The mask of this name. Errors: `Usage`, which lists the names that there are.
    pub fn find(&self, name: &str) -> Result<&Mask> {
        self.masks.iter().find(|mask| mask.name == name).ok_or_else(|| {
            let names: Vec<&str> = self.masks.iter().map(|mask| mask.name.as_str()).collect();
            let message = match names.is_empty() {
                true => format!("no task '{name}': the model has no tasks"),
                false => format!("no task '{name}', there are: {}", names.join(", ")),
            };
            Error::new(Kind::Usage, message)
        })
    }

    /// The mask that is active when nobody asks for one: that of the default task, if there is one of that name.
    pub fn default_mask(&self) -> Option<&Mask> {
        let name = self.default_task.as_ref()?;
        self.masks.iter().find(|mask| mask.name == *name)
    }

    fn check_names(&self) -> Result<()> {
        let mut names = HashSet::new();
        let mut ids = HashSet::new();
        for Mask { name, task_id, .. } in &self.masks {
            if name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control) || name == NO_TASK {
                bail!(
                    Parse,
                    "a task is named '{name}', wanted 1 to {MAX_NAME} bytes without control characters, and not '{NO_TASK}'"
                );
            }
            if !names.insert(name) {
                bail!(Parse, "two masks are named '{name}'");
            }
            if !ids.insert(task_id) {
                bail!(Parse, "two masks have task_id {task_id}");
            }
        }
        Ok(())
    }
}

/// Where the bits of a mask are, checked against the section.
fn span(meta: &MaskMeta, section: &[u8], shape: MaskShape) -> Result<Range<u64>> {
    let &MaskMeta {
        blob_off,
        blob_len,
        has_expert_fields,
        ..
    } = meta;
    if has_expert_fields && shape.experts == 0 {
        bail!(Parse, "it has experts, the network has none");
    }
    if !blob_off.is_multiple_of(BLOB_ALIGN as u64) {
        bail!(Bounds, "bits at {blob_off}, wanted a multiple of {BLOB_ALIGN}");
    }
    let wanted = shape.blob_bytes(has_expert_fields);
    if wanted.map(|wanted| wanted as u64) != Some(blob_len) {
        bail!(
            Parse,
            "{blob_len} bytes of bits, wanted {} for {shape:?}",
            wanted.unwrap_or(usize::MAX)
        );
    }
    match blob_off.checked_add(blob_len) {
        Some(end) if end <= section.len() as u64 => Ok(blob_off..end),
        _ => bail!(
            Bounds,
            "bits at {blob_off} with {blob_len} bytes, the masks section has {}",
            section.len()
        ),
    }
}

/// One mask, the place of whose bits was checked.
fn one(meta: MaskMeta, section: &[u8], shape: MaskShape) -> Result<Mask> {
    if meta.sparsity.is_some_and(|sparsity| !(0.0..=1.0).contains(&sparsity)) {
        bail!(Parse, "a sparsity of {:?}, wanted 0 to 1", meta.sparsity);
    }
    let blob = section
        .get(meta.blob_off as usize..)
        .and_then(|rest| rest.get(..meta.blob_len as usize))
        .unwrap_or_default();
    let mut mask = Mask {
        task_id: meta.task_id,
        name: meta.name,
        description: meta.description,
        sparsity: meta.sparsity,
        quality: meta.quality,
        other: meta.other,
        shape,
        ffn: Bits::ones(0, shape.ffn),
        heads: Bits::ones(0, shape.heads),
        gates: Bits::ones(0, shape.layers),
        experts: None,
    };
    mask.fill(blob, meta.has_expert_fields)?;
    Ok(mask)
}
