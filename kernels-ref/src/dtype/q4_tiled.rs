//! q4_tiled: per group of 32 `[f16 scale][16 bytes of nibbles]`, value (q−8)·scale, nibbles as in q4_block.

use super::layout::{Bytes, groups_per_row, half};
use super::q4_block::decode_group;
use super::{BadPayload, RowDecoder};

const TILE: usize = 18;

struct Q4Tiled<'a> {
    tiles: &'a [u8],
    groups: usize,
}

/// A decoder of q4_tiled. Errors: columns that are no whole groups, any other length.
pub fn decoder(payload: &[u8], rows: usize, cols: usize) -> Result<Box<dyn RowDecoder + '_>, BadPayload> {
    let groups = groups_per_row(rows, cols)?;
    Bytes::none().plus(&[rows, groups, TILE]).exactly(payload)?;
    Ok(Box::new(Q4Tiled { tiles: payload, groups }))
}

impl RowDecoder for Q4Tiled<'_> {
    fn row(&self, row: usize, out: &mut [f32]) {
        let tiles = &self.tiles[row * self.groups * TILE..][..self.groups * TILE];
        for (values, tile) in out.as_chunks_mut().0.iter_mut().zip(tiles.chunks_exact(TILE)) {
            decode_group(&tile[2..], half(tile), values);
        }
    }
}
