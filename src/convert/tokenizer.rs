//! `tokenizer.json` rebuilt from the tokenizer keys of a GGUF file.
//!
//! The ids are the file's. What the keys only name, the splitting of text before merges apply, comes from the table of
//! known names; an unknown name is refused. Knows keys and the `tokenizers` format, not models.

use crate::container::gguf::Metadata;
use crate::error::{Error, Kind, Result, bail};
use serde_json::{Map, Value, json};
use std::collections::{HashMap, HashSet};

/// Words, numbers and punctuation of GPT-2 and its successors, as regular expressions of the `tokenizers` format.
mod split {
    /// Contractions in any case, words with one leading symbol, up to three digits, punctuation with line ends, blanks.
    pub const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    /// The same with single digits.
    pub const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    /// What "default" stands for, applied one after the other.
    pub const DEFAULT: [&str; 4] = [
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    ];
}

/// Texts of control tokens that end a turn whatever the file calls its end-of-sequence token.
const END_OF_TURN: [&str; 7] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
];

/// What the tokenizer keys of a file say.
pub(super) struct Tokens {
    /// `tokenizer.json`, `None` when the file has no tokenizer.
    pub vocab: Option<Vec<u8>>,
    pub config: Map<String, Value>,
    pub notes: Vec<String>,
}

/// The kinds of a token, in the file's numbering.
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const UNUSED: i64 = 5;

/// The tokens of a file: texts and kinds, equally many.
struct Vocabulary<'a> {
    texts: Vec<&'a str>,
    kinds: Vec<i64>,
    bos: Option<u64>,
    eos: Option<u64>,
}

/// Reads the tokenizer of a file whose bytes are `bytes`.
///
/// Errors: `Tokenizer` names the model or the pre-tokenizer that cannot be rebuilt, and everything that does not fit
/// together; `Parse` keys of the wrong type.
pub(super) fn read(metadata: &Metadata, bytes: &[u8]) -> Result<Tokens> {
    let mut notes = Vec::new();
    let Some(model) = metadata.string("tokenizer.ggml.model")? else {
        notes.push("the file has no tokenizer: the result can be run with token ids only".to_owned());
        return Ok(Tokens {
            vocab: None,
            config: Map::new(),
            notes,
        });
    };
    let vocabulary = Vocabulary::read(metadata, bytes)?;
    let tokenizer = match model {
        "gpt2" => byte_level(metadata, bytes, &vocabulary)?,
        "llama" => sentence_piece(metadata, bytes, &vocabulary)?,
        other => bail!(
            Tokenizer,
            "metadata key 'tokenizer.ggml.model' is '{other}'; known are gpt2 and llama"
        ),
    };
    let vocab = serde_json::to_vec(&tokenizer)
        .map_err(|err| Error::new(Kind::Tokenizer, format!("the rebuilt tokenizer is no JSON: {err}")))?;
    // What the reader of the container will do, done here, where the source can still be named.
    tokenizers::Tokenizer::from_bytes(&vocab)
        .map_err(|err| Error::new(Kind::Tokenizer, format!("the file's tokenizer does not work: {err}")))?;
    let config = vocabulary.config(metadata, &mut notes)?;
    Ok(Tokens {
        vocab: Some(vocab),
        config,
        notes,
    })
}

