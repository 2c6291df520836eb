//! q4_block and q4_tiled: 4-bit codes q with value (q−8)·scale and an f16 scale per group of 32.
//!
//! q4_block is `[u8 ⌈n/32⌉·16][f16 ⌈n/32⌉]`, groups over the flattened tensor of n elements, the last one filled up with
//! zeros. q4_tiled is `[f16][16 bytes]` per group. Element 2k of a group is the low nibble of byte k, element 2k+1 the high
//! one.

use super::codes::{Codes, Row, unsigned};
use super::payload::{GROUP, Section, fill_halves, tile_scales};
use super::planes::{Contents, Planes, Repack};
use super::quantise::Weights;
use super::quantise::levels::{Group, Levels};
use super::spec::{Encode, Shapes, Spec, Tail};
use crate::error::Result;
use cmf_kernels_ref::dtype::q4;

/// Bytes of a group of q4_tiled.
const TILE: usize = 18;

/// The standard deviation of random codes.
pub const CODE_DEVIATION: f64 = 4.6;

pub const Q4_BLOCK: Spec = Spec {
    id: Some(4),
    gguf: None,
    name: "q4_block",
    quant: "q4",
    code_bits: 4,
    shapes: Shapes::FlatGroups,
    max_cols: u64::MAX,
    sections: &[Section::Groups(16), Section::Groups(2)],
    tail: Tail::NONE,
    decoder: q4::q4_block,
    encode: Encode::Exact(encode_block),
    planes: |cols| match cols.is_multiple_of(GROUP) {
        true => Ok(Planes::Nib4),
        false => Ok(Planes::Nib4Flat),
    },
    repack: Repack {
        open: |payload| match payload.cols.is_multiple_of(GROUP) {
            true => Ok(Contents::Even),
            false => Ok(Contents::Flat),
        },
        ..Repack::COPY
    },
    verify: |_| Ok(()),
    random: Some(|payload, [rows, cols], deviation, random| {
        let (codes, scales) = payload.split_at_mut(rows * cols / 2);
        random(codes);
        fill_halves(scales, deviation / CODE_DEVIATION);
    }),
};

pub const Q4_TILED: Spec = Spec {
    id: Some(11),
    gguf: None,
    name: "q4_tiled",
    quant: "q4t",
    shapes: Shapes::GroupRows,
    sections: &[Section::Groups(TILE as u64)],
    decoder: q4::q4_tiled,
    encode: Encode::Exact(encode_tiled),
    planes: |_| Ok(Planes::Nib4),
    repack: Repack {
        codes: |payload, row, out| {
            let tiles = payload.row(0, row)?.as_chunks::<TILE>().0;
            for (tile, out) in tiles.iter().zip(out.as_chunks_mut::<16>().0) {
                out.copy_from_slice(&tile[2..]);
            }
            Ok(())
        },
        scales: tile_scales::<TILE>,
        ..Repack::COPY
    },
    random: Some(|payload, _, deviation, random| {
        random(payload);
        for tile in payload.as_chunks_mut::<TILE>().0 {
            fill_halves(&mut tile[..2], deviation / CODE_DEVIATION);
        }
    }),
    ..Q4_BLOCK
};

fn encode_block(weights: &Weights, payload: &mut [u8]) -> Result<()> {
    let groups = |rows: usize| (rows * weights.cols).div_ceil(GROUP);
    let filled = weights.fill(
        payload,
        |rows| [groups(rows) * 16, groups(rows) * 2],
        |first, values, [codes, scales]| {
            let planes = codes.as_chunks_mut().0.iter_mut().zip(scales.as_chunks_mut().0);
            for (index, (values, (codes, scale_bytes))) in values.chunks(GROUP).zip(planes).enumerate() {
                let mut group = [0.0; GROUP];
                group[..values.len()].copy_from_slice(values);
                let scale = Levels::FOUR_BIT.checked_scale(weights, first, index, &group)?;
                *scale_bytes = scale.to_le_bytes();
                *codes = pack(&group, scale.to_f32());
            }
            Ok(())
        },
    );
    filled.map(drop)
}

fn encode_tiled(weights: &Weights, payload: &mut [u8]) -> Result<()> {
    let filled = weights.fill(
        payload,
        |rows| [rows * weights.cols / GROUP * TILE],
        |first, values, [tiles]| {
            let groups = values.as_chunks().0.iter().zip(tiles.as_chunks_mut::<TILE>().0);
            for (index, (group, tile)) in groups.enumerate() {
                let scale = Levels::FOUR_BIT.checked_scale(weights, first, index, group)?;
                tile[..2].copy_from_slice(&scale.to_le_bytes());
                tile[2..].copy_from_slice(&pack(group, scale.to_f32()));
            }
            Ok(())
        },
    );
    filled.map(drop)
}

/// The 16 bytes of a group's codes.
pub fn pack(group: &Group, scale: f32) -> [u8; GROUP / 2] {
    nibbles(&Levels::FOUR_BIT.codes(group, scale))
}

fn nibbles(codes: &[u8; GROUP]) -> [u8; GROUP / 2] {
    std::array::from_fn(|k| codes[2 * k] | codes[2 * k + 1] << 4)
}

/// Appends a group of q4_tiled. Errors: `UnsupportedTensorType` for codes outside of −8 to 7.
pub(super) fn put_tile(group: &Codes, _bits: u8, _col: usize, row: &mut Row) -> Result<()> {
    row.packed.extend(group.scale.to_le_bytes());
    row.packed.extend(nibbles(&unsigned(&group.codes, 8, 4)?));
    Ok(())
}

/// Appends a group of q4_block. Errors: as [`put_tile`].
pub(super) fn put_block(group: &Codes, _bits: u8, _col: usize, row: &mut Row) -> Result<()> {
    row.scales.extend(group.scale.to_le_bytes());
    row.packed.extend(nibbles(&unsigned(&group.codes, 8, 4)?));
    Ok(())
}
