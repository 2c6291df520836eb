//! Encoders of the 4-bit types with an f16 scale per group, q4_block and q4_tiled. A code q means (q−8)·scale.

use super::levels::{Group, Levels};
use super::{GROUP, Source};
use crate::error::Result;

/// `[u8 ⌈n/32⌉·16][f16 ⌈n/32⌉]`, groups over the flattened matrix, the last one filled up with zeros.
pub fn q4_block(source: &Source, payload: &mut [u8]) -> Result<()> {
    let groups = |rows: usize| (rows * source.cols).div_ceil(GROUP);
    let filled = source.fill(
        payload,
        |rows| [groups(rows) * 16, groups(rows) * 2],
        |first, values, [codes, scales]| {
            let planes = codes.as_chunks_mut().0.iter_mut().zip(scales.as_chunks_mut().0);
            for (index, (values, (codes, scale_bytes))) in values.chunks(GROUP).zip(planes).enumerate() {
                let mut group = [0.0; GROUP];
                group[..values.len()].copy_from_slice(values);
                let scale = Levels::FOUR_BIT.checked_scale(source, first, index, &group)?;
                *scale_bytes = scale.to_le_bytes();
                *codes = pack(&group, scale.to_f32());
            }
            Ok(())
        },
    );
    filled.map(drop)
}

/// Per group `[f16][16 bytes]`.
pub fn q4_tiled(source: &Source, payload: &mut [u8]) -> Result<()> {
    let filled = source.fill(
        payload,
        |rows| [rows * source.cols / GROUP * 18],
        |first, values, [tiles]| {
            let groups = values.as_chunks().0.iter().zip(tiles.as_chunks_mut::<18>().0);
            for (index, (group, tile)) in groups.enumerate() {
                let scale = Levels::FOUR_BIT.checked_scale(source, first, index, group)?;
                tile[..2].copy_from_slice(&scale.to_le_bytes());
                tile[2..].copy_from_slice(&pack(group, scale.to_f32()));
            }
            Ok(())
        },
    );
    filled.map(drop)
}

/// The 16 bytes of codes: element 2k in the low nibble of byte k, element 2k+1 in the high one.
pub fn pack(group: &Group, scale: f32) -> [u8; GROUP / 2] {
    let codes = Levels::FOUR_BIT.codes(group, scale);
    std::array::from_fn(|k| codes[2 * k] | codes[2 * k + 1] << 4)
}
