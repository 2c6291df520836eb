//! The experts of a layer as banks of weights: one bank for each combination of layouts of their projections.
//!
//! If gate and up have the same layout, one matrix holds the gate rows of all experts, then the up rows of all
//! experts. The gate and up rows of the shared expert come before them, if layout and binding size allow. If the
//! layouts differ, gate and up have a matrix each. Another matrix holds the down projections. Segments are cut at the
//! same rows of all experts, so that a sum over experts is never split.

use super::builder::Builder;
use crate::dtype::planes::{Amount, Geometry, Planes};
use crate::error::{Result, bail};
use crate::graph::{ExpertSlices, Slice, Stack};
use crate::model::{Ffn, GateUp, Moe};
use crate::op::{ABSENT, MatrixId};

/// Gate and up projections.
#[derive(Clone, Copy)]
pub(super) enum Projections {
    /// One matrix for both, which have the same layout.
    Fused(MatrixId),
    /// One matrix each, because the layouts differ.
    Unfused([MatrixId; 2]),
}

/// Experts with the same layouts.
pub(super) struct Bank {
    /// The place of each expert of the layer in this bank, or [`ABSENT`].
    pub places: Vec<u32>,
    /// Experts that the bank holds at a time.
    pub placed: usize,
    /// For a paged bank, all experts that it can hold.
    pub members: Vec<ExpertSlices>,
    pub gate_up: Projections,
    /// Whether `gate_up` begins with the rows of the shared expert. Then it has one segment.
    pub has_shared: bool,
    pub down: MatrixId,
}

/// The experts of a layer, and the gate and up projections of the shared expert if no bank has them.
pub(super) struct Banks {
    pub banks: Vec<Bank>,
    pub shared: Option<Projections>,
}

/// The number of banks of a layer.
pub(super) fn count(b: &Builder, moe: &Moe) -> Result<usize> {
    Ok(groups(b, moe)?.len())
}

/// Experts grouped by the layouts of gate, up and down projections, in order of the first expert of each group.
#[allow(
    clippy::type_complexity,
    reason = "a list of groups: layouts, and indices of experts"
)]
fn groups(b: &Builder, moe: &Moe) -> Result<Vec<([Planes; 3], Vec<usize>)>> {
    let mut groups: Vec<([Planes; 3], Vec<usize>)> = Vec::new();
    for (i, expert) in moe.experts.iter().enumerate() {
        let [gate, up] = b.gate_up_planes(expert)?;
        let planes = [gate, up, b.planes(expert.down.weight)?];
        match groups.iter_mut().find(|group| group.0 == planes) {
            Some(group) => group.1.push(i),
            None => groups.push((planes, vec![i])),
        }
    }
    Ok(groups)
}

/// The rows of gate, up and down projections.
fn slices_of(ffn: &Ffn, hidden: usize) -> [Slice; 3] {
    let rows = ffn.down.cols;
    let [gate, up] = match &ffn.gate_up {
        GateUp::Split(gate, up) => [(gate.weight, 0), (up.weight, 0)],
        GateUp::Fused(both) => [(both.weight, 0), (both.weight, rows)],
    };
    let down = (ffn.down.weight, 0, hidden);
    [(gate.0, gate.1, rows), (up.0, up.1, rows), down].map(|(tensor, first, rows)| Slice { tensor, first, rows })
}

