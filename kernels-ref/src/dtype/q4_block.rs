//! q4_block: `[u8 ⌈n/32⌉·16][f16 ⌈n/32⌉]`, groups of 32 over the flattened matrix, value (q−8)·scale.
//!
//! Element 2k of a group is the low nibble of its byte k, element 2k+1 the high one. Groups may cross rows; the nibbles
//! after the last element mean nothing.

use super::layout::{Bytes, GROUP, check_matrix, half_at};
use super::{BadPayload, RowDecoder};

struct Q4Block<'a> {
    codes: &'a [u8],
    scales: &'a [u8],
    cols: usize,
}

/// A decoder of q4_block. Errors: any other length.
pub fn decoder(payload: &[u8], rows: usize, cols: usize) -> Result<Box<dyn RowDecoder + '_>, BadPayload> {
    check_matrix(rows, cols)?;
    let groups = Bytes::none().plus(&[rows, cols]).get()?.div_ceil(GROUP);
    Bytes::none().plus(&[groups, 18]).exactly(payload)?;
    let (codes, scales) = payload.split_at(groups * 16);
    Ok(Box::new(Q4Block { codes, scales, cols }))
}

/// (q−8)·scale of the 32 codes in 16 bytes.
pub(super) fn decode_group(codes: &[u8], scale: f32, out: &mut [f32; GROUP]) {
    for (pair, &byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
        *pair = [
            (f32::from(byte & 15) - 8.0) * scale,
            (f32::from(byte >> 4) - 8.0) * scale,
        ];
    }
}

impl RowDecoder for Q4Block<'_> {
    fn row(&self, row: usize, out: &mut [f32]) {
        let mut values = [0.0; GROUP];
        let mut element = row * self.cols;
        let mut rest = &mut out[..self.cols];
        while !rest.is_empty() {
            let (group, first) = (element / GROUP, element % GROUP);
            decode_group(
                &self.codes[group * 16..][..16],
                half_at(self.scales, group),
                &mut values,
            );
            let (here, later) = rest.split_at_mut(rest.len().min(GROUP - first));
            here.copy_from_slice(&values[first..][..here.len()]);
            element += here.len();
            rest = later;
        }
    }
}
