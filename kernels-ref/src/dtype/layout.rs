//! Measuring a payload and reading its little-endian fields, shared by the element types. Knows no element type.

use super::BadPayload;
use half::f16;

/// Weights per group, wherever a scale belongs to a group.
pub const GROUP: usize = 32;

/// A sum of products that must stay below the address space. `None` once anything overflows.
pub struct Bytes(Option<usize>);

impl Bytes {
    pub fn none() -> Bytes {
        Bytes(Some(0))
    }

    /// This many and one more plane, as large as the product of `factors`.
    pub fn plus(self, factors: &[usize]) -> Bytes {
        let plane = factors.iter().try_fold(1usize, |product, &f| product.checked_mul(f));
        Bytes(self.0.and_then(|sum| plane.and_then(|p| sum.checked_add(p))))
    }

    /// The number, or why there is none.
    pub fn get(self) -> Result<usize, BadPayload> {
        self.0.ok_or_else(|| BadPayload("the payload's size overflows".into()))
    }

    /// Refuses a payload of any other length.
    pub fn exactly(self, payload: &[u8]) -> Result<(), BadPayload> {
        let wanted = self.get()?;
        if payload.len() != wanted {
            return Err(BadPayload(format!("wanted {wanted} bytes, found {}", payload.len())));
        }
        Ok(())
    }
}

/// Refuses matrices without elements: every allocation below relies on rows and columns costing bytes of payload.
pub fn check_matrix(rows: usize, cols: usize) -> Result<(), BadPayload> {
    if rows == 0 || cols == 0 {
        return Err(BadPayload(format!(
            "wanted at least one row and one column, found {rows} x {cols}"
        )));
    }
    Ok(())
}

/// Groups per row of a matrix whose rows must be whole groups.
pub fn groups_per_row(rows: usize, cols: usize) -> Result<usize, BadPayload> {
    check_matrix(rows, cols)?;
    if !cols.is_multiple_of(GROUP) {
        return Err(BadPayload(format!(
            "wanted columns in whole groups of {GROUP}, found {cols}"
        )));
    }
    Ok(cols / GROUP)
}

/// Splits `payload` after `len` bytes. Errors: it is shorter.
pub fn split<'a>(payload: &'a [u8], len: usize, what: &str) -> Result<(&'a [u8], &'a [u8]), BadPayload> {
    payload
        .split_at_checked(len)
        .ok_or_else(|| BadPayload(format!("wanted {len} bytes of {what}, found {}", payload.len())))
}

/// The `index`-th f16 of a plane that may start at any address.
pub fn half_at(plane: &[u8], index: usize) -> f32 {
    half(&plane[2 * index..])
}

/// The f16 at the start of `bytes`.
pub fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

/// The `index`-th u32 of a plane that may start at any address.
pub fn u32_at(plane: &[u8], index: usize) -> u32 {
    let at = 4 * index;
    u32::from_le_bytes([plane[at], plane[at + 1], plane[at + 2], plane[at + 3]])
}

/// `count + 1` u32 offsets that start at 0 and never decrease, as the two-plane types store them per row.
pub fn check_offsets(plane: &[u8], count: usize, what: &str) -> Result<(), BadPayload> {
    if u32_at(plane, 0) != 0 {
        return Err(BadPayload(format!("wanted {what}[0] = 0, found {}", u32_at(plane, 0))));
    }
    for row in 0..count {
        let (from, to) = (u32_at(plane, row), u32_at(plane, row + 1));
        if to < from {
            return Err(BadPayload(format!("wanted {what}[{}] >= {from}, found {to}", row + 1)));
        }
    }
    Ok(())
}
