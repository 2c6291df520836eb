//! The experts of a layer as banks of weights: one for each pair of device layouts that they come in.
//!
//! A bank is two matrices. The first holds the gate rows of every expert, then the up rows of every expert; the shared
//! expert's gate and up rows stand before them where layout and binding allow. The second holds the rows of every down
//! projection. Segments are cut across all experts at the same rows, so that a sum over experts is never split.

use super::build::Builder;
use super::weights::sources;
use super::{Matrix, Member, Run, Segment};
use crate::container::{TensorId, Tensors};
use crate::dtype::planes::{Geometry, Planes, Source};
use crate::error::{Result, bail};
use crate::model::{Ffn, GateUp, Moe};
use std::ops::Range;

/// Rows at which segments are cut.
const GRANULE: usize = 8;
/// What an expert's place is in a bank that does not hold it; see `shaders/lib/experts.wgsl`.
pub const ABSENT: u32 = u32::MAX;

/// Rows of a tensor that play one part in a matrix.
#[derive(Clone, Copy, Debug)]
pub struct Slice {
    /// The tensor.
    pub tensor: TensorId,
    /// Its first row.
    pub first: usize,
    /// How many rows.
    pub rows: usize,
}

/// Experts of the same device layouts.
pub(super) struct Bank {
    /// For each expert of the layer its place here, or [`ABSENT`].
    pub places: Vec<u32>,
    /// How many are here at a time.
    pub placed: usize,
    /// All that may be here, where that is more.
    pub members: Vec<Member>,
    /// Gate and up projections.
    pub gate_up: Matrix,
    /// Whether the shared expert's gate and up projections are the first rows of the only segment.
    pub has_shared: bool,
    /// Down projections.
    pub down: Matrix,
}

/// The experts of a layer, and the gate and up projections of the shared one where no bank has them.
pub(super) struct Banks {
    pub banks: Vec<Bank>,
    pub shared: Option<Matrix>,
}

/// How many banks the experts of a layer come in.
pub(super) fn count(b: &Builder, moe: &Moe) -> Result<usize> {
    Ok(groups(b, moe)?.len())
}

/// Experts by layouts of gate and up projections together, and of the down projection; in order of their first expert.
#[allow(
    clippy::type_complexity,
    reason = "a list of groups: layouts, and indices of experts"
)]
fn groups(b: &Builder, moe: &Moe) -> Result<Vec<([Planes; 2], Vec<usize>)>> {
    let mut groups: Vec<([Planes; 2], Vec<usize>)> = Vec::new();
    for (i, expert) in moe.experts.iter().enumerate() {
        let planes = [gate_up_planes(b, expert)?, b.planes(expert.down.weight)?];
        match groups.iter_mut().find(|group| group.0 == planes) {
            Some(group) => group.1.push(i),
            None => groups.push((planes, vec![i])),
        }
    }
    Ok(groups)
}

/// The layout of both: their own, or where they differ the one into which every type can be expanded.
fn gate_up_planes(b: &Builder, ffn: &Ffn) -> Result<Planes> {
    match &ffn.gate_up {
        GateUp::Fused(both) => b.planes(both.weight),
        GateUp::Split(gate, up) => {
            let (gate, up) = (b.planes(gate.weight)?, b.planes(up.weight)?);
            Ok(if gate == up { gate } else { Planes::F32 })
        }
    }
}

/// The gate rows and the up rows.
fn gate_and_up(ffn: &Ffn) -> [Slice; 2] {
    let rows = ffn.down.cols;
    let [gate, up] = match &ffn.gate_up {
        GateUp::Split(gate, up) => [(gate.weight, 0), (up.weight, 0)],
        GateUp::Fused(both) => [(both.weight, 0), (both.weight, rows)],
    };
    [gate, up].map(|(tensor, first)| Slice { tensor, first, rows })
}

