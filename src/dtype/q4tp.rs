//! q4tp: 4-bit codes, and per row a ladder of 32 scales, 2^(lo + rung·step), of which each group names a rung.
//!
//! `[codes rows·groups·16][rows × (f16 lo, f16 step)][rows × ⌈groups·5/8⌉ bytes of 5-bit rungs, LSB first]`, codes as in
//! q4_block.

use super::payload::{GROUP, Payload, Section, fill_halves};
use super::planes::{Planes, Repack};
use super::q4::{CODE_DEVIATION, pack};
use super::quantise::levels::{Group, Levels, Weighed};
use super::quantise::{Weights, absmax};
use super::spec::{Encode, Shapes, Spec, Tail};
use crate::error::{Kind, Result, bail};
use cmf_kernels_ref::dtype::q4;
use half::f16;

pub const Q4TP: Spec = Spec {
    id: Some(15),
    gguf: None,
    name: "q4tp",
    quant: "q4tp",
    code_bits: 4,
    shapes: Shapes::GroupRows,
    max_cols: u64::MAX,
    sections: &[Section::Groups(16), Section::Rows(4), Section::GroupBits(5)],
    tail: Tail::NONE,
    decoder: q4::q4tp,
    encode: Encode::Exact(encode),
    planes: |_| Ok(Planes::Nib4Ladder),
    repack: Repack {
        scales: ladder_and_rungs,
        ..Repack::COPY
    },
    verify,
    random: Some(|payload, [rows, cols], deviation, random| {
        let (codes, rest) = payload.split_at_mut(rows * cols / 2);
        let (ladders, rungs) = rest.split_at_mut(rows * 4);
        random(codes);
        random(rungs);
        for ladder in ladders.as_chunks_mut::<4>().0 {
            fill_halves(&mut ladder[..2], (deviation / CODE_DEVIATION).log2() - 1.0);
            fill_halves(&mut ladder[2..], 1.0 / 16.0);
        }
    }),
};

/// A row's lo and step, then its rungs. Errors: `NonFinite`, as the kernels take powers of both.
fn ladder_and_rungs(payload: &Payload, row: usize, out: &mut [u8]) -> Result<()> {
    let ladder = payload.row(1, row)?;
    let finite = |half: &[u8; 2]| f16::from_le_bytes(*half).is_finite();
    if !ladder.as_chunks().0.iter().all(finite) {
        bail!(NonFinite, "row {row}: its lo and step of scales are not finite numbers");
    }
    out[..4].copy_from_slice(ladder);
    payload.copy_row(2, row, &mut out[4..])
}

/// Both ends of every ladder must be finite, even where no group takes that rung: a device computes code·scale in f32, where
/// 0·∞ is not 0.
fn verify(payload: &Payload) -> Result<()> {
    for row in 0..payload.rows {
        let ladder = payload.row(1, row)?;
        let half = |at: usize| f16::from_le_bytes([ladder[at], ladder[at + 1]]).to_f32();
        let (lo, step) = (half(0), half(2));
        if ![lo, lo + TOP_RUNG * step].iter().all(|log| log.exp2().is_finite()) {
            bail!(NonFinite, "row {row}: scales 2^({lo} + rung·{step}) are not finite");
        }
    }
    Ok(())
}

/// Rungs of a ladder.
const RUNGS: usize = 32;

/// The last rung.
const TOP_RUNG: f32 = 31.0;

/// Octaves that a ladder may span, widest first. Groups below the ladder take the lowest rung. A shorter ladder has finer
/// steps, which may save the other groups more than that costs.
const SPANS: [f32; 4] = [12.0, 9.0, 6.5, 4.5];

/// Octaves that a ladder may start below the smallest scale that avoids clipping. A group may lose less if its largest weight
/// is clipped, and a row of few groups has no lower rung unless the ladder starts lower.
const DROPS: [f32; 4] = [0.0, 0.3, 0.15, 0.45];

/// The step, in octaves, from which on the position of the rungs matters: the largest weight of a group can then be off by
/// 3 % or more.
const COARSE: f32 = 0.08;

/// How many of [`DROPS`] are tried for ladders with finer steps.
const FINE_DROPS: usize = 2;

/// How far a coarse ladder may be moved up, in steps.
const SHIFTS: [f32; 6] = [0.0, 0.16, 0.33, 0.5, 0.67, 0.84];

/// A group's rung is searched this many octaves below and above the scale that just avoids clipping.
const SEARCH: (f32, f32) = (0.6, 0.2);

/// Weights of 2^60 and more are refused, and no scale below 2^−60 is tried, so that squared errors stay within f32.
const MAX_LOG: f32 = 60.0;

