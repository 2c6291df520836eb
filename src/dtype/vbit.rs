//! vbit and vbit_ro: rows of 3, 4, 5, 6 or 8 bits per weight. A code u has the value (u−L)·scale, L = 2^(bits−1)−1.
//!
//! `[u8 bits: rows][f16 scales: rows·groups]`, in vbit_ro then `[u32 row_offsets: rows+1]`, then the packed rows, most
//! significant bits first.

use super::codes::{Codes, Row, unsigned};
use super::payload::{GROUP, Payload, Section, row_table, slice, u32_at};
use super::planes::{Contents, Planes, Repack, Widths};
use super::quantise::levels::Levels;
use super::quantise::widths::{WIDTHS, amplitudes, spread};
use super::quantise::{Settings, Weights};
use super::spec::{Encode, Shapes, Size, Spec, Tail};
use crate::error::{Result, bail};
use cmf_kernels_ref::dtype::vbit;

pub const VBIT: Spec = Spec {
    id: Some(8),
    gguf: None,
    name: "vbit",
    quant: "",
    code_bits: 4,
    shapes: Shapes::GroupRows,
    max_cols: u64::MAX,
    sections: &[Section::Rows(1), Section::Groups(2)],
    tail: Tail {
        // The narrowest row has 3 bits a weight.
        size: |rows, cols| rows.checked_mul(cols / 8 * 3).map(Size::AtLeast),
        select: |payload, keep, selected| select_rows(payload, payload.tail()?, &starts(payload)?, keep, selected),
        widths: Some(widths),
        ..Tail::NONE
    },
    decoder: vbit::vbit,
    encode: Encode::Sized(|weights, settings| encode(weights, settings, false)),
    planes: |_| Ok(Planes::BitsN),
    repack: Repack {
        open: |payload| {
            let packed = payload.tail()?;
            Ok(Contents::Widths(Widths::open(
                payload,
                widths(payload)?,
                packed,
                starts(payload)?,
            )?))
        },
        scales: |payload, row, out| payload.copy_row(1, row, out),
        ..Repack::COPY
    },
    verify: |_| Ok(()),
    random: None,
};

pub const VBIT_RO: Spec = Spec {
    id: Some(10),
    gguf: None,
    name: "vbit_ro",
    quant: "vbit",
    tail: Tail {
        size: |rows, cols| {
            let table = rows.checked_add(1)?.checked_mul(4)?;
            rows.checked_mul(cols / 8 * 3)?.checked_add(table).map(Size::AtLeast)
        },
        select: |payload, keep, selected| {
            let (table, packed) = row_table(payload.tail()?, payload.rows)?;
            // No offset exceeds the one in the file, because the gaps between rows are left out as well.
            let mut end = 0u32;
            selected.extend_from_slice(&end.to_le_bytes());
            for &row in keep {
                end += row_bytes(payload, widths(payload)?[row]) as u32;
                selected.extend_from_slice(&end.to_le_bytes());
            }
            select_rows(payload, packed, &table_starts(table, payload.rows), keep, selected)
        },
        ..VBIT.tail
    },
    decoder: vbit::vbit_ro,
    encode: Encode::Sized(|weights, settings| encode(weights, settings, true)),
    repack: Repack {
        open: |payload| {
            let (table, packed) = row_table(payload.tail()?, payload.rows)?;
            let starts = table_starts(table, payload.rows);
            Ok(Contents::Widths(Widths::open(
                payload,
                widths(payload)?,
                packed,
                starts,
            )?))
        },
        ..VBIT.repack
    },
    ..VBIT
};

/// The bit width of every row.
fn widths<'a>(payload: &Payload<'a>) -> Result<&'a [u8]> {
    slice(payload.bytes, 0, payload.rows)
}

/// Bytes of a packed row.
fn row_bytes(payload: &Payload, width: u8) -> usize {
    payload.groups() * 4 * usize::from(width)
}

/// Where each row begins in the packed area of vbit.
fn starts(payload: &Payload) -> Result<Vec<usize>> {
    let mut end = 0usize;
    let start = |&width: &u8| {
        let start = end;
        end = end.saturating_add(row_bytes(payload, width));
        start
    };
    Ok(widths(payload)?.iter().map(start).collect())
}

/// Where each row begins in the packed area of vbit_ro.
fn table_starts(table: &[u8], rows: usize) -> Vec<usize> {
    (0..rows).map(|row| u32_at(table, row) as usize).collect()
}

