//! Encoder of q4tp: 4-bit codes, and per row a ladder of 32 scales, 2^(lo + rung·step), of which each group names a rung.

use super::levels::{Group, Levels, Weighed};
use super::q4::pack;
use super::{GROUP, Source, absmax};
use crate::error::{Kind, Result};
use half::f16;

/// Rungs of a ladder.
const RUNGS: usize = 32;

/// The last rung.
const TOP_RUNG: f32 = 31.0;

/// How many octaves a ladder may span, the widest first. Groups further below the row's largest take the lowest rung; what
/// that costs them may be nothing beside the rounding of the others, for which a longer ladder is too coarse.
const SPANS: [f32; 4] = [12.0, 9.0, 6.5, 4.5];

/// How many octaves below the smallest scale that avoids clipping a ladder may start: a group may lose less if its largest
/// weight is clipped, and in a row of few groups there is no lower rung unless the ladder makes one.
const DROPS: [f32; 4] = [0.0, 0.3, 0.15, 0.45];

/// Steps, in octaves, from which on it matters where rungs fall: a group's largest weight is then off by 3 % and more.
const COARSE: f32 = 0.08;

/// The drops of ladders that are not coarse.
const FINE_DROPS: usize = 2;

/// How far a coarse ladder may be moved up, in steps.
const SHIFTS: [f32; 6] = [0.0, 0.16, 0.33, 0.5, 0.67, 0.84];

/// The octaves below and above the scale that just avoids clipping in which a group's rung is looked for.
const SEARCH: (f32, f32) = (0.6, 0.2);

/// Weights from 2^60 on are refused, and scales below 2^−60 not asked for: squared errors stay inside of f32.
const MAX_LOG: f32 = 60.0;

/// `[nibbles rows·groups·16][rows × (f16 lo, f16 step)][rows × ⌈groups·5/8⌉ bytes of 5-bit rungs, LSB first]`.
pub fn q4tp(source: &Source, payload: &mut [u8]) -> Result<()> {
    let groups = source.cols / GROUP;
    let rung_bytes = (groups * 5).div_ceil(8);
    let plane_bytes = |rows: usize| [rows * groups * 16, rows * 4, rows * rung_bytes];
    let filled = source.fill(payload, plane_bytes, |first, values, [nibbles, ladders, rungs]| {
        if absmax(values) >= MAX_LOG.exp2() {
            let at = values
                .iter()
                .position(|value| value.abs() >= MAX_LOG.exp2())
                .unwrap_or(0);
            let wanted = "wanted a magnitude below 2^60";
            return Err(source.refuse(Kind::UnsupportedTensorType, first, at, wanted, values[at]));
        }
        let rows = values
            .chunks_exact(source.cols)
            .zip(nibbles.chunks_exact_mut(groups * 16));
        let planes = ladders
            .as_chunks_mut()
            .0
            .iter_mut()
            .zip(rungs.chunks_exact_mut(rung_bytes));
        for ((values, nibbles), (ladder_bytes, rung_bytes)) in rows.zip(planes) {
            let row = values.as_chunks().0;
            let (ladder, rungs) = best_ladder(row);
            *ladder_bytes = ladder.to_bytes();
            for (index, (group, nibbles)) in row.iter().zip(nibbles.as_chunks_mut().0).enumerate() {
                put_rung(rung_bytes, index, rungs[index]);
                *nibbles = pack(group, ladder.scales[usize::from(rungs[index])]);
            }
        }
        Ok(())
    });
    filled.map(drop)
}

/// Of the ladders tried the one that leaves the row the smallest error, and the rung of every group.
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

/// The ladders to try: up to the largest scale that a group of the row needs to avoid clipping or a little further, from the
/// smallest one on or below. None for a row of zeros.
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

/// A row's scales. `lo` and `step` are the rounded values that the payload holds.
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

    /// The rung with the smallest error near the one that just avoids clipping, and that error. The lowest rung for a
    /// group of zeros.
    fn best_rung(&self, group: &Group) -> (u8, f32) {
        let Some(log) = unclipped_log(group) else {
            return (0, 0.0);
        };
        // Without steps all rungs are the same.
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
