//! The tokenizer of a model file: text to token ids and back.
//!
//! Wraps the `tokenizers` library, checks what the library takes on trust, and keeps special tokens typed by a user from
//! being parsed as such. Knows no model; the ids it returns are below [`Tokenizer::vocab_size`].

use super::stream::TextStream;
use crate::error::{Error, Kind, Result, bail};
use serde::Deserialize;
use serde_json::Value;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tokenizers::{
    AddedVocabulary, Model, NormalizedString, OffsetType, PreTokenizedString, PreTokenizer, Token as LibraryToken,
};

/// Largest `tokenizer.json`, in bytes.
const MAX_FILE: usize = 256 << 20;
/// Longest text to encode at once, in bytes.
const MAX_TEXT: usize = 64 << 20;
/// Ids are below this: far above every vocabulary, far below what would exhaust memory.
const MAX_VOCAB: u32 = 1 << 24;
/// How many times longer the normalizers may make a text.
const MAX_EXPANSION: u64 = 64;
/// Breaks a special token in a text that must not be parsed as one; a noncharacter, which no text holds.
const GUARD: char = '\u{fdd0}';

/// A checked tokenizer.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The added tokens, set up to leave special ones in the text.
    plain: AddedVocabulary,
    /// Contents of special tokens, longest first.
    special: Vec<String>,
    vocab_size: usize,
    /// How the decoder joins tokens.
    pub(super) joining: Joining,
}

/// What the text of a token depends on besides the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Joining {
    /// Tokens are bytes in a printable alphabet; the bytes of all tokens form UTF-8.
    Bytes,
    /// On nothing, except whether it comes first; runs of byte tokens (`byte_runs`) form UTF-8 together.
    /// `anchor` is a token with text of its own that can stand in for everything before.
    Local {
        /// Whether `<0xE2>` is a byte.
        byte_runs: bool,
        /// An ordinary token.
        anchor: u32,
    },
    /// On the tokens after it, or in a way that is not known.
    Opaque,
}

/// The parts of `tokenizer.json` that are checked before the library sees it.
#[derive(Deserialize)]
struct Head {
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Option<Value>,
    #[serde(default)]
    decoder: Option<Value>,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
}

impl Tokenizer {
    /// Reads the bytes of a `tokenizer.json`. Its truncation and padding sections have no effect.
    ///
    /// Errors: `Tokenizer` for JSON or a configuration that is invalid, added tokens whose id the rest of the file
    /// contradicts, and sizes past the limits.
    pub fn from_json(bytes: &[u8]) -> Result<Tokenizer> {
        if bytes.len() > MAX_FILE {
            bail!(
                Tokenizer,
                "tokenizer.json has {} bytes, at most {MAX_FILE} are allowed",
                bytes.len()
            );
        }
        let head: Head = serde_json::from_slice(bytes)
            .map_err(|err| Error::new(Kind::Tokenizer, format!("tokenizer.json is invalid: {err}")))?;
        let growth = head.normalizer.as_ref().map_or(1, expansion);
        if growth > MAX_EXPANSION {
            bail!(
                Tokenizer,
                "the normalizer makes a text up to {growth} times longer, at most {MAX_EXPANSION} is allowed"
            );
        }
        check_decoder(head.decoder.as_ref())?;
        let mut inner = guarded("reading tokenizer.json", || tokenizers::Tokenizer::from_bytes(bytes))?;
        inner.with_padding(None);
        guarded("switching truncation off", || inner.with_truncation(None).map(|_| ()))?;
        for added in head.added_tokens.iter().filter(|added| !added.content.is_empty()) {
            let found = inner.token_to_id(&added.content);
            if found != Some(added.id) {
                let (content, id) = (&added.content, added.id);
                bail!(
                    Tokenizer,
                    "added token '{content}' has id {id}, but the vocabulary places it at {found:?}"
                );
            }
        }
        let vocab = inner.get_vocab(true);
        let highest = vocab.values().max().copied().unwrap_or(0);
        if vocab.is_empty() || highest >= MAX_VOCAB {
            bail!(
                Tokenizer,
                "{} tokens with ids up to {highest}; ids must be below {MAX_VOCAB}",
                vocab.len()
            );
        }
        let mut plain = inner.get_added_vocabulary().clone();
        plain.set_encode_special_tokens(true);
        let mut special: Vec<String> = inner
            .get_added_tokens_decoder()
            .into_values()
            .filter(|token| token.special)
            .map(|t| t.content)
            .collect();
        special.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        let mut tokenizer = Tokenizer {
            inner,
            plain,
            special,
            vocab_size: highest as usize + 1,
            joining: Joining::Opaque,
        };
        tokenizer.joining = tokenizer.find_joining(&vocab)?;
        Ok(tokenizer)
    }