impl<'a> Vocabulary<'a> {
    fn read(metadata: &Metadata, bytes: &'a [u8]) -> Result<Vocabulary<'a>> {
        let Some(texts) = metadata.strings("tokenizer.ggml.tokens", bytes)? else {
            bail!(Tokenizer, "metadata key 'tokenizer.ggml.tokens' is missing");
        };
        let kinds = match metadata.integers("tokenizer.ggml.token_type", bytes)? {
            Some(kinds) => kinds,
            None => bail!(Tokenizer, "metadata key 'tokenizer.ggml.token_type' is missing"),
        };
        if kinds.len() != texts.len() {
            bail!(
                Tokenizer,
                "{} tokens have {} kinds in 'tokenizer.ggml.token_type'",
                texts.len(),
                kinds.len()
            );
        }
        let mut seen = HashSet::new();
        if let Some((id, text)) = texts.iter().enumerate().find(|(_, text)| !seen.insert(**text)) {
            bail!(Tokenizer, "token {id}, '{text}', occurs twice");
        }
        if let Some(id) = texts.iter().position(|text| text.is_empty()) {
            bail!(Tokenizer, "token {id} is empty");
        }
        let id = |key: &str| -> Result<Option<u64>> {
            let id = metadata.unsigned(key)?;
            match id.filter(|&id| id >= texts.len() as u64) {
                Some(id) => bail!(
                    Tokenizer,
                    "metadata key '{key}' is {id}, but there are {} tokens",
                    texts.len()
                ),
                None => Ok(id),
            }
        };
        let (bos, eos) = (id("tokenizer.ggml.bos_token_id")?, id("tokenizer.ggml.eos_token_id")?);
        Ok(Vocabulary { texts, kinds, bos, eos })
    }

    /// Every token that text can contain, with its id.
    fn used(&self) -> impl Iterator<Item = (usize, &'a str, i64)> {
        let all = self.texts.iter().zip(&self.kinds).enumerate();
        all.map(|(id, (text, kind))| (id, *text, *kind))
            .filter(|&(_, _, kind)| kind != UNUSED)
    }

    fn ids(&self) -> Map<String, Value> {
        self.used().map(|(id, text, _)| (text.to_owned(), id.into())).collect()
    }

    /// Tokens that are found in the text before it is split. Control tokens are special, those of the user are not.
    fn added(&self) -> Vec<Value> {
        let added = self
            .used()
            .filter(|&(_, _, kind)| matches!(kind, UNKNOWN | CONTROL | USER_DEFINED));
        let entry = |(id, text, kind): (usize, &str, i64)| {
            json!({
                "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": kind != USER_DEFINED,
            })
        };
        added.map(entry).collect()
    }

    /// The step that puts the start and end tokens around a text; `None` when there are none to put.
    fn template(&self, bos: bool, eos: bool) -> Result<Option<Value>> {
        let mut special = Map::new();
        let mut piece = |wanted: bool, id: Option<u64>, what: &str, type_id: u8| -> Result<Option<Value>> {
            if !wanted {
                return Ok(None);
            }
            let text = id.and_then(|id| self.texts.get(usize::try_from(id).ok()?).map(|text| (id, *text)));
            let Some((id, text)) = text else {
                bail!(
                    Tokenizer,
                    "the file adds a {what} token to texts and does not say which"
                );
            };
            special.insert(text.to_owned(), json!({"id": text, "ids": [id], "tokens": [text]}));
            Ok(Some(json!({"SpecialToken": {"id": text, "type_id": type_id}})))
        };
        let mut sequence = |name: &str, type_id: u8| -> Result<Vec<Value>> {
            let text = json!({"Sequence": {"id": name, "type_id": type_id}});
            let parts = [
                piece(bos, self.bos, "start", type_id)?,
                Some(text),
                piece(eos, self.eos, "end", type_id)?,
            ];
            Ok(parts.into_iter().flatten().collect())
        };
        let single = sequence("A", 0)?;
        let mut pair = single.clone();
        pair.extend(sequence("B", 1)?);
        let step = json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special});
        Ok((bos || eos).then_some(step))
    }

    /// The header's `tokenizer_config`.
    fn config(&self, metadata: &Metadata, notes: &mut Vec<String>) -> Result<Map<String, Value>> {
        let mut config = Map::new();
        if let Some(template) = metadata.string("tokenizer.chat_template")? {
            config.insert("chat_template".into(), template.into());
        }
        let mut others: Vec<&str> = metadata
            .keys()
            .filter_map(|key| key.strip_prefix("tokenizer.chat_template."))
            .collect();
        others.sort_unstable();
        notes.extend(
            others
                .iter()
                .map(|name| format!("chat template '{name}' is left out; only the default is kept")),
        );
        let mut stops: Vec<u64> = self.eos.into_iter().collect();
        for key in ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
            stops.extend(metadata.unsigned(key)?);
        }
        let control = self
            .used()
            .filter(|(_, text, kind)| *kind == CONTROL && END_OF_TURN.contains(text));
        stops.extend(control.map(|(id, _, _)| id as u64));
        let mut seen = HashSet::new();
        stops.retain(|id| seen.insert(*id));
        if stops.is_empty() {
            notes.push("no end-of-sequence token is named; generation will run to its length limit".to_owned());
        }
        config.insert("eos_token_ids".into(), stops.into());
        if let Some(bos) = self.bos {
            config.insert("bos_token_id".into(), bos.into());
        }
        if let Some(pad) = metadata.unsigned("tokenizer.ggml.padding_token_id")? {
            config.insert("pad_token_id".into(), pad.into());
        }
        Ok(config)
    }
}