/// Lays the experts of a layer out. Errors: `UnsupportedTensorType`, and `OutOfMemory` when not even a few rows of all experts
/// fit into a binding.
pub(super) fn banks(b: &Builder, moe: &Moe, name: &dyn Fn(&str) -> String) -> Result<Banks> {
    let limit = b.options.max_binding;
    let hidden = moe.router.cols;
    let width = moe.experts.first().map_or(0, |expert| expert.down.cols);
    let mut shared = match &moe.shared {
        Some(ffn) => Some((gate_up_planes(b, ffn)?, gate_and_up(ffn))),
        None => None,
    };
    let mut banks = Vec::new();
    for (index, ([planes, down_planes], members)) in groups(b, moe)?.into_iter().enumerate() {
        let label = |part: &str| match index {
            0 => name(&format!("experts.{part}")),
            _ => name(&format!("experts.{index}.{part}")),
        };
        let resident = match b.options.experts.slots {
            Some(slots) if slots < members.len() => &members[..slots],
            _ => &members[..],
        };
        let is_paged = resident.len() < members.len();
        if is_paged {
            pageable(planes, hidden, width, moe.top_k, resident.len(), &label("gate_up"))?;
            pageable(down_planes, width, hidden, moe.top_k, resident.len(), &label("down"))?;
        }
        let experts = || resident.iter().filter_map(|&i| moe.experts.get(i));
        let gates = experts().map(|expert| gate_and_up(expert)[0]);
        let ups = experts().map(|expert| gate_and_up(expert)[1]);
        let slices: Vec<_> = gates.chain(ups).collect();
        let mut first: &[Slice] = &[];
        if let Some((shared_planes, both)) = &shared
            && *shared_planes == planes
        {
            let all = Slices::open(planes, hidden, both, &slices, b.tensors)?;
            if all.fits(0..all.height(), limit) {
                first = both;
            }
        }
        let gate_up = Matrix::sliced(label("gate_up"), (planes, hidden), first, &slices, b.tensors, limit)?;
        let has_shared = !first.is_empty();
        let downs: Vec<_> = experts()
            .map(|expert| Slice {
                tensor: expert.down.weight,
                first: 0,
                rows: hidden,
            })
            .collect();
        let down = Matrix::sliced(label("down"), (down_planes, width), &[], &downs, b.tensors, limit)?;
        if has_shared {
            shared = None;
        }
        let mut places = vec![ABSENT; moe.experts.len()];
        for (place, &expert) in resident.iter().enumerate() {
            places[expert] = place as u32;
        }
        let all = members.iter().filter(|_| is_paged);
        let all = all.filter_map(|&expert| Some((expert, moe.experts.get(expert)?)));
        banks.push(Bank {
            places,
            placed: resident.len(),
            members: all
                .map(|(expert, ffn)| {
                    let [gate, up] = gate_and_up(ffn);
                    let down = Slice {
                        tensor: ffn.down.weight,
                        first: 0,
                        rows: hidden,
                    };
                    Member {
                        expert,
                        parts: [gate, up, down],
                    }
                })
                .collect(),
            gate_up,
            has_shared,
            down,
        });
    }
    let shared = match shared {
        Some((planes, both)) => {
            let label = name("shared.gate_up");
            Some(Matrix::sliced(label, (planes, hidden), &[], &both, b.tensors, limit)?)
        }
        None => None,
    };
    Ok(Banks { banks, shared })
}

/// Whether single experts of a layout, each so many rows, can be replaced in a bank with so many slots.
///
/// Errors: `OutOfMemory` for fewer slots than a token takes experts, `UnsupportedTensorType` for layouts whose rows vary in
/// size, or whose scales end within a word.
fn pageable(planes: Planes, cols: usize, rows: usize, top_k: usize, slots: usize, label: &str) -> Result<()> {
    if slots < top_k {
        bail!(OutOfMemory, "{label}: {slots} slots for experts, a token takes {top_k}");
    }
    let geometry = Geometry {
        planes,
        rows,
        cols,
        parts: 1,
        amount: 0,
    };
    // A copy begins and ends at whole words.
    if planes.varies() || !(rows * geometry.scale_row_bytes()).is_multiple_of(4) {
        bail!(
            UnsupportedTensorType,
            "{label}: experts in this type cannot be fetched one by one"
        );
    }
    Ok(())
}

