//! Encoder of q4tp: 4-bit codes, and per row a ladder of 32 scales, 2^(lo + rung·step), of which each group names a rung.

use super::q4::{Group, pack, squared_error};
use super::{GROUP, Source, absmax};
use crate::error::{Kind, Result};
use half::f16;

/// Rungs above the first.
const TOP_RUNG: f32 = 31.0;

/// How many octaves a ladder may span. Groups further below the row's largest take the lowest rung; what that costs them is
/// nothing beside the rounding of the largest, whereas a longer ladder would be too coarse for all.
const MAX_SPAN: f32 = 12.0;

/// Weights from 2^60 on are refused, and scales below 2^−60 not used: squared errors stay inside of f32.
const MAX_LOG: f32 = 60.0;

/// The octaves below and above the scale that just avoids clipping in which the best rung is looked for.
const SEARCH: (f32, f32) = (0.6, 0.2);

/// `[nibbles rows·groups·16][rows × (f16 lo, f16 step)][rows × ⌈groups·5/8⌉ bytes of 5-bit rungs, LSB first]`.
pub fn q4tp(source: &Source, payload: &mut [u8]) -> Result<()> {
    let groups = source.cols / GROUP;
    let rung_bytes = (groups * 5).div_ceil(8);
    source.fill(
        payload,
        |rows| [rows * groups * 16, rows * 4, rows * rung_bytes],
        |first, values, [nibbles, ladders, rungs]| {
            if absmax(values) >= MAX_LOG.exp2() {
                let at = values
                    .iter()
                    .position(|value| value.abs() >= MAX_LOG.exp2())
                    .unwrap_or(0);
                return Err(source.refuse(
                    Kind::UnsupportedTensorType,
                    first,
                    at,
                    "wanted a magnitude below 2^60",
                    values[at],
                ));
            }
            let rows = values
                .chunks_exact(source.cols)
                .zip(nibbles.chunks_exact_mut(groups * 16));
            let planes = ladders
                .as_chunks_mut::<4>()
                .0
                .iter_mut()
                .zip(rungs.chunks_exact_mut(rung_bytes));
            for ((values, nibbles), (ladder_bytes, rungs)) in rows.zip(planes) {
                let row = values.as_chunks().0;
                let ladder = Ladder::fit(row);
                *ladder_bytes = ladder.to_bytes();
                for (index, (group, nibbles)) in row.iter().zip(nibbles.as_chunks_mut().0).enumerate() {
                    let rung = ladder.best_rung(group);
                    put_rung(rungs, index, rung);
                    *nibbles = pack(group, ladder.scale(rung));
                }
            }
            Ok(())
        },
    )
}

/// A row's scales. `lo` and `step` are the rounded values that the payload holds.
struct Ladder {
    lo: f16,
    step: f16,
}

impl Ladder {
    /// The ladder from the smallest to the largest scale that the row's groups ask for. A row of zeros gives zeros.
    fn fit(row: &[Group]) -> Ladder {
        let logs = || row.iter().filter_map(unclipped_log);
        let Some(hi) = logs().reduce(f32::max) else {
            return Ladder {
                lo: f16::ZERO,
                step: f16::ZERO,
            };
        };
        let lo = logs().fold(hi, f32::min).max(hi - MAX_SPAN);
        let lo = f16::from_f32(lo);
        let step = f16::from_f32((hi - lo.to_f32()).max(0.0) / TOP_RUNG);
        Ladder { lo, step }
    }

    fn to_bytes(&self) -> [u8; 4] {
        let (lo, step) = (self.lo.to_le_bytes(), self.step.to_le_bytes());
        [lo[0], lo[1], step[0], step[1]]
    }

    fn scale(&self, rung: u8) -> f32 {
        (self.lo.to_f64() + f64::from(rung) * self.step.to_f64()).exp2() as f32
    }

    /// The rung with the smallest squared error near the one that just avoids clipping; the lowest for a group of zeros.
    fn best_rung(&self, group: &Group) -> u8 {
        let (Some(log), true) = (unclipped_log(group), self.step > f16::ZERO) else {
            return 0;
        };
        let rung = |log: f32| ((log - self.lo.to_f32()) / self.step.to_f32()).clamp(0.0, TOP_RUNG);
        let candidates = rung(log - SEARCH.0).floor() as u8..=rung(log + SEARCH.1).ceil() as u8;
        let mut best = (0, f32::INFINITY);
        for rung in candidates {
            let error = squared_error(group, self.scale(rung));
            if error < best.1 {
                best = (rung, error);
            }
        }
        best.0
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
fn put_rung(rungs: &mut [u8], index: usize, rung: u8) {
    let bit = index * 5;
    let shifted = u16::from(rung) << (bit % 8);
    rungs[bit / 8] |= shifted as u8;
    if shifted > 0xFF {
        rungs[bit / 8 + 1] |= (shifted >> 8) as u8;
    }
}