/// Byte-level BPE: text becomes the 256 characters that stand for bytes, is split, and merged by rank.
fn byte_level(metadata: &Metadata, bytes: &[u8], vocabulary: &Vocabulary) -> Result<Value> {
    let Some(pre) = metadata.string("tokenizer.ggml.pre")? else {
        bail!(
            Tokenizer,
            "metadata key 'tokenizer.ggml.pre' is missing: how to split text is unknown"
        );
    };
    let prefix = metadata.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(false);
    let letters = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": use_regex});
    let split =
        |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    let sequence = |steps: Vec<Value>| json!({"type": "Sequence", "pretokenizers": steps});
    let (splitter, normalizer, whole_words) = match pre {
        "gpt-2" => (letters(true), Value::Null, false),
        "smollm" => (
            sequence(vec![
                json!({"type": "Digits", "individual_digits": true}),
                letters(true),
            ]),
            Value::Null,
            false,
        ),
        "llama-bpe" | "llama3" | "llama-v3" => {
            (sequence(vec![split(split::LLAMA3), letters(false)]), Value::Null, true)
        }
        "qwen2" => (
            sequence(vec![split(split::QWEN2), letters(false)]),
            json!({"type": "NFC"}),
            false,
        ),
        "default" => {
            let steps = split::DEFAULT.iter().map(|regex| split(regex)).chain([letters(false)]);
            (sequence(steps.collect()), Value::Null, false)
        }
        other => bail!(
            Tokenizer,
            "metadata key 'tokenizer.ggml.pre' is '{other}'; known are gpt-2, smollm, llama-bpe, qwen2 and default"
        ),
    };
    let Some(merges) = metadata.strings("tokenizer.ggml.merges", bytes)? else {
        bail!(Tokenizer, "metadata key 'tokenizer.ggml.merges' is missing");
    };
    let merges = merges
        .into_iter()
        .enumerate()
        .map(|(rank, merge)| match merge.split_once(' ') {
            Some((left, right)) if !left.is_empty() && !right.is_empty() && !right.contains(' ') => {
                Ok(json!([left, right]))
            }
            _ => bail!(
                Tokenizer,
                "merge {rank}, '{merge}', is not two tokens with a blank between"
            ),
        });
    let merges: Vec<Value> = merges.collect::<Result<_>>()?;
    let flag = |key: &str| metadata.bool(key).map(|flag| flag.unwrap_or(false));
    let add_bos = metadata.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(whole_words);
    let decoder = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": vocabulary.added(),
        "normalizer": normalizer,
        "pre_tokenizer": splitter,
        "post_processor": vocabulary.template(add_bos, flag("tokenizer.ggml.add_eos_token")?)?,
        "decoder": decoder,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": whole_words,
            "vocab": vocabulary.ids(), "merges": merges,
        },
    }))
}

/// BPE over characters with byte fallback; merges follow from the scores: a pair may merge when the result is a token, the
/// one with the better score first.
fn sentence_piece(metadata: &Metadata, bytes: &[u8], vocabulary: &Vocabulary) -> Result<Value> {
    let flag = |key: &str, default: bool| metadata.bool(key).map(|flag| flag.unwrap_or(default));
    if flag("tokenizer.ggml.remove_extra_whitespaces", false)? {
        bail!(
            Tokenizer,
            "metadata key 'tokenizer.ggml.remove_extra_whitespaces' is true, which cannot be rebuilt"
        );
    }
    let Some(scores) = metadata.floats("tokenizer.ggml.scores", bytes)? else {
        bail!(Tokenizer, "metadata key 'tokenizer.ggml.scores' is missing");
    };
    if scores.len() != vocabulary.texts.len() {
        bail!(
            Tokenizer,
            "{} tokens have {} scores in 'tokenizer.ggml.scores'",
            vocabulary.texts.len(),
            scores.len()
        );
    }
    let prefix = flag("tokenizer.ggml.add_space_prefix", true)?;
    let blank = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let normalizer = if prefix {
        json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, blank]})
    } else {
        blank
    };
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let unknown = vocabulary
        .used()
        .find(|&(_, _, kind)| kind == UNKNOWN)
        .map(|(_, text, _)| text);
    let template = vocabulary.template(
        flag("tokenizer.ggml.add_bos_token", true)?,
        flag("tokenizer.ggml.add_eos_token", false)?,
    )?;
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": vocabulary.added(),
        "normalizer": normalizer,
        "pre_tokenizer": null,
        "post_processor": template,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocabulary.ids(), "merges": merges_of_scores(vocabulary, &scores),
        },
    }))
}

/// Every split of a token into two tokens, best score first; of equal scores the one with the longer left part, then the
/// longer right part, then the order of the vocabulary. Control and user tokens never come out of a merge: they are found
/// before the text is split, or are not meant.
fn merges_of_scores<'a>(vocabulary: &Vocabulary<'a>, scores: &[f32]) -> Vec<[&'a str; 2]> {
    struct Merge<'a> {
        score: f32,
        /// Characters of the parts.
        lengths: [usize; 2],
        /// Ids of the whole and the parts.
        ids: [usize; 3],
        parts: [&'a str; 2],
    }
    let ids: HashMap<&str, usize> = vocabulary.used().map(|(id, text, _)| (text, id)).collect();
    let mut merges = Vec::new();
    for (id, text, kind) in vocabulary.used() {
        // Longer texts are no words; splitting them everywhere would take quadratic time.
        if matches!(kind, UNKNOWN | CONTROL | USER_DEFINED) || text.len() > 1024 {
            continue;
        }
        let count = text.chars().count();
        for (chars, (at, _)) in text.char_indices().enumerate().skip(1) {
            let (left, right) = text.split_at(at);
            if let (Some(&l), Some(&r), Some(&score)) = (ids.get(left), ids.get(right), scores.get(id)) {
                merges.push(Merge {
                    score,
                    lengths: [chars, count - chars],
                    ids: [id, l, r],
                    parts: [left, right],
                });
            }
        }
    }
    merges.sort_by(|a, b| {
        b.score
            .total_cmp(&a.score)
            .then(b.lengths.cmp(&a.lengths))
            .then(a.ids.cmp(&b.ids))
    });
    merges.into_iter().map(|merge| merge.parts).collect()
}