/// Slices of several tensors, as a plan looks at them.
struct Slices<'a> {
    planes: Planes,
    cols: usize,
    first: &'a [Slice],
    cut: &'a [Slice],
    /// Only families whose rows vary make the plan look at what tensors hold.
    sources: Vec<Source<'a>>,
}

impl<'a> Slices<'a> {
    fn open(
        planes: Planes,
        cols: usize,
        first: &'a [Slice],
        cut: &'a [Slice],
        tensors: &'a dyn Tensors,
    ) -> Result<Slices<'a>> {
        let mut slices = Slices {
            planes,
            cols,
            first,
            cut,
            sources: Vec::new(),
        };
        if planes.varies() {
            slices.sources = sources(planes, &slices.tensors(), tensors)?;
        }
        Ok(slices)
    }

    fn tensors(&self) -> Vec<TensorId> {
        let all = self.first.iter().chain(self.cut);
        all.map(|slice| slice.tensor).collect()
    }

    /// Rows of each slice that is cut.
    fn height(&self) -> usize {
        self.cut.first().map_or(0, |slice| slice.rows)
    }

    /// The first slices, and these rows of the others.
    fn segment(&self, here: Range<usize>) -> Segment {
        let whole = self.first.iter().map(|slice| slice.first..slice.first + slice.rows);
        let rows = self
            .cut
            .iter()
            .map(|slice| slice.first + here.start..slice.first + here.end);
        let runs: Vec<_> = whole
            .chain(rows)
            .enumerate()
            .map(|(part, rows)| Run { part, rows })
            .collect();
        let amount = |run: &Run| {
            let source = self.sources.get(run.part);
            source.map_or(0, |source| source.amount(run.rows.clone()))
        };
        Segment {
            row0: here.start as u32,
            geometry: Geometry {
                planes: self.planes,
                rows: runs.iter().map(|run| run.rows.len()).sum(),
                cols: self.cols,
                parts: runs.len(),
                amount: runs.iter().map(amount).sum(),
            },
            runs,
            part_rows: [0, u32::MAX, u32::MAX],
        }
    }

    fn fits(&self, here: Range<usize>, limit: u64) -> bool {
        let geometry = self.segment(here).geometry;
        geometry.code_bytes().max(geometry.scale_bytes()) as u64 <= limit
    }
}

impl Matrix {
    /// The slices of `first` whole, then those of `cut`, which are equally high and of which each segment has the same rows.
    /// With `first` there can be one segment only.
    ///
    /// Errors: `OutOfMemory` when not even a few rows of every slice fit into `limit` bytes, and what the payloads have wrong
    /// with them where rows vary.
    pub fn sliced(
        label: String,
        (planes, cols): (Planes, usize),
        first: &[Slice],
        cut: &[Slice],
        tensors: &dyn Tensors,
        limit: u64,
    ) -> Result<Matrix> {
        let slices = Slices::open(planes, cols, first, cut, tensors)?;
        let height = slices.height();
        let mut segments = Vec::new();
        let mut row0 = 0;
        while row0 < height {
            let until = |granules: usize| (row0 + granules * GRANULE).min(height);
            // The most granules that fit are found by halving.
            let (mut low, mut high) = (0, (height - row0).div_ceil(GRANULE));
            while low < high {
                let middle = (low + high).div_ceil(2);
                match slices.fits(row0..until(middle), limit) {
                    true => low = middle,
                    false => high = middle - 1,
                }
            }
            if low == 0 || (!first.is_empty() && until(low) < height) {
                bail!(
                    OutOfMemory,
                    "{GRANULE} rows of each of the {} parts of {label} do not fit into a binding of {limit} bytes",
                    cut.len()
                );
            }
            segments.push(slices.segment(row0..until(low)));
            row0 = until(low);
        }
        Ok(Matrix {
            label,
            parts: slices.tensors(),
            planes,
            cols,
            segments,
        })
    }
}
