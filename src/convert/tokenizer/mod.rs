//! `tokenizer.json` rebuilt from the tokenizer keys of a GGUF file.
//!
//! The ids are the file's. There are three kinds: merges over bytes, merges over characters, and the most likely pieces.
//! Knows keys and the `tokenizers` format, not models.

mod byte_level;
mod charsmap;
mod sentence_piece;
mod splitters;
mod unigram;

use crate::container::gguf::Metadata;
use crate::error::{Error, Kind, Result, bail};
use serde_json::{Map, Value, json};
use std::collections::HashSet;

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
const BYTE: i64 = 6;

/// The tokens of a file: texts and kinds, equally many.
struct Vocabulary<'a> {
    texts: Vec<&'a str>,
    kinds: Vec<i64>,
    bos: Option<u64>,
    eos: Option<u64>,
    /// Early Phi-3 models are used with tokenizers whose turn tokens take the blanks after them along. Files do not say so.
    turns_strip: bool,
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
        "gpt2" => byte_level::rebuild(metadata, bytes, &vocabulary)?,
        "llama" => sentence_piece::rebuild(metadata, bytes, &vocabulary)?,
        "t5" => unigram::rebuild(metadata, bytes, &vocabulary)?,
        other => bail!(
            Tokenizer,
            "metadata key 'tokenizer.ggml.model' is '{other}'; known are gpt2, llama and t5"
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
        let turns_strip = metadata.string("general.architecture")? == Some("phi3")
            && metadata.string("tokenizer.ggml.model")? == Some("llama");
        Ok(Vocabulary {
            texts,
            kinds,
            bos,
            eos,
            turns_strip,
        })
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
        let strips = |text: &str| match text {
            "</s>" => true,
            "<|endoftext|>" => false,
            _ => text.starts_with("<|") && text.ends_with("|>"),
        };
        let entry = |(id, text, kind): (usize, &str, i64)| {
            let rstrip = self.turns_strip && strips(text);
            json!({
                "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": rstrip,
                "normalized": false, "special": kind != USER_DEFINED,
            })
        };
        added.map(entry).collect()
    }

    /// The score of every token. Errors: `Tokenizer` when they are missing or not as many.
    fn scores(&self, metadata: &Metadata, bytes: &[u8]) -> Result<Vec<f32>> {
        let Some(scores) = metadata.floats("tokenizer.ggml.scores", bytes)? else {
            bail!(Tokenizer, "metadata key 'tokenizer.ggml.scores' is missing");
        };
        if scores.len() != self.texts.len() {
            bail!(
                Tokenizer,
                "{} tokens have {} scores in 'tokenizer.ggml.scores'",
                self.texts.len(),
                scores.len()
            );
        }
        Ok(scores)
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