/// Arranges the experts of a layer in banks, and adds their matrices to the graph. Errors: `UnsupportedTensorType`, and `OutOfMemory` if 8 rows of all
/// experts do not fit into a binding.
pub(super) fn banks(b: &mut Builder, moe: &Moe, name: &dyn Fn(&str) -> String) -> Result<Banks> {
    let hidden = moe.router.cols;
    let width = moe.experts.first().map_or(0, |expert| expert.down.cols);
    let mut shared = None;
    if let Some(ffn) = &moe.shared {
        let [gate, up, _] = slices_of(ffn, hidden);
        shared = Some((b.gate_up_planes(ffn)?, [gate, up]));
    }
    let mut banks = Vec::new();
    for (index, ([gate_planes, up_planes, down_planes], members)) in groups(b, moe)?.into_iter().enumerate() {
        let label = |part: &str| match index {
            0 => name(&format!("experts.{part}")),
            _ => name(&format!("experts.{index}.{part}")),
        };
        let placed = b.options.experts.slots.unwrap_or(usize::MAX).min(members.len());
        let is_paged = placed < members.len();
        let labels = match gate_planes == up_planes {
            true => ["gate_up", "gate_up", "down"],
            false => ["gate", "up", "down"],
        };
        let shapes = [
            (gate_planes, hidden, width),
            (up_planes, hidden, width),
            (down_planes, width, hidden),
        ];
        for ((planes, cols, rows), part) in shapes.into_iter().zip(labels).filter(|_| is_paged) {
            pageable((planes, cols), rows, moe.top_k, placed, &label(part))?;
        }
        let slices: Vec<_> = members.iter().map(|&i| slices_of(&moe.experts[i], hidden)).collect();
        let part = |part: usize, slices: &[[Slice; 3]]| slices.iter().map(|of| of[part]).collect::<Vec<_>>();
        let others = if is_paged { &slices[..] } else { &[] };
        // The experts that the bank holds at first, and those that may replace them.
        let [gates, ups, downs] = [0, 1, 2].map(|of| [part(of, &slices[..placed]), part(of, others)]);
        let mut has_shared = false;
        let gate_up = if gate_planes == up_planes {
            let both = [0, 1].map(|of| [&gates[of][..], &ups[of]].concat());
            let mut stack = Stack::of(&both);
            if let Some((shared_planes, first)) = &shared
                && *shared_planes == [gate_planes; 2]
                && (!is_paged || may_begin_behind((gate_planes, hidden), &first.map(|slice| slice.rows)))
            {
                let with_shared = Stack { first, ..stack };
                let context = (b.tensors, b.measured);
                if with_shared.is_one_segment((gate_planes, hidden), context, b.options.max_binding)? {
                    stack = with_shared;
                    has_shared = true;
                }
            }
            Projections::Fused(b.sliced(label("gate_up"), (gate_planes, hidden), stack)?)
        } else {
            Projections::Unfused([
                b.sliced(label("gate"), (gate_planes, hidden), Stack::of(&gates))?,
                b.sliced(label("up"), (up_planes, hidden), Stack::of(&ups))?,
            ])
        };
        let down = b.sliced(label("down"), (down_planes, width), Stack::of(&downs))?;
        if has_shared {
            shared = None;
        }
        let mut places = vec![ABSENT; moe.experts.len()];
        for (place, &expert) in members[..placed].iter().enumerate() {
            places[expert] = place as u32;
        }
        let all = members.into_iter().zip(slices).filter(|_| is_paged);
        banks.push(Bank {
            places,
            placed,
            members: all.map(|(expert, slices)| ExpertSlices { expert, slices }).collect(),
            gate_up,
            has_shared,
            down,
        });
    }
    let shared = match shared {
        None => None,
        Some(([planes, other], both)) if planes == other => {
            let stack = [both.to_vec(), Vec::new()];
            let both = b.sliced(name("shared.gate_up"), (planes, hidden), Stack::of(&stack))?;
            Some(Projections::Fused(both))
        }
        Some((planes, both)) => {
            let [gate, up] = both.map(|slice| [vec![slice], Vec::new()]);
            Some(Projections::Unfused([
                b.sliced(name("shared.gate"), (planes[0], hidden), Stack::of(&gate))?,
                b.sliced(name("shared.up"), (planes[1], hidden), Stack::of(&up))?,
            ]))
        }
    };
    Ok(Banks { banks, shared })
}

/// Checks that single experts with this layout, and these columns and rows, can be replaced in a bank.
///
/// Errors: `OutOfMemory` if a token takes more experts than there are slots; `UnsupportedTensorType` if the scales of
/// an expert end within a word, or if it shares a record with the next expert.
fn pageable(of: (Planes, usize), rows: usize, top_k: usize, slots: usize, label: &str) -> Result<()> {
    if slots < top_k {
        bail!(
            OutOfMemory,
            "{label}: {slots} slots, expected at least the {top_k} experts that a token takes"
        );
    }
    if !may_begin_behind(of, &[rows]) {
        bail!(
            UnsupportedTensorType,
            "{label}: experts of {rows} rows in the layout {} cannot be fetched one by one",
            of.0.name()
        );
    }
    Ok(())
}

/// Whether single experts can be replaced behind parts with these numbers of rows: a copy begins and ends at whole
/// words.
fn may_begin_behind((planes, cols): (Planes, usize), parts: &[usize]) -> bool {
    let rows = parts.iter().sum();
    let geometry = Geometry {
        planes,
        rows,
        cols,
        parts: parts.len(),
        amount: Amount::default(),
    };
    geometry.may_begin_at(rows)
}