    /// Token ids of `text`, in which special tokens are parsed. `add_special` adds what the file's post-processor adds
    /// (BOS and so on); a rendered chat template holds those already.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        check_length(text)?;
        let encoding = guarded("encoding", || self.inner.encode_fast(text, add_special))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Token ids of `text` in which special tokens are ordinary text.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        check_length(text)?;
        guarded("encoding", || {
            self.tokenize(self.plain.extract_and_normalize(self.inner.get_normalizer(), text))
        })
    }

    /// `text` with every special token in it broken by an invisible mark, so that [`encode_guarded`](Self::encode_guarded)
    /// leaves it ordinary text. For what users and tools write, before a template puts it between real special tokens.
    pub fn guard(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            out.push(c);
            if c == GUARD {
                out.push(GUARD);
            } else if self.special.iter().any(|token| rest.starts_with(token.as_str())) {
                out.push(GUARD);
            }
            rest = &rest[c.len_utf8()..];
        }
        out
    }

    /// Token ids of a text that may hold marks of [`guard`](Self::guard): special tokens are parsed where no mark breaks
    /// them. Nothing is added.
    pub fn encode_guarded(&self, text: &str) -> Result<Vec<u32>> {
        if !text.contains(GUARD) {
            return self.encode(text, false);
        }
        check_length(text)?;
        let (text, marks) = unmark(text);
        guarded("encoding", || {
            let mut pieces = PreTokenizedString::from(text.as_str());
            pieces.split(|_, piece| Ok(self.split_added(&piece, &marks)))?;
            if let Some(normalizer) = self.inner.get_normalizer() {
                pieces.normalize(|piece| tokenizers::Normalizer::normalize(normalizer, piece))?;
            }
            self.tokenize(pieces)
        })
    }

    /// Text of `ids`; ids without a token add nothing. `skip_special` leaves special tokens out.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        guarded("decoding", || self.inner.decode(ids, skip_special))
    }

    /// Starts to turn tokens into text one by one. See [`TextStream`].
    pub fn stream(&self, skip_special: bool, stop: &[String]) -> Result<TextStream<'_>> {
        TextStream::new(self, skip_special, stop)
    }

    /// The token with this id as the vocabulary spells it.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a token as the vocabulary spells it.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// One more than the highest id. Ids below it may be unused.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Whether the token controls the model instead of being text.
    pub fn is_special(&self, id: u32) -> bool {
        self.token(id)
            .is_some_and(|token| self.inner.get_added_vocabulary().is_special_token(&token))
    }

    fn tokenize(&self, mut pieces: PreTokenizedString) -> tokenizers::Result<Vec<u32>> {
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        pieces.tokenize(|piece| self.spell_out(piece.get()))?;
        Ok(pieces.into_encoding(None, 0, OffsetType::None)?.get_ids().to_vec())
    }

    /// The model's tokens of `text`. A special token that the model itself finds, because its vocabulary holds it as a
    /// word, is spelled letter by letter.
    fn spell_out(&self, text: &str) -> tokenizers::Result<Vec<LibraryToken>> {
        let model = self.inner.get_model();
        let mut out = Vec::new();
        for token in model.tokenize(text)? {
            let found = text.get(token.offsets.0..token.offsets.1).unwrap_or_default();
            // An unknown token is special too, but its text is not its name.
            if self.inner.get_added_vocabulary().is_special_token(found) {
                for c in found.chars() {
                    out.extend(model.tokenize(c.encode_utf8(&mut [0; 4]))?);
                }
            } else {
                out.push(token);
            }
        }
        Ok(out)
    }

    /// Cuts `piece` at added tokens, except special ones that hold a mark.
    fn split_added(
        &self,
        piece: &NormalizedString,
        marks: &[usize],
    ) -> Vec<(NormalizedString, Option<Vec<LibraryToken>>)> {
        let text = piece.get();
        let mut added: Vec<_> = self.inner.get_added_tokens_decoder().into_iter().collect();
        added.sort_by(|(_, a), (_, b)| b.content.len().cmp(&a.content.len()));
        let slice = |from, to| piece.slice(tokenizers::tokenizer::normalizer::Range::Normalized(from..to));
        let is_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        let mut out = Vec::new();
        let (mut done, mut at) = (0, 0);
        while let Some(c) = text[at..].chars().next() {
            let found = added.iter().find(|(_, token)| {
                let end = at + token.content.len();
                let marked = || {
                    marks[marks.partition_point(|&m| m <= at)..]
                        .first()
                        .is_some_and(|&m| m < end)
                };
                text[at..].starts_with(token.content.as_str())
                    && !(token.special && marked())
                    && !(token.single_word
                        && (is_word(text[..at].chars().next_back()) || is_word(text[end..].chars().next())))
            });
            let Some((id, token)) = found else {
                at += c.len_utf8();
                continue;
            };
            let (mut start, mut end) = (at, at + token.content.len());
            if token.lstrip {
                start = text[..start].trim_end().len().max(done);
            }
            if token.rstrip {
                end = text.len() - text[end..].trim_start().len();
            }
            out.extend(slice(done, start).filter(|s| !s.is_empty()).map(|s| (s, None)));
            let library_token = LibraryToken::new(*id, text[start..end].to_string(), (0, end - start));
            out.extend(slice(start, end).map(|s| (s, Some(vec![library_token]))));
            (done, at) = (end, end);
        }
        out.extend(slice(done, text.len()).filter(|s| !s.is_empty()).map(|s| (s, None)));
        out
    }

    fn find_joining(&self, vocab: &std::collections::HashMap<String, u32>) -> Result<Joining> {
        let decoder = serde_json::to_value(self.inner.get_decoder())
            .map_err(|err| Error::new(Kind::Tokenizer, format!("the decoder cannot be examined: {err}")))?;
        let mut steps = Vec::new();
        flatten(&decoder, "decoders", &mut steps);
        let kind = |step: &Value| step["type"].as_str().unwrap_or_default().to_string();
        if let [first, rest @ ..] = &steps[..]
            && kind(first) == "ByteLevel"
            && rest.iter().all(|step| kind(step) == "Fuse")
        {
            return Ok(Joining::Bytes);
        }
        let (mut byte_runs, mut fused) = (false, false);
        for step in &steps {
            let one_char = step["pattern"]["String"]
                .as_str()
                .is_some_and(|p| p.chars().count() == 1);
            match kind(step).as_str() {
                "Replace" if !fused || one_char => {}
                "Strip" => {}
                "ByteFallback" if !fused => byte_runs = true,
                "Metaspace" | "WordPiece" if !fused => {}
                "Fuse" => fused = true,
                _ => return Ok(Joining::Opaque),
            }
        }
        // Any ordinary word will do; the shortest, first in order, so that the choice does not depend on hashing.
        let mut words: Vec<(&String, u32)> = vocab
            .iter()
            .filter(|(token, _)| !token.is_empty() && token.bytes().all(|b| b.is_ascii_alphabetic()))
            .map(|(token, &id)| (token, id))
            .collect();
        words.sort_by(|(a, _), (b, _)| a.len().cmp(&b.len()).then_with(|| a.cmp(b)));
        for (word, anchor) in words.into_iter().take(64) {
            if self.decode(&[anchor], false)? == *word
                && self.decode(&[anchor, anchor], false)?.starts_with(word.as_str())
            {
                return Ok(Joining::Local { byte_runs, anchor });
            }
        }
        Ok(Joining::Opaque)
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size)
            .field("joining", &self.joining)
            .finish()
    }
}

