//! Decodes an answer token by token. Returns only text that later tokens cannot change and that is not part of a stop
//! string.
//!
//! The pieces together equal the decoding of all tokens at once. The cost of a token does not depend on the tokens
//! before it.

use super::tokenizer::{Joining, Tokenizer, byte_token};
use crate::error::{Result, bail};

/// Most stop strings, and most bytes of one.
const MAX_STOPS: usize = 64;
const MAX_STOP_BYTES: usize = 4096;

/// Turns the tokens of one answer into text. Made by [`Tokenizer::stream`].
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    /// Tokens whose text was not returned yet.
    pending: Vec<u32>,
    /// Bytes of an incomplete UTF-8 character.
    bytes: Vec<u8>,
    /// Whether no text was decoded yet; the first token may be decoded differently.
    at_start: bool,
    stop: StopStrings,
}

impl Tokenizer {
    /// Starts a stream that decodes tokens one by one and ends at the first of the `stop` strings.
    ///
    /// Errors: `Usage` for too many stop strings, and for empty or too long ones.
    pub fn stream(&self, skip_special: bool, stop: &[String]) -> Result<TextStream<'_>> {
        let stop = StopStrings::new(stop)?;
        Ok(TextStream {
            tokenizer: self,
            skip_special,
            pending: Vec::new(),
            bytes: Vec::new(),
            at_start: true,
            stop,
        })
    }
}

impl TextStream<'_> {
    /// Takes the next token and returns the text that has become final, which may be empty. Returns nothing after a
    /// stop string.
    pub fn push(&mut self, id: u32) -> Result<String> {
        if self.stop.matched.is_some() {
            return Ok(String::new());
        }
        let text = self.decode(id)?;
        Ok(self.stop.push(&text))
    }

    /// The rest of the text, at the end of the answer. An incomplete character becomes U+FFFD. The rest may end at a
    /// stop string, see [`stopped`](Self::stopped).
    pub fn finish(&mut self) -> Result<String> {
        if self.stop.matched.is_some() {
            return Ok(String::new());
        }
        let mut text = String::from_utf8_lossy(&std::mem::take(&mut self.bytes)).into_owned();
        if !self.pending.is_empty() {
            text.push_str(&self.flush()?);
        }
        let mut out = self.stop.push(&text);
        if self.stop.matched.is_none() {
            out.push_str(&std::mem::take(&mut self.stop.held));
        }
        Ok(out)
    }

    /// The stop string that ended the text, if any. The returned text ends before it.
    pub fn stopped(&self) -> Option<&str> {
        self.stop.matched.as_deref()
    }

    fn decode(&mut self, id: u32) -> Result<String> {
        let Some(token) = self.tokenizer.token(id) else {
            return Ok(String::new());
        };
        if self.skip_special && self.tokenizer.is_special(id) {
            return Ok(String::new());
        }
        match self.tokenizer.joining {
            Joining::Bytes => {
                match token.chars().map(byte_of_char).collect::<Option<Vec<u8>>>() {
                    Some(bytes) => self.bytes.extend(bytes),
                    None => self.bytes.extend(token.as_bytes()),
                }
                Ok(take_complete(&mut self.bytes))
            }
            Joining::Local { byte_runs, .. } => {
                self.pending.push(id);
                // Decode a run of byte tokens when it ends.
                if byte_runs && byte_token(&token).is_some() {
                    Ok(String::new())
                } else {
                    self.flush()
                }
            }
            Joining::Opaque => {
                self.pending.push(id);
                Ok(String::new())
            }
        }
    }

    /// The text of the pending tokens.
    fn flush(&mut self) -> Result<String> {
        let decode = |ids: &[u32]| self.tokenizer.decode(ids, self.skip_special);
        match self.tokenizer.joining {
            Joining::Local { anchor, .. } if !self.at_start => {
                let before = decode(&[anchor])?;
                let mut window = vec![anchor];
                window.append(&mut self.pending);
                match decode(&window)?.strip_prefix(&before) {
                    Some(text) => Ok(text.to_string()),
                    None => bail!(Tokenizer, "a token changes the text of the tokens before it"),
                }
            }
            _ => {
                let text = decode(&self.pending)?;
                // The decoder may strip leading spaces; keep the tokens until there is text.
                if !text.is_empty() {
                    self.pending.clear();
                    self.at_start = false;
                }
                Ok(text)
            }
        }
    }
}

