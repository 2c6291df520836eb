//! The tokens of a GGUF file.

use crate::error::{Result, bail};
use crate::format::gguf::Metadata;
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// Control tokens that end a turn, in addition to the end-of-sequence token of the file.
const END_OF_TURN: [&str; 7] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
];

/// Kinds of tokens, by the numbers in the file.
pub(super) const UNKNOWN: i64 = 2;
pub(super) const CONTROL: i64 = 3;
pub(super) const USER_DEFINED: i64 = 4;
pub(super) const UNUSED: i64 = 5;
pub(super) const BYTE: i64 = 6;

/// The tokens of a file.
pub(super) struct Vocabulary<'a> {
    pub texts: Vec<&'a str>,
    /// The kind of each token.
    pub kinds: Vec<i64>,
    bos: Option<u64>,
    eos: Option<u64>,
    /// Early Phi-3 tokenizers strip the blanks after turn tokens. The files do not say so.
    turns_strip: bool,
}

impl<'a> Vocabulary<'a> {
    /// Errors: `Tokenizer` for missing or inconsistent keys, `Parse` for keys of the wrong type.
    pub fn read(metadata: &Metadata, bytes: &'a [u8]) -> Result<Vocabulary<'a>> {
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

    /// Every token that is not unused: id, text and kind.
    pub fn used(&self) -> impl Iterator<Item = (usize, &'a str, i64)> {
        let all = self.texts.iter().zip(&self.kinds).enumerate();
        all.map(|(id, (text, kind))| (id, *text, *kind))
            .filter(|&(_, _, kind)| kind != UNUSED)
    }

    /// The id of every text.
    pub fn ids(&self) -> Map<String, Value> {
        self.used().map(|(id, text, _)| (text.to_owned(), id.into())).collect()
    }

    /// The tokens that are matched in the text before it is split. All are special except those defined by the user.
    pub fn added(&self) -> Vec<Value> {
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

    /// The score of every token. Errors: `Tokenizer` when they are missing or their number differs.
    pub fn scores(&self, metadata: &Metadata, bytes: &[u8]) -> Result<Vec<f32>> {
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

    /// The step that puts start and end tokens around a text; `None` if there are none.
    pub fn template(&self, bos: bool, eos: bool) -> Result<Option<Value>> {
        let mut special = Map::new();
        let mut piece = |wanted: bool, id: Option<u64>, what: &str, type_id: u8| -> Result<Option<Value>> {
            if !wanted {
                return Ok(None);
            }
            let text = id.and_then(|id| self.texts.get(usize::try_from(id).ok()?).map(|text| (id, *text)));
            let Some((id, text)) = text else {
                bail!(
                    Tokenizer,
                    "texts are to have a {what} token, but the file does not name it"
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
    pub fn config(&self, metadata: &Metadata, notes: &mut Vec<String>) -> Result<Map<String, Value>> {
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
            notes.push("there is no end-of-sequence token; answers end at their length limit".to_owned());
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
