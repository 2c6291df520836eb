//! Whether a payload has the length that its type, its shape and its own tables require.
//!
//! Touches the tables only, never codes, scales or overlay values: opening a file must not read its weights.

use crate::dtype::{Dtype, Size};
use crate::error::{Result, bail};

/// Checks the length of the `payload` of a `shape` tensor.
///
/// Errors: `Parse` for a shape the type does not allow, a wrong length, widths, offsets or counts that do not fit;
/// `Bounds` when the element count overflows.
pub(super) fn check_length(dtype: Dtype, shape: &[u64], payload: &[u8]) -> Result<()> {
    let found = payload.len() as u64;
    match dtype.size(shape)? {
        Size::Exact(wanted) if found == wanted => Ok(()),
        Size::Exact(wanted) => bail!(
            Parse,
            "{} of shape {shape:?} takes {wanted} bytes, found {found}",
            dtype.name()
        ),
        Size::AtLeast(least) if found < least => {
            bail!(
                Parse,
                "{} of shape {shape:?} takes at least {least} bytes, found {found}",
                dtype.name()
            )
        }
        Size::AtLeast(least) => match dtype {
            Dtype::Q1s => overlay(payload, least, 6),
            Dtype::Q1t => {
                // The table of rows + 1 pointers is the last thing before the entries.
                let table = (shape[0] + 1) * 4;
                row_pointers(&payload[(least - table) as usize..least as usize])?;
                overlay(payload, least, 4)
            }
            // Their decoders read widths and offsets, nothing else.
            _ => dtype.decoder(payload, shape[0] as usize, shape[1] as usize).map(drop),
        },
    }
}

/// An overlay whose number of entries is the word before `start`: it must end with the payload.
fn overlay(payload: &[u8], start: u64, entry_bytes: u64) -> Result<()> {
    let start = start as usize;
    let count = u64::from(u32_at(&payload[start - 4..]));
    let (wanted, found) = (count * entry_bytes, (payload.len() - start) as u64);
    if wanted != found {
        bail!(
            Parse,
            "an overlay of {count} entries takes {wanted} bytes, found {found}"
        );
    }
    Ok(())
}

fn row_pointers(table: &[u8]) -> Result<()> {
    let mut last = 0;
    for (row, pointer) in table.chunks_exact(4).enumerate() {
        let pointer = u32_at(pointer);
        if pointer < last || (row == 0 && pointer != 0) {
            bail!(
                Parse,
                "row_ptr[{row}] is {pointer}, wanted 0 first and no descent (before it: {last})"
            );
        }
        last = pointer;
    }
    Ok(())
}

fn u32_at(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |word| u32::from_le_bytes(*word))
}
