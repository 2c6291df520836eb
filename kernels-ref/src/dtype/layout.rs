//! Payload lengths and little-endian fields, shared by the element types.

use super::BadPayload;
use half::f16;

/// Weights per group, in every type whose scales belong to groups.
pub const GROUP: usize = 32;

/// A checked sum of products. `None` once anything overflows.
pub struct Bytes(Option<usize>);

impl Bytes {
    pub fn none() -> Bytes {
        Bytes(Some(0))
    }

    /// Adds the product of `factors`.
    pub fn plus(self, factors: &[usize]) -> Bytes {
        let product = factors.iter().try_fold(1usize, |product, &f| product.checked_mul(f));
        Bytes(self.0.and_then(|sum| product.and_then(|p| sum.checked_add(p))))
    }

    /// The sum. Errors: it overflowed.
    pub fn get(self) -> Result<usize, BadPayload> {
        self.0.ok_or_else(|| BadPayload("the payload's size overflows".into()))
    }

    /// Refuses a payload of any other length.
    pub fn exactly(self, payload: &[u8]) -> Result<(), BadPayload> {
        let wanted = self.get()?;
        if payload.len() != wanted {
            return Err(BadPayload(format!("expected {wanted} bytes, found {}", payload.len())));
        }
        Ok(())
    }
}

/// Refuses matrices without elements. The allocations in the decoders rely on this: every row and every column then costs
/// bytes of payload.
pub fn check_matrix(rows: usize, cols: usize) -> Result<(), BadPayload> {
    if rows == 0 || cols == 0 {
        return Err(BadPayload(format!(
            "expected at least one row and one column, found {rows} x {cols}"
        )));
    }
    Ok(())
}

/// Groups per row. Errors: rows that are not whole groups.
pub fn groups_per_row(rows: usize, cols: usize) -> Result<usize, BadPayload> {
    check_matrix(rows, cols)?;
    if !cols.is_multiple_of(GROUP) {
        return Err(BadPayload(format!(
            "expected columns in whole groups of {GROUP}, found {cols}"
        )));
    }
    Ok(cols / GROUP)
}

/// Splits `payload` after `len` bytes. Errors: it is shorter.
pub fn split<'a>(payload: &'a [u8], len: usize, what: &str) -> Result<(&'a [u8], &'a [u8]), BadPayload> {
    payload
        .split_at_checked(len)
        .ok_or_else(|| BadPayload(format!("expected {len} bytes of {what}, found {}", payload.len())))
}

/// Row `row` of a section with `len` bytes per row.
pub fn part(section: &[u8], row: usize, len: usize) -> &[u8] {
    &section[row * len..][..len]
}

/// The `index`-th f16 of a section. Payloads have no alignment.
pub fn half_at(section: &[u8], index: usize) -> f32 {
    half(&section[2 * index..])
}

/// The f16 at the start of `bytes`.
pub fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

/// The `index`-th u32 of a section.
pub fn u32_at(section: &[u8], index: usize) -> u32 {
    let at = 4 * index;
    u32::from_le_bytes([section[at], section[at + 1], section[at + 2], section[at + 3]])
}

/// Checks a table of `rows + 1` u32 offsets: it starts at 0 and never decreases.
pub fn check_offsets(table: &[u8], rows: usize, name: &str) -> Result<(), BadPayload> {
    if u32_at(table, 0) != 0 {
        return Err(BadPayload(format!(
            "expected {name}[0] = 0, found {}",
            u32_at(table, 0)
        )));
    }
    for row in 0..rows {
        let (from, to) = (u32_at(table, row), u32_at(table, row + 1));
        if to < from {
            return Err(BadPayload(format!(
                "expected {name}[{}] >= {from}, found {to}",
                row + 1
            )));
        }
    }
    Ok(())
}
