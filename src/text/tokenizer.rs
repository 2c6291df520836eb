//! The tokenizer of a model file: text to token ids and back.
//!
//! Wraps the `tokenizers` library, checks what the library does not check, and keeps the text of special tokens in
//! user input from being parsed as special tokens. The ids it returns are below [`Tokenizer::vocab_size`].

use crate::error::{Error, Kind, Result, bail};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use tokenizers::{
    AddedVocabulary, Model, NormalizedString, OffsetType, PreTokenizedString, PreTokenizer, Token as LibraryToken,
};

/// Largest `tokenizer.json`, in bytes.
const MAX_FILE: usize = 256 << 20;
/// Longest text to encode at once, in bytes.
const MAX_TEXT: usize = 64 << 20;
/// Ids are below this limit: far above the size of any vocabulary, and small enough for tables by id.
const MAX_VOCAB: u32 = 1 << 24;
/// Largest factor by which normalizers may lengthen a text.
const MAX_EXPANSION: u64 = 64;
/// A mark that splits the text of a special token. A Unicode noncharacter, which ordinary text does not contain.
const GUARD: char = '\u{fdd0}';
/// Escapes the next character: it is text, not a mark.
const LITERAL: char = '\u{fdd2}';

/// A checked tokenizer.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The added tokens, configured not to parse special ones.
    plain: AddedVocabulary,
    /// Texts of the special tokens, by first character.
    special: BTreeMap<char, Vec<String>>,
    vocab_size: usize,
    /// How the texts of tokens join.
    pub(super) joining: Joining,
}

/// How the text of a token depends on its neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Joining {
    /// Each token is a string of bytes, spelled in a printable alphabet. The bytes of all tokens together are UTF-8.
    Bytes,
    /// Independent of other tokens, except for the first token and for runs of byte tokens.
    Local {
        /// Whether tokens such as `<0xE2>` are bytes; a run of them is decoded as UTF-8.
        byte_runs: bool,
        /// An ordinary token. Decoded before another token, it replaces all earlier ones.
        anchor: u32,
    },
    /// Unknown, or dependent on later tokens.
    Opaque,
}

