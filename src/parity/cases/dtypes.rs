//! The weight types of cases, and what is special about each.

use crate::dtype::Dtype;
use crate::dtype::planes::{Amount, Geometry, Planes};
use crate::parity::random::Overlay;

/// No limit of segments but the device's.
pub const WHOLE: u64 = u64::MAX;

/// The types that kernels can read.
pub fn runnable() -> impl Iterator<Item = Dtype> {
    Dtype::all().filter(|&dtype| Planes::of(dtype, 32).is_ok())
}

/// Overlays that are judged besides a sparse one, with the suffix of their names.
pub fn overlays(dtype: Dtype) -> impl Iterator<Item = (&'static str, Overlay)> {
    let all = [(" empty overlay", Overlay::Empty), (" dense overlay", Overlay::Dense)];
    let has = Planes::of(dtype, 32).is_ok_and(Planes::has_overlay);
    all.into_iter().filter(move |_| has)
}

/// Whether its kernels decode f16.
pub fn has_halves(dtype: Dtype) -> bool {
    Planes::of(dtype, 32).is_ok_and(Planes::has_halves)
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
