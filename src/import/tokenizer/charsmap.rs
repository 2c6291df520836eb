//! Replacement tables of unigram tokenizers. They are checked here because the `tokenizers` crate does not check bounds.
//!
//! A table is a u32 count of bytes, a double-array trie of u32 units, and the replacements, each ended by a zero byte. A unit
//! has a label in bits 0–7 and 31, a flag that a key ends here in bit 8, and the offset of its children in bits 9–31. Where a
//! key ends, child 0 holds the position of its replacement.

use crate::error::{Result, error};
use std::collections::HashSet;

/// Errors: `Tokenizer` for a table that leads out of bounds for some text.
pub(super) fn check(table: &[u8]) -> Result<()> {
    let bad = |what| error!(Tokenizer, "metadata key 'tokenizer.ggml.precompiled_charsmap': {what}");
    let Some((size, rest)) = table.split_first_chunk() else {
        return Err(bad("it is too short to hold its length"));
    };
    let size = u32::from_le_bytes(*size) as usize / 4 * 4;
    let Some((trie, replacements)) = rest.split_at_checked(size) else {
        return Err(bad("it is shorter than its length field says"));
    };
    let replacements = std::str::from_utf8(replacements).map_err(|_| bad("the replacements are not UTF-8"))?;
    let (units, _) = trie.as_chunks();
    let unit = |at: usize| match units.get(at) {
        Some(unit) => Ok(u32::from_le_bytes(*unit) as usize),
        None => Err(bad("a unit has children out of bounds")),
    };
    let children = |unit: usize| (unit >> 10) << ((unit & 1 << 9) >> 6);
    let mut pending = vec![children(unit(0)?)];
    let mut seen = HashSet::new();
    while let Some(base) = pending.pop() {
        for byte in 1..=255 {
            let found = unit(base ^ byte)?;
            if found & (1 << 31 | 0xff) != byte {
                continue;
            }
            let next = base ^ byte ^ children(found);
            if found >> 8 & 1 == 1 && !replacements.is_char_boundary(unit(next)? & ((1 << 31) - 1)) {
                return Err(bad("a key has a replacement out of bounds"));
            }
            if seen.insert(next) {
                pending.push(next);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::check;

    /// A table that replaces 'a' (97) by "b".
    fn table() -> Vec<u8> {
        let mut units = vec![0u32; 512];
        // The root's children start at 256; the key 'a' ends in unit 3, which holds place 0.
        units[0] = 256 << 10;
        units[256 ^ 97] = 97 | 1 << 8 | (256 ^ 97 ^ 3) << 10;
        let mut out = 2048u32.to_le_bytes().to_vec();
        out.extend(units.iter().flat_map(|unit| unit.to_le_bytes()));
        out.extend(b"b\0");
        out
    }

    #[test]
    fn tables_that_lead_astray_are_refused() {
        assert!(check(&table()).is_ok());
        let set = |unit: usize, value: u32| {
            let mut table = table();
            table[4 + 4 * unit..8 + 4 * unit].copy_from_slice(&value.to_le_bytes());
            check(&table)
        };
        assert!(set(0, 512 << 10).is_err(), "children outside");
        assert!(set(0, 1 << 9 | 1 << 12).is_err(), "children far outside");
        assert!(
            set(256 ^ 97, 97 | 1 << 8 | (256 ^ 97 ^ 512) << 10).is_err(),
            "leaf outside"
        );
        assert!(set(3, 2).is_ok(), "the end of the replacements");
        assert!(set(3, 3).is_err(), "past the replacements");
        assert!(set(3, i32::MAX as u32).is_err(), "far past the replacements");
        let bytes = table();
        for len in 0..4 + 2048 {
            assert!(check(&bytes[..len]).is_err(), "{len} bytes");
        }
        assert!(check(&[bytes.as_slice(), &[0xff]].concat()).is_err(), "not UTF-8");
        assert!(check(&u32::MAX.to_le_bytes()).is_err());
    }
}
