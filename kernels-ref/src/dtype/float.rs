//! f32, f16 and bf16: one value per weight, little-endian; and bytes.

use super::Decoder;
use super::layout::{Bytes, check_matrix, part};
use half::slice::HalfFloatSliceExt;

/// A decoder of `[f32 rows·cols]`. Errors: any other length.
pub fn f32(payload: &[u8], rows: usize, cols: usize) -> Decoder<'_> {
    check(payload, rows, cols, 4)?;
    Ok(Box::new(move |row: usize, out: &mut [f32]| {
        for (value, b) in out.iter_mut().zip(part(payload, row, cols * 4).as_chunks().0) {
            *value = f32::from_le_bytes(*b);
        }
    }))
}

/// A decoder of `[f16 rows·cols]`. Errors: any other length.
pub fn f16(payload: &[u8], rows: usize, cols: usize) -> Decoder<'_> {
    check(payload, rows, cols, 2)?;
    Ok(Box::new(move |row: usize, out: &mut [f32]| {
        // Aligned copies, because the conversion instructions take many aligned halves at a time.
        let mut halves = [half::f16::ZERO; 64];
        let bytes = part(payload, row, cols * 2);
        for (values, bytes) in out.chunks_mut(halves.len()).zip(bytes.chunks(2 * halves.len())) {
            for (half, b) in halves.iter_mut().zip(bytes.as_chunks().0) {
                *half = half::f16::from_le_bytes(*b);
            }
            halves[..values.len()].convert_to_f32_slice(values);
        }
    }))
}

/// A decoder of `[bf16 rows·cols]`, the upper halves of f32 values. Errors: any other length.
pub fn bf16(payload: &[u8], rows: usize, cols: usize) -> Decoder<'_> {
    check(payload, rows, cols, 2)?;
    Ok(Box::new(move |row: usize, out: &mut [f32]| {
        for (value, b) in out.iter_mut().zip(part(payload, row, cols * 2).as_chunks().0) {
            *value = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
        }
    }))
}

/// A decoder of `[u8 rows·cols]`, bytes of a text. Errors: any other length.
pub fn u8(payload: &[u8], rows: usize, cols: usize) -> Decoder<'_> {
    check(payload, rows, cols, 1)?;
    Ok(Box::new(move |row: usize, out: &mut [f32]| {
        for (value, &byte) in out.iter_mut().zip(part(payload, row, cols)) {
            *value = byte.into();
        }
    }))
}

fn check(payload: &[u8], rows: usize, cols: usize, bytes: usize) -> Result<(), super::BadPayload> {
    check_matrix(rows, cols)?;
    Bytes::none().plus(&[rows, cols, bytes]).exactly(payload)
}