/// Appends the packed rows `keep`.
fn select_rows(
    payload: &Payload,
    packed: &[u8],
    starts: &[usize],
    keep: &[usize],
    selected: &mut Vec<u8>,
) -> Result<()> {
    for &row in keep {
        selected.extend_from_slice(slice(packed, starts[row], row_bytes(payload, widths(payload)?[row]))?);
    }
    Ok(())
}

/// `table`: whether the offsets of vbit_ro are written.
///
/// Errors: `Parse` for widths that are not one of [`WIDTHS`] for every row; `UnsupportedTensorType` for a magnitude whose
/// scale does not fit f16, and with `table` for packed rows of 2^32 bytes or more.
fn encode(weights: &Weights, settings: &Settings, table: bool) -> Result<Vec<u8>> {
    let chosen;
    let widths = match settings.widths {
        Some(widths) => widths,
        None => {
            chosen = spread(&amplitudes(weights)?, settings.mean_bits)?;
            &chosen
        }
    };
    if widths.len() != weights.rows {
        bail!(
            Parse,
            "expected {} bit widths, one per row, found {}",
            weights.rows,
            widths.len()
        );
    }
    if let Some(row) = widths.iter().position(|width| !WIDTHS.contains(width)) {
        bail!(
            Parse,
            "row {row}: expected a width of 3, 4, 5, 6 or 8 bits, found {}",
            widths[row]
        );
    }
    let groups = weights.cols / GROUP;
    let mut starts = Vec::with_capacity(weights.rows + 1);
    starts.push(0usize);
    for &width in widths {
        starts.push(starts[starts.len() - 1] + groups * 4 * usize::from(width));
    }
    let packed = starts[weights.rows];
    if table && u32::try_from(packed).is_err() {
        bail!(
            UnsupportedTensorType,
            "vbit_ro holds packed rows of less than 2^32 bytes in total, found {packed}"
        );
    }
    // The first word of the table is 0 and is written with the first row.
    let words = |rows: usize| if table && rows > 0 { rows + 1 } else { 0 };
    let sections = |rows: usize| [rows, rows * groups * 2, words(rows) * 4, starts[rows]];
    let mut payload = vec![0; sections(weights.rows).iter().sum()];
    weights.fill(
        &mut payload,
        sections,
        |first, values, [bits, scales, offsets, packed]| {
            let rows = values.len() / weights.cols;
            let widths = &widths[first..first + rows];
            bits.copy_from_slice(widths);
            let ends = starts[first + 1..=first + rows].iter().rev();
            for (bytes, &end) in offsets.as_rchunks_mut().1.iter_mut().rev().zip(ends) {
                *bytes = (end as u32).to_le_bytes();
            }
            let mut scales = scales.as_chunks_mut().0.iter_mut();
            let mut rest = packed;
            for (index, group) in values.as_chunks::<GROUP>().0.iter().enumerate() {
                let width = widths[index / groups];
                let levels = Levels::of_bits(width);
                let scale = levels.checked_scale(weights, first, index, group)?;
                if let Some(bytes) = scales.next() {
                    *bytes = scale.to_le_bytes();
                }
                let (bytes, after) = std::mem::take(&mut rest).split_at_mut(usize::from(width) * 4);
                pack(&levels.codes(group, scale.to_f32()), usize::from(width), bytes);
                rest = after;
            }
            Ok(())
        },
    )?;
    Ok(payload)
}

/// Appends a group of codes of `bits` bits. Errors: `UnsupportedTensorType` for a code that they do not hold.
pub(super) fn put(group: &Codes, bits: u8, _col: usize, row: &mut Row) -> Result<()> {
    if !WIDTHS.contains(&bits) {
        bail!(UnsupportedTensorType, "a width of {bits} bits");
    }
    let (width, start) = (usize::from(bits), row.packed.len());
    let codes = unsigned(&group.codes, (1 << (bits - 1)) - 1, bits.into())?;
    row.scales.extend(group.scale.to_le_bytes());
    row.packed.resize(start + width * 4, 0);
    pack(&codes, width, &mut row.packed[start..]);
    Ok(())
}

/// Codes of `width` bits, most significant bit first: eight of them fill `width` bytes.
fn pack(codes: &[u8; GROUP], width: usize, bytes: &mut [u8]) {
    for (eight, bytes) in codes.as_chunks::<8>().0.iter().zip(bytes.chunks_exact_mut(width)) {
        let word = eight.iter().fold(0u64, |word, &code| word << width | u64::from(code));
        bytes.copy_from_slice(&word.to_be_bytes()[8 - width..]);
    }
}
