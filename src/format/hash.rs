//! hash64, the checksum of CMF files (section 8 of the format).
//!
//! acc = XOR over the 8-byte little-endian words w_i of fmix64(w_i) ^ (i·SALT mod 2^64), the last word zero-padded;
//! hash64 = fmix64(acc ^ byte length). It detects accidental damage but not swapped words, and is not cryptographic.

use crate::error::{Result, bail};
use std::fmt::Display;

const SALT: u64 = 0x9E37_79B9_7F4A_7C15;

/// The finaliser of murmur3.
fn fmix64(mut word: u64) -> u64 {
    word ^= word >> 33;
    word = word.wrapping_mul(0xFF51_AFD7_ED55_8CCD);
    word ^= word >> 33;
    word = word.wrapping_mul(0xC4CE_B9FE_1A85_EC53);
    word ^ (word >> 33)
}

/// The checksum of `bytes`; 0 for an empty slice.
pub fn hash64(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut acc = 0u64;
    let mut salt = 0u64;
    for word in words {
        acc ^= fmix64(u64::from_le_bytes(*word)) ^ salt;
        salt = salt.wrapping_add(SALT);
    }
    if !rest.is_empty() {
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        acc ^= fmix64(u64::from_le_bytes(last)) ^ salt;
    }
    fmix64(acc ^ bytes.len() as u64)
}

/// Computes the checksum of `bytes` and compares it with the stored one, if any. `what` names the bytes.
///
/// Errors: `HashMismatch`.
pub(crate) fn check_hash(what: impl Display, bytes: &[u8], stored: Option<u64>) -> Result<u64> {
    let found = hash64(bytes);
    match stored {
        Some(stored) if stored != found => {
            bail!(HashMismatch, "{what}: stored {stored:016x}, found {found:016x}")
        }
        _ => Ok(found),
    }
}