fn encode(weights: &Weights, payload: &mut [u8]) -> Result<()> {
    let groups = weights.cols / GROUP;
    let rung_bytes = (groups * 5).div_ceil(8);
    let section_bytes = |rows: usize| [rows * groups * 16, rows * 4, rows * rung_bytes];
    let filled = weights.fill(payload, section_bytes, |first, values, [codes, ladders, rungs]| {
        if absmax(values) >= MAX_LOG.exp2() {
            let at = values
                .iter()
                .position(|value| value.abs() >= MAX_LOG.exp2())
                .unwrap_or(0);
            let wanted = "expected a magnitude below 2^60";
            return Err(weights.refuse(Kind::UnsupportedTensorType, first, at, wanted, values[at]));
        }
        let rows = values
            .chunks_exact(weights.cols)
            .zip(codes.chunks_exact_mut(groups * 16));
        let scales = ladders
            .as_chunks_mut()
            .0
            .iter_mut()
            .zip(rungs.chunks_exact_mut(rung_bytes));
        for ((values, codes), (ladder_bytes, rung_bytes)) in rows.zip(scales) {
            let row = values.as_chunks().0;
            let (ladder, rungs) = best_ladder(row);
            *ladder_bytes = ladder.to_bytes();
            for (index, (group, codes)) in row.iter().zip(codes.as_chunks_mut().0).enumerate() {
                put_rung(rung_bytes, index, rungs[index]);
                *codes = pack(group, ladder.scales[usize::from(rungs[index])]);
            }
        }
        Ok(())
    });
    filled.map(drop)
}

/// The ladder with the smallest error of the row among those tried, and the rung of every group.
fn best_ladder(row: &[Group]) -> (Ladder, Vec<u8>) {
    let mut best = (Ladder::new(f16::ZERO, f16::ZERO), vec![0; row.len()]);
    let mut smallest = f32::INFINITY;
    for ladder in ladders(row) {
        let (rungs, errors): (Vec<u8>, Vec<f32>) = row.iter().map(|group| ladder.best_rung(group)).unzip();
        let error = errors.iter().sum();
        if error < smallest {
            smallest = error;
            best = (ladder, rungs);
        }
    }
    best
}

/// The ladders to try. They reach from the smallest scale that a group of the row needs to avoid clipping, or from below it, to
/// the largest one or a little further. None for a row of zeros.
fn ladders(row: &[Group]) -> Vec<Ladder> {
    let logs = || row.iter().filter_map(unclipped_log);
    let Some(hi) = logs().reduce(f32::max) else {
        return Vec::new();
    };
    let span = hi - logs().fold(hi, f32::min);
    let mut ladders = Vec::new();
    for limit in SPANS.into_iter().filter(|&limit| limit == SPANS[0] || span > limit) {
        let tried = (0..DROPS.len()).flat_map(|drop| SHIFTS.map(|shift| (drop, shift)));
        for (index, shift) in tried {
            let drop = DROPS[index];
            let wanted = (span.min(limit) + drop) / TOP_RUNG;
            if wanted < COARSE && (shift > 0.0 || index >= FINE_DROPS) {
                continue;
            }
            let lo = f16::from_f32(hi - span.min(limit) - drop);
            let step = f16::from_f32((hi + shift * wanted - lo.to_f32()).max(0.0) / TOP_RUNG);
            ladders.push(Ladder::new(lo, step));
        }
    }
    ladders
}

/// The scales of a row. `lo` and `step` are the rounded values that the payload holds.
struct Ladder {
    lo: f16,
    step: f16,
    scales: [f32; RUNGS],
}

impl Ladder {
    fn new(lo: f16, step: f16) -> Ladder {
        let scale = |rung: usize| (lo.to_f64() + rung as f64 * step.to_f64()).exp2() as f32;
        Ladder {
            lo,
            step,
            scales: std::array::from_fn(scale),
        }
    }

    fn to_bytes(&self) -> [u8; 4] {
        let (lo, step) = (self.lo.to_le_bytes(), self.step.to_le_bytes());
        [lo[0], lo[1], step[0], step[1]]
    }

    /// The rung with the smallest error near the one that just avoids clipping, and that error. A group of zeros takes the
    /// lowest rung.
    fn best_rung(&self, group: &Group) -> (u8, f32) {
        let Some(log) = unclipped_log(group) else {
            return (0, 0.0);
        };
        // With a step of 0 all rungs are the same scale.
        let step = if self.step == f16::ZERO {
            f32::INFINITY
        } else {
            self.step.to_f32()
        };
        let rung = |log: f32| ((log - self.lo.to_f32()) / step).clamp(0.0, TOP_RUNG);
        let weighed = Weighed::new(group);
        let mut best = (0, f32::INFINITY);
        for rung in rung(log - SEARCH.0).floor() as u8..=rung(log + SEARCH.1).ceil() as u8 {
            let error = Levels::FOUR_BIT.error(&weighed, self.scales[usize::from(rung)]);
            if error < best.1 {
                best = (rung, error);
            }
        }
        best
    }
}

/// log2 of the smallest positive scale at which no weight leaves the levels −8..=7. `None` for a group of zeros.
fn unclipped_log(group: &Group) -> Option<f32> {
    let (min, max) = group
        .iter()
        .fold((0f32, 0f32), |(min, max), &value| (min.min(value), max.max(value)));
    let scale = (max / 7.0).max(min / -8.0);
    (scale > 0.0).then(|| scale.log2().max(-MAX_LOG))
}

/// Stores the 5-bit rung of the `index`-th group of a row.
fn put_rung(rung_bytes: &mut [u8], index: usize, rung: u8) {
    let bit = index * 5;
    let shifted = u16::from(rung) << (bit % 8);
    rung_bytes[bit / 8] |= shifted as u8;
    if shifted > 0xFF {
        rung_bytes[bit / 8 + 1] |= (shifted >> 8) as u8;
    }
}
