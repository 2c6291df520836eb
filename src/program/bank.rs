//! The experts of a layer as banks of weights: one for each set of device layouts that their projections come in.
//!
//! Where gate and up have one layout, one matrix holds the gate rows of every expert, then the up rows of every expert; the
//! shared expert's gate and up rows stand before them where layout and binding allow. Else two matrices hold them. A last one
//! holds the rows of every down projection. Segments are cut across all experts at the same rows, so that a sum over experts
//! is never split.

use super::build::Builder;
use super::{Matrix, MatrixId, Measured, Member, Run, Segment};
use crate::container::{TensorId, Tensors};
use crate::dtype::planes::{Amount, Geometry, Measure, Planes};
use crate::error::{Result, bail};
use crate::model::{self, Ffn, Moe};
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

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

/// Gate and up projections as matrices, or their numbers.
#[derive(Clone, Copy)]
pub(super) enum Projections<M> {
    /// Of one layout: a matrix of both.
    Both(M),
    /// Of two layouts: a matrix each.
    Apart([M; 2]),
}

impl Projections<Matrix> {
    /// Takes them in.
    pub fn add_to(self, b: &mut Builder) -> Projections<MatrixId> {
        match self {
            Projections::Both(matrix) => Projections::Both(b.add_matrix(matrix)),
            Projections::Apart(both) => Projections::Apart(both.map(|matrix| b.add_matrix(matrix))),
        }
    }
}

impl Projections<MatrixId> {
    /// Where the gates are, and where the up projections.
    pub fn each(self) -> [MatrixId; 2] {
        match self {
            Projections::Both(matrix) => [matrix; 2],
            Projections::Apart(both) => both,
        }
    }
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
    pub gate_up: Projections<Matrix>,
    /// Whether the shared expert's gate and up projections are the first rows of the only segment of both.
    pub has_shared: bool,
    /// Down projections.
    pub down: Matrix,
}

/// The experts of a layer, and the gate and up projections of the shared one where no bank has them.
pub(super) struct Banks {
    pub banks: Vec<Bank>,
    pub shared: Option<Projections<Matrix>>,
}

/// How many banks the experts of a layer come in.
pub(super) fn count(b: &Builder, moe: &Moe) -> Result<usize> {
    Ok(groups(b, moe)?.len())
}

/// Experts by layouts of gate, up and down projections; in order of their first expert.
#[allow(
    clippy::type_complexity,
    reason = "a list of groups: layouts, and indices of experts"
)]
fn groups(b: &Builder, moe: &Moe) -> Result<Vec<([Planes; 3], Vec<usize>)>> {
    let mut groups: Vec<([Planes; 3], Vec<usize>)> = Vec::new();
    for (i, expert) in moe.experts.iter().enumerate() {
        let [gate, up] = gate_up_planes(b, expert)?;
        let planes = [gate, up, b.planes(expert.down.weight)?];
        match groups.iter_mut().find(|group| group.0 == planes) {
            Some(group) => group.1.push(i),
            None => groups.push((planes, vec![i])),
        }
    }
    Ok(groups)
}

/// The layouts of gate and up projections.
pub(super) fn gate_up_planes(b: &Builder, ffn: &Ffn) -> Result<[Planes; 2]> {
    match &ffn.gate_up {
        model::GateUp::Fused(both) => Ok([b.planes(both.weight)?; 2]),
        model::GateUp::Split(gate, up) => Ok([b.planes(gate.weight)?, b.planes(up.weight)?]),
    }
}

/// The gate rows, the up rows, and so many rows of the down projection.
fn parts_of(ffn: &Ffn, hidden: usize) -> [Slice; 3] {
    let rows = ffn.down.cols;
    let [gate, up] = match &ffn.gate_up {
        model::GateUp::Split(gate, up) => [(gate.weight, 0), (up.weight, 0)],
        model::GateUp::Fused(both) => [(both.weight, 0), (both.weight, rows)],
    };
    let down = (ffn.down.weight, 0, hidden);
    [(gate.0, gate.1, rows), (up.0, up.1, rows), down].map(|(tensor, first, rows)| Slice { tensor, first, rows })
}

