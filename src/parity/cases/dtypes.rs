//! The weight types of cases, and what is special about each.

use crate::dtype::Dtype;
use crate::dtype::planes::{Amount, Geometry, Planes};
use crate::parity::random::{Overlay, Values};

/// No limit of segments but the device's.
pub const WHOLE: u64 = u64::MAX;

/// The types that kernels can read.
pub fn runnable() -> impl Iterator<Item = Dtype> {
    Dtype::all().filter(|&dtype| Planes::of(dtype, 32).is_ok())
}

/// Weights that are judged besides plain ones, with the suffix of their names: other overlays, and small weights of types whose
/// kernels decode f16.
pub fn special(dtype: Dtype) -> impl Iterator<Item = (&'static str, Values)> {
    let has = |what: fn(Planes) -> bool| Planes::of(dtype, 32).is_ok_and(what);
    let (has_overlay, has_halves) = (has(Planes::has_overlay), has(Planes::has_halves));
    let all = [
        (has_overlay, " empty overlay", Values::overlay(Overlay::Empty)),
        (has_overlay, " dense overlay", Values::overlay(Overlay::Dense)),
        (has_halves, " subnormal", Values::SUBNORMAL),
    ];
    all.into_iter()
        .filter(|case| case.0)
        .map(|(_, what, values)| (what, values))
}

/// Bytes of the larger plane of 32 rows of `cols` columns.
pub fn segment_bytes(dtype: Dtype, cols: usize) -> u64 {
    let Ok(planes) = Planes::of(dtype, cols) else {
        return WHOLE;
    };
    // The widest rows, or an overlay entry for every fourth weight.
    let amount = match planes {
        Planes::BitsN => Amount {
            vectors: 32 * cols / 16,
            words: 0,
        },
        // Each of three tensors may begin and end within a pair of groups.
        Planes::Nib4Flat => Amount {
            vectors: cols + 12,
            words: 0,
        },
        _ => Amount {
            vectors: 0,
            words: 32 * cols / 4,
        },
    };
    let geometry = Geometry {
        planes,
        rows: 32,
        cols,
        parts: 3,
        amount,
    };
    geometry.code_bytes().max(geometry.scale_bytes()) as u64
}