/// The byte that a character of the byte-level alphabet stands for: printable Latin-1 characters stand for themselves,
/// U+0100 to U+0143 for the other 68 bytes in order.
fn byte_of_char(c: char) -> Option<u8> {
    let code = u32::from(c);
    let byte = match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// Removes the complete characters at the start of `bytes` and returns them; invalid bytes become U+FFFD.
fn take_complete(bytes: &mut Vec<u8>) -> String {
    let last = bytes.utf8_chunks().last().map_or(&[][..], |chunk| chunk.invalid());
    let is_incomplete = std::str::from_utf8(last).is_err_and(|err| err.error_len().is_none());
    let complete = bytes.len() - if is_incomplete { last.len() } else { 0 };
    let text = String::from_utf8_lossy(&bytes[..complete]).into_owned();
    bytes.drain(..complete);
    text
}

/// Finds stop strings in a text that arrives in pieces.
#[derive(Debug)]
struct StopStrings {
    stops: Vec<String>,
    /// Text that may be the start of a stop string.
    held: String,
    matched: Option<String>,
}

impl StopStrings {
    fn new(stops: &[String]) -> Result<StopStrings> {
        if stops.len() > MAX_STOPS {
            bail!(
                Usage,
                "there are {} stop strings, expected at most {MAX_STOPS}",
                stops.len()
            );
        }
        for stop in stops {
            if stop.is_empty() || stop.len() > MAX_STOP_BYTES {
                bail!(
                    Usage,
                    "a stop string has {} bytes, expected 1 to {MAX_STOP_BYTES}",
                    stop.len()
                );
            }
        }
        Ok(StopStrings {
            stops: stops.to_vec(),
            held: String::new(),
            matched: None,
        })
    }

    /// Takes more text and returns the text that is not part of a stop string.
    fn push(&mut self, text: &str) -> String {
        if text.is_empty() {
            return String::new();
        }
        self.held.push_str(text);
        let first = self
            .stops
            .iter()
            .filter_map(|stop| self.held.find(stop.as_str()).map(|at| (at, stop)))
            .min();
        if let Some((at, stop)) = first {
            self.matched = Some(stop.clone());
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        // Keep the longest suffix that is the start of a stop string.
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let earliest = self.held.len().saturating_sub(longest.saturating_sub(1));
        let keep = (earliest..self.held.len())
            .filter(|&at| self.held.is_char_boundary(at))
            .find(|&at| self.stops.iter().any(|stop| stop.starts_with(&self.held[at..])))
            .unwrap_or(self.held.len());
        let rest = self.held.split_off(keep);
        std::mem::replace(&mut self.held, rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_covers_every_byte_once() {
        let mut bytes: Vec<u8> = (0..0x200).filter_map(char::from_u32).filter_map(byte_of_char).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        // Space, new line and U+00AD in the byte-level alphabet.
        assert_eq!(
            ['\u{120}', '\u{10a}', '\u{143}', 'a', ' '].map(byte_of_char),
            [Some(b' '), Some(b'\n'), Some(0xad), Some(b'a'), None]
        );
    }

    #[test]
    fn bytes_in_pieces_become_the_text_of_all_bytes() {
        let bytes = b"a\xe2\x82\xac\xff\xf0\x9f\x98\x80\xe2\x28\xc3\xa4\x80\xf0\x9f";
        let whole = String::from_utf8_lossy(bytes);
        for size in 1..=bytes.len() {
            let (mut pending, mut text) = (Vec::new(), String::new());
            for piece in bytes.chunks(size) {
                pending.extend(piece);
                text.push_str(&take_complete(&mut pending));
                assert!(whole.starts_with(&text));
                assert!(pending.len() < 4);
            }
            text.push_str(&String::from_utf8_lossy(&pending));
            assert_eq!(text, whole);
        }
    }

    #[test]
    fn stop_strings_are_found_across_pieces_and_their_starts_are_held_back() {
        let stops = ["END".to_string(), "\n\n".to_string()];
        let mut stop = StopStrings::new(&stops).unwrap();
        let pieces = ["one E", "N", "ough\n", "x E", "ND more"].map(|piece| stop.push(piece));
        assert_eq!(pieces, ["one ", "", "ENough", "\nx ", ""]);
        assert_eq!(stop.matched.as_deref(), Some("END"));
        assert!(StopStrings::new(&[String::new()]).is_err());
    }
}
