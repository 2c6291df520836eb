//! Numbers in bytes and bytes in text: little-endian fields, hexadecimal, base64.

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// The `N` bytes at `at`; `None` past the end.
fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// The u16 at `at`; `None` past the end.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    array_at(bytes, at).map(u16::from_le_bytes)
}

/// The u32 at `at`; `None` past the end.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    array_at(bytes, at).map(u32::from_le_bytes)
}

/// The u64 at `at`; `None` past the end.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    array_at(bytes, at).map(u64::from_le_bytes)
}

/// Lower-case hex digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Exactly N bytes in hex digits of either case.
pub(crate) fn from_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if pairs.len() != N || !rest.is_empty() {
        return None;
    }
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let mut bytes = [0; N];
    for (byte, &[high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = (digit(high)? << 4 | digit(low)?) as u8;
    }
    Some(bytes)
}

/// A number of 1 to 16 hex digits.
pub(crate) fn hex_u64(text: &str) -> Option<u64> {
    let is_hex = (1..=16).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    u64::from_str_radix(text, 16).ok().filter(|_| is_hex)
}

/// Padded base64 (RFC 4648, section 4).
pub(crate) fn base64(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let at = |i: usize| u32::from(three.get(i).copied().unwrap_or(0));
        let word = at(0) << 16 | at(1) << 8 | at(2);
        for digit in 0..4 {
            match digit <= three.len() {
                true => text.push(char::from(DIGITS[(word >> (18 - 6 * digit)) as usize & 63])),
                false => text.push('='),
            }
        }
    }
    text
}

/// The bytes of padded base64; `None` for anything else, also for unused bits that are not zero.
pub(crate) fn from_base64(text: &[u8]) -> Option<Vec<u8>> {
    let padding = text.iter().rev().take_while(|&&c| c == b'=').count();
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for digits in text[..text.len() - padding].chunks(4) {
        let mut word = 0u32;
        for (i, digit) in digits.iter().enumerate() {
            word |= (DIGITS.iter().position(|known| known == digit)? as u32) << (18 - 6 * i);
        }
        bytes.extend(&word.to_be_bytes()[1..digits.len()]);
    }
    (base64(&bytes).as_bytes() == text).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_padded_and_strict() {
        for (bytes, text) in [
            (&b""[..], ""),
            (b"f", "Zg=="),
            (b"fo", "Zm8="),
            (b"foo", "Zm9v"),
            (b"foob", "Zm9vYg=="),
            (b"fooba", "Zm9vYmE="),
            (&[0xFB, 0xFF], "+/8="),
        ] {
            assert_eq!(base64(bytes), text);
            assert_eq!(from_base64(text.as_bytes()).as_deref(), Some(bytes), "{text}");
        }
        for text in ["Zg", "Zg=", "Z===", "====", "Zh==", "Zm9=", "Zm 9", "Zm-_", "Zg==Zg=="] {
            assert_eq!(from_base64(text.as_bytes()), None, "{text}");
        }
    }
}