/// The value of a token of the form `<0xE2>`.
pub(super) fn byte_token(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() == 2 {
        u8::from_str_radix(hex, 16).ok()
    } else {
        None
    }
}

/// The text without marks, and where (in bytes of that text) the marks were.
fn unmark(text: &str) -> (String, Vec<usize>) {
    let (mut out, mut marks) = (String::with_capacity(text.len()), Vec::new());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c != GUARD {
            out.push(c);
        } else if chars.next_if_eq(&GUARD).is_some() {
            out.push(GUARD);
        } else {
            marks.push(out.len());
        }
    }
    (out, marks)
}

/// Runs the library, whose failures and panics on a hostile file become errors.
fn guarded<T, E: std::fmt::Display>(what: &str, work: impl FnOnce() -> Result<T, E>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(err)) => Err(Error::new(Kind::Tokenizer, format!("{what} failed: {err}"))),
        Err(_) => Err(Error::new(
            Kind::Tokenizer,
            format!("{what} failed: the file leads the tokenizer library astray"),
        )),
    }
}

fn check_length(text: &str) -> Result<()> {
    if text.len() > MAX_TEXT {
        bail!(
            Tokenizer,
            "the text has {} bytes, at most {MAX_TEXT} can be encoded at once",
            text.len()
        );
    }
    Ok(())
}

/// The steps of a nested sequence, in order. JSON limits the nesting.
fn flatten<'a>(step: &'a Value, members: &str, out: &mut Vec<&'a Value>) {
    match step[members].as_array() {
        Some(steps) => steps.iter().for_each(|step| flatten(step, members, out)),
        None if step.is_null() => {}
        None => out.push(step),
    }
}

/// An upper bound of how many times longer a normalizer makes a text.
fn expansion(normalizer: &Value) -> u64 {
    let mut steps = Vec::new();
    flatten(normalizer, "normalizers", &mut steps);
    steps.iter().fold(1u64, |total, step| {
        let growth = match step["type"].as_str() {
            // Every byte may be a match.
            Some("Replace") => {
                let content = step["content"].as_str().map_or(1, str::len) as u64;
                let pattern = step["pattern"]["String"].as_str().map_or(1, str::len).max(1) as u64;
                content.div_ceil(pattern).max(1)
            }
            // Once per piece of text, and pieces can be as short as the text between two tokens.
            Some("Prepend") => 1 + step["prepend"].as_str().map_or(1, str::len) as u64,
            Some("ByteLevel") => 2,
            _ => 1,
        };
        total.saturating_mul(growth)
    })
}

/// Refuses what the library's decoders cannot do without failing.
fn check_decoder(decoder: Option<&Value>) -> Result<()> {
    let mut steps = Vec::new();
    if let Some(decoder) = decoder {
        flatten(decoder, "decoders", &mut steps);
    }
    for step in steps {
        if step["type"] == "Strip" && step["stop"] != 0 {
            bail!(Tokenizer, "decoder Strip with stop {}, expected 0", step["stop"]);
        }
    }
    Ok(())
}