/// The sections of `tokenizer.json` that are checked before the library reads it.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Head {
    added_tokens: Vec<Added>,
    normalizer: Value,
    decoder: Value,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. Ignores its truncation and padding sections.
    ///
    /// Errors: `Tokenizer` for invalid JSON, an invalid configuration, added tokens whose id differs from the
    /// vocabulary, and sizes above the limits.
    pub fn from_json(bytes: &[u8]) -> Result<Tokenizer> {
        if bytes.len() > MAX_FILE {
            bail!(
                Tokenizer,
                "tokenizer.json has {} bytes, expected at most {MAX_FILE}",
                bytes.len()
            );
        }
        let head: Head = serde_json::from_slice(bytes)
            .map_err(|err| Error::new(Kind::Tokenizer, format!("tokenizer.json is invalid: {err}")))?;
        let growth = expansion(&head.normalizer);
        if growth > MAX_EXPANSION {
            bail!(
                Tokenizer,
                "the normalizer makes a text up to {growth} times longer, expected at most {MAX_EXPANSION} times"
            );
        }
        check_decoder(&head.decoder)?;
        let mut inner = guarded("reading tokenizer.json", || tokenizers::Tokenizer::from_bytes(bytes))?;
        inner.with_padding(None);
        guarded("switching truncation off", || inner.with_truncation(None).map(|_| ()))?;
        for added in head.added_tokens.iter().filter(|added| !added.content.is_empty()) {
            let found = inner.token_to_id(&added.content);
            if found != Some(added.id) {
                let (content, id) = (&added.content, added.id);
                bail!(
                    Tokenizer,
                    "added token '{content}' has id {id}, but the vocabulary has {}",
                    found.map_or("no such token".to_string(), |found| format!("id {found}"))
                );
            }
        }
        let vocab = inner.get_vocab(true);
        let highest = vocab.values().max().copied().unwrap_or(0);
        if vocab.is_empty() || highest >= MAX_VOCAB {
            bail!(
                Tokenizer,
                "the vocabulary has {} tokens with ids up to {highest}, expected at least one token and ids below {MAX_VOCAB}",
                vocab.len()
            );
        }
        let mut plain = inner.get_added_vocabulary().clone();
        plain.set_encode_special_tokens(true);
        let mut special: BTreeMap<char, Vec<String>> = BTreeMap::new();
        for token in inner
            .get_added_tokens_decoder()
            .into_values()
            .filter(|token| token.special)
        {
            if let Some(first) = token.content.chars().next() {
                special.entry(first).or_default().push(token.content);
            }
        }
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

    /// Token ids of `text`, in which special tokens are parsed. With `add_special` the post-processor of the file
    /// adds its tokens, such as BOS. A rendered chat template contains them already.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        check_length(text)?;
        let encoding = guarded("encoding", || self.inner.encode_fast(text, add_special))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Token ids of `text`, in which special tokens are ordinary text.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        check_length(text)?;
        guarded("encoding", || {
            self.tokenize(self.plain.extract_and_normalize(self.inner.get_normalizer(), text))
        })
    }

    /// `text` with an invisible mark in every special token, so that [`encode_guarded`](Self::encode_guarded) treats
    /// them as ordinary text. For the texts of users and tools, before a template puts them between real special
    /// tokens.
    pub fn guard(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            if matches!(c, GUARD | LITERAL) {
                out.push(LITERAL);
            }
            out.push(c);
            let starts = |tokens: &Vec<String>| tokens.iter().any(|token| rest.starts_with(token.as_str()));
            if self.special.get(&c).is_some_and(starts) {
                out.push(GUARD);
            }
            rest = &rest[c.len_utf8()..];
        }
        out
    }

    /// Token ids of a text with marks of [`guard`](Self::guard). Special tokens without a mark are parsed; the
    /// post-processor adds no tokens.
    pub fn encode_guarded(&self, text: &str) -> Result<Vec<u32>> {
        if !text.contains([GUARD, LITERAL]) {
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

    /// The text of `ids`. Ids without a token are ignored; `skip_special` leaves out special tokens.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        // Some decoders of the library fail on an empty list of tokens.
        let shown = |&id: &u32| self.token(id).is_some() && !(skip_special && self.is_special(id));
        if !ids.iter().any(shown) {
            return Ok(String::new());
        }
        guarded("decoding", || self.inner.decode(ids, skip_special))
    }

    /// The token with this id, as written in the vocabulary.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a token, as written in the vocabulary.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The highest id plus one. Some ids below it may be unused.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Whether the token is a control token of the model rather than text.
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

    /// The tokens of `text`. If the vocabulary contains a special token as a word, its text is split into characters.
    fn spell_out(&self, text: &str) -> tokenizers::Result<Vec<LibraryToken>> {
        let model = self.inner.get_model();
        let mut out = Vec::new();
        for token in model.tokenize(text)? {
            let found = text.get(token.offsets.0..token.offsets.1).unwrap_or_default();
            // The unknown token is special too, but its text differs from its name.
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

    /// Splits `piece` at added tokens, except at special ones with a mark.
    fn split_added(
        &self,
        piece: &NormalizedString,
        marks: &[usize],
    ) -> Vec<(NormalizedString, Option<Vec<LibraryToken>>)> {
        let text = piece.get();
        let mut added: Vec<_> = self.inner.get_added_tokens_decoder().into_iter().collect();
        added.sort_by_key(|(_, token)| std::cmp::Reverse(token.content.len()));
        let slice = |from, to| piece.slice(tokenizers::tokenizer::normalizer::Range::Normalized(from..to));
        let is_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        let mut out = Vec::new();
        let (mut done, mut at) = (0, 0);
        while let Some(c) = text[at..].chars().next() {
            let found = added.iter().find(|(_, token)| {
                let end = at + token.content.len();
                // The mark comes after the first character, which may be the only one.
                let breaks = |&m: &usize| m < end || m == at + c.len_utf8();
                let marked = || marks[marks.partition_point(|&m| m <= at)..].first().is_some_and(breaks);
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

    fn find_joining(&self, vocab: &HashMap<String, u32>) -> Result<Joining> {
        let decoder = serde_json::to_value(self.inner.get_decoder())
            .map_err(|err| Error::new(Kind::Tokenizer, format!("the decoder is invalid: {err}")))?;
        let steps = flatten(&decoder, "decoders");
        if let [first, rest @ ..] = &steps[..]
            && first["type"] == "ByteLevel"
            && rest.iter().all(|step| step["type"] == "Fuse")
        {
            return Ok(Joining::Bytes);
        }
        let (mut byte_runs, mut fused) = (false, false);
        for step in &steps {
            let one_char = step["pattern"]["String"]
                .as_str()
                .is_some_and(|p| p.chars().count() == 1);
            match step["type"].as_str().unwrap_or_default() {
                "Replace" if !fused || one_char => {}
                "Strip" => {}
                "ByteFallback" if !fused => byte_runs = true,
                "Metaspace" | "WordPiece" if !fused => {}
                "Fuse" => fused = true,
                _ => return Ok(Joining::Opaque),
            }
        }
        // Any ordinary word is suitable. Take the shortest, in alphabetical order, so that the choice is deterministic.
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
    u8::from_str_radix(hex, 16).ok().filter(|_| hex.len() == 2)
}

/// The text without marks, and the offsets of the marks in it.
fn unmark(text: &str) -> (String, Vec<usize>) {
    let (mut out, mut marks) = (String::with_capacity(text.len()), Vec::new());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            GUARD => marks.push(out.len()),
            LITERAL => out.extend(chars.next()),
            c => out.push(c),
        }
    }
    (out, marks)
}

/// Calls the library. Its errors, and its panics on hostile files, become errors.
fn guarded<T, E: std::fmt::Display>(what: &str, work: impl FnOnce() -> Result<T, E>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(err)) => Err(Error::new(Kind::Tokenizer, format!("{what} failed: {err}"))),
        Err(_) => bail!(Tokenizer, "{what} failed: the tokenizer library panicked on this file"),
    }
}

fn check_length(text: &str) -> Result<()> {
    if text.len() > MAX_TEXT {
        bail!(
            Tokenizer,
            "the text has {} bytes, expected at most {MAX_TEXT}",
            text.len()
        );
    }
    Ok(())
}

/// The steps of a nested sequence, in order. The JSON parser limits the nesting.
fn flatten<'a>(step: &'a Value, members: &str) -> Vec<&'a Value> {
    match step[members].as_array() {
        Some(steps) => steps.iter().flat_map(|step| flatten(step, members)).collect(),
        None if step.is_null() => Vec::new(),
        None => vec![step],
    }
}

/// An upper bound of the factor by which a normalizer lengthens a text.
fn expansion(normalizer: &Value) -> u64 {
    flatten(normalizer, "normalizers").iter().fold(1u64, |total, step| {
        let growth = match step["type"].as_str() {
            // Every byte may match.
            Some("Replace") => {
                let content = step["content"].as_str().map_or(1, str::len) as u64;
                let pattern = step["pattern"]["String"].as_str().map_or(1, str::len).max(1) as u64;
                content.div_ceil(pattern).max(1)
            }
            // Prepends to every piece of text, and a piece may be a single byte.
            Some("Prepend") => 1 + step["prepend"].as_str().map_or(1, str::len) as u64,
            Some("ByteLevel") => 2,
            _ => 1,
        };
        total.saturating_mul(growth)
    })
}

/// Refuses decoders on which the library panics.
fn check_decoder(decoder: &Value) -> Result<()> {
    for step in flatten(decoder, "decoders") {
        if step["type"] == "Strip" && step["stop"] != 0 {
            bail!(Tokenizer, "the decoder Strip has stop {}, expected 0", step["stop"]);
        }
    }
    Ok(())
}