/// Lays the experts of a layer out. Errors: `UnsupportedTensorType`, and `OutOfMemory` when not even a few rows of all experts
/// fit into a binding.
pub(super) fn banks(b: &Builder, moe: &Moe, name: &dyn Fn(&str) -> String) -> Result<Banks> {
    let limit = b.options.max_binding;
    let hidden = moe.router.cols;
    let width = moe.experts.first().map_or(0, |expert| expert.down.cols);
    let mut shared = match &moe.shared {
        Some(ffn) => {
            let [gate, up, _] = parts_of(ffn, hidden);
            Some((gate_up_planes(b, ffn)?, [gate, up]))
        }
        None => None,
    };
    let mut banks = Vec::new();
    let matrix = |label: String, of: (Planes, usize), stack: Stack| {
        Matrix::sliced(label, of, stack, (b.tensors, b.measured), limit)
    };
    for (index, ([gate_planes, up_planes, down_planes], members)) in groups(b, moe)?.into_iter().enumerate() {
        let label = |part: &str| match index {
            0 => name(&format!("experts.{part}")),
            _ => name(&format!("experts.{index}.{part}")),
        };
        let resident = match b.options.experts.slots {
            Some(slots) if slots < members.len() => &members[..slots],
            _ => &members[..],
        };
        let is_paged = resident.len() < members.len();
        let labels = match gate_planes == up_planes {
            true => ["gate_up"; 2],
            false => ["gate", "up"],
        };
        if is_paged {
            for (planes, part) in [gate_planes, up_planes].into_iter().zip(labels) {
                pageable(planes, hidden, width, moe.top_k, resident.len(), &label(part))?;
            }
            pageable(down_planes, width, hidden, moe.top_k, resident.len(), &label("down"))?;
        }
        let part = |part: usize, experts: &[usize]| -> Vec<Slice> {
            let experts = experts.iter().filter_map(|&i| moe.experts.get(i));
            experts.map(|expert| parts_of(expert, hidden)[part]).collect()
        };
        let others = if is_paged { &members[..] } else { &[] };
        // Those that are cut, and those that may take their places.
        let [gates, ups, downs] = [0, 1, 2].map(|of| [part(of, resident), part(of, others)]);
        let mut has_shared = false;
        let gate_up = if gate_planes == up_planes {
            let both = [0, 1].map(|of| [&gates[of][..], &ups[of]].concat());
            let mut stack = Stack::of(&both);
            if let Some((shared_planes, first)) = &shared
                && *shared_planes == [gate_planes; 2]
                && (!is_paged || fetchable_behind(gate_planes, hidden, first))
            {
                let with_shared = Stack { first, ..stack };
                let all = Slices::open(gate_planes, hidden, with_shared, b.tensors, b.measured)?;
                if all.fits(0..all.height(), limit) {
                    stack = with_shared;
                    has_shared = true;
                }
            }
            Projections::Both(matrix(label(labels[0]), (gate_planes, hidden), stack)?)
        } else {
            Projections::Apart([
                matrix(label(labels[0]), (gate_planes, hidden), Stack::of(&gates))?,
                matrix(label(labels[1]), (up_planes, hidden), Stack::of(&ups))?,
            ])
        };
        let down = matrix(label("down"), (down_planes, width), Stack::of(&downs))?;
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
                .map(|(expert, ffn)| Member {
                    expert,
                    parts: parts_of(ffn, hidden),
                })
                .collect(),
            gate_up,
            has_shared,
            down,
        });
    }
    let shared = match shared {
        Some(([planes, other], both)) if planes == other => {
            let stack = [both.to_vec(), Vec::new()];
            let stack = Stack::of(&stack);
            Some(Projections::Both(matrix(
                name("shared.gate_up"),
                (planes, hidden),
                stack,
            )?))
        }
        Some((planes, both)) => {
            let [gate, up] = both.map(|slice| [vec![slice], Vec::new()]);
            Some(Projections::Apart([
                matrix(name("shared.gate"), (planes[0], hidden), Stack::of(&gate))?,
                matrix(name("shared.up"), (planes[1], hidden), Stack::of(&up))?,
            ]))
        }
        None => None,
    };
    Ok(Banks { banks, shared })
}

/// Whether single experts of a layout, each so many rows, can be replaced in a bank with so many slots.
///
/// Errors: `OutOfMemory` for fewer slots than a token takes experts, `UnsupportedTensorType` for experts whose scales end
/// within a word, or that share a record with the next one.
fn pageable(planes: Planes, cols: usize, rows: usize, top_k: usize, slots: usize, label: &str) -> Result<()> {
    if slots < top_k {
        bail!(OutOfMemory, "{label}: {slots} slots for experts, a token takes {top_k}");
    }
    let geometry = Geometry {
        planes,
        rows,
        cols,
        parts: 1,
        amount: Amount::default(),
    };
    // A copy begins and ends at whole words.
    if !geometry.may_begin_at(rows) {
        bail!(
            UnsupportedTensorType,
            "{label}: experts of {rows} rows that lie as {} cannot be fetched one by one",
            planes.name()
        );
    }
    Ok(())
}

