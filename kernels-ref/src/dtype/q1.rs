//! q1: per group of 32 `[f16 scale][4 bytes]`, bit k of byte j is weight 8j+k, value scale·(2·bit−1).

use super::layout::{Bytes, GROUP, groups_per_row, half};
use super::{BadPayload, RowDecoder};

pub(super) const TILE: usize = 6;

struct Q1<'a> {
    tiles: &'a [u8],
    groups: usize,
}

/// A decoder of q1. Errors: columns that are no whole groups, any other length.
pub fn decoder(payload: &[u8], rows: usize, cols: usize) -> Result<Box<dyn RowDecoder + '_>, BadPayload> {
    let groups = groups_per_row(rows, cols)?;
    Bytes::none().plus(&[rows, groups, TILE]).exactly(payload)?;
    Ok(Box::new(Q1 { tiles: payload, groups }))
}

/// The weights of one row's tiles.
pub(super) fn decode_tiles(tiles: &[u8], out: &mut [f32]) {
    for (values, tile) in out.as_chunks_mut::<GROUP>().0.iter_mut().zip(tiles.chunks_exact(TILE)) {
        let scale = half(tile);
        let bits = u32::from_le_bytes([tile[2], tile[3], tile[4], tile[5]]);
        for (k, value) in values.iter_mut().enumerate() {
            *value = if bits >> k & 1 == 1 { scale } else { -scale };
        }
    }
}

impl RowDecoder for Q1<'_> {
    fn row(&self, row: usize, out: &mut [f32]) {
        decode_tiles(&self.tiles[row * self.groups * TILE..][..self.groups * TILE], out);
    }
}