/// Whether single experts can be replaced in a bank that begins with these rows.
fn fetchable_behind(planes: Planes, cols: usize, first: &[Slice]) -> bool {
    let rows = first.iter().map(|slice| slice.rows).sum();
    let geometry = Geometry {
        planes,
        rows,
        cols,
        parts: first.len(),
        amount: Amount::default(),
    };
    geometry.may_begin_at(rows)
}

/// Slices that make a matrix.
#[derive(Clone, Copy)]
pub struct Stack<'a> {
    /// Those that come first, whole.
    pub first: &'a [Slice],
    /// Those that come then, which are equally high and of which each segment has the same rows.
    pub cut: &'a [Slice],
    /// Those that may take the place of one that is cut, for which there has to be room.
    pub pool: &'a [Slice],
}

impl<'a> Stack<'a> {
    /// What is cut, and what may take its place; nothing comes first.
    pub fn of([cut, pool]: &'a [Vec<Slice>; 2]) -> Stack<'a> {
        Stack { first: &[], cut, pool }
    }
}

/// Slices of several tensors, as a plan looks at them.
struct Slices<'a> {
    planes: Planes,
    cols: usize,
    stack: Stack<'a>,
    /// Only families whose rows vary make the plan look at what tensors hold.
    measures: HashMap<TensorId, Rc<Measure>>,
}

impl<'a> Slices<'a> {
    fn open(
        planes: Planes,
        cols: usize,
        stack: Stack<'a>,
        tensors: &dyn Tensors,
        measured: &Measured,
    ) -> Result<Slices<'a>> {
        let mut measures = HashMap::new();
        if planes.varies() {
            for slice in [stack.first, stack.cut, stack.pool].into_iter().flatten() {
                measures.insert(slice.tensor, measured.of(planes, slice.tensor, tensors)?);
            }
        }
        Ok(Slices {
            planes,
            cols,
            stack,
            measures,
        })
    }

    /// Rows of each slice that is cut.
    fn height(&self) -> usize {
        self.stack.cut.first().map_or(0, |slice| slice.rows)
    }

    /// What rows of a slice hold.
    fn amount(&self, slice: &Slice, rows: &Range<usize>) -> Amount {
        let measure = self.measures.get(&slice.tensor);
        let rows = slice.first + rows.start..slice.first + rows.end;
        measure.map_or(Amount::default(), |measure| measure.amount(rows))
    }

    /// The first slices, and these rows of the others.
    fn segment(&self, here: Range<usize>) -> Segment {
        let Stack { first, cut, pool } = self.stack;
        let whole = first.iter().map(|slice| (slice, 0..slice.rows, Amount::default()));
        let pool = pool.iter().map(|slice| self.amount(slice, &here));
        let largest = pool.fold(Amount::default(), Amount::max);
        let rows = cut.iter().map(|slice| (slice, here.clone(), largest));
        let runs: Vec<_> = whole
            .chain(rows)
            .enumerate()
            .map(|(part, (slice, rows, others))| Run {
                part,
                room: self.amount(slice, &rows).max(others),
                rows: slice.first + rows.start..slice.first + rows.end,
            })
            .collect();
        Segment {
            row0: here.start as u32,
            geometry: Geometry {
                planes: self.planes,
                rows: runs.iter().map(|run| run.rows.len()).sum(),
                cols: self.cols,
                parts: runs.len(),
                amount: runs.iter().map(|run| run.room).sum(),
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
    /// The slices of a stack. With some that come first there can be one segment only.
    ///
    /// Errors: `OutOfMemory` when not even a few rows of every slice fit into `limit` bytes, and what the payloads have wrong
    /// with them where rows vary.
    pub fn sliced(
        label: String,
        (planes, cols): (Planes, usize),
        stack: Stack,
        (tensors, measured): (&dyn Tensors, &Measured),
        limit: u64,
    ) -> Result<Matrix> {
        let slices = Slices::open(planes, cols, stack, tensors, measured)?;
        let Stack { first, cut, .. } = stack;
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
            parts: first.iter().chain(cut).map(|slice| slice.tensor).collect(),
            planes,
            cols,
            segments,
        })
    }
}
