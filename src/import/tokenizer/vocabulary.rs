//! The tokens of a GGUF file.

use crate::error::{Result, bail, error};
use crate::format::gguf::Metadata;
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// Control tokens that end a turn, in addition to the end-of-sequence token of the file.
pub(super) const END_OF_TURN: [&str; 7] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
];

pub(super) const TOKENS: &str = "tokenizer.ggml.tokens";
pub(super) const KINDS: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";

/// Kinds of tokens, by the numbers in the file.
pub(super) const NORMAL: i64 = 1;
pub(super) const UNKNOWN: i64 = 2;
pub(super) const CONTROL: i64 = 3;
pub(super) const USER_DEFINED: i64 = 4;
pub(super) const UNUSED: i64 = 5;
pub(super) const BYTE: i64 = 6;

/// The value of a key. Errors: `Tokenizer` when it is missing.
pub(super) fn need<T>(key: &str, value: Option<T>) -> Result<T> {
    value.ok_or_else(|| error!(Tokenizer, "metadata key '{key}' is missing"))
}

/// The values of a key, one for each of `tokens` tokens; `default` for each if the key is missing. Errors: `Tokenizer` when their
/// number differs.
fn one_each<T: Clone>(tokens: usize, what: &str, key: &str, values: Option<Vec<T>>, default: T) -> Result<Vec<T>> {
    let values = values.unwrap_or_else(|| vec![default; tokens]);
    if values.len() != tokens {
        bail!(Tokenizer, "{tokens} tokens have {} {what} in '{key}'", values.len());
    }
    Ok(values)
}

/// The parts of `tokenizer.json` in which kinds of tokenizers differ.
pub(super) struct Rebuilt {
    pub normalizer: Option<Value>,
    pub pre_tokenizer: Option<Value>,
    pub decoder: Value,
    pub model: Value,
    /// Whether texts have a start token, and an end token, unless the file says otherwise.
    pub bos: bool,
    pub eos: bool,
}

/// The tokens of a file.
pub(super) struct Vocabulary<'a> {
    pub texts: Vec<&'a str>,
    /// The kind of each token.
    pub kinds: Vec<i64>,
    bos: Option<u64>,
    eos: Option<u64>,
    /// A token without text. It is never matched, and it adds nothing to a text.
    empty: Option<usize>,
    /// Early Phi-3 tokenizers strip the blanks after turn tokens. The files do not say so.
    turns_strip: bool,
}

impl<'a> Vocabulary<'a> {
    /// Errors: `Tokenizer` for missing or inconsistent keys, `Parse` for keys of the wrong type.
    pub fn read(metadata: &Metadata, bytes: &'a [u8]) -> Result<Vocabulary<'a>> {
        let texts = need(TOKENS, metadata.strings(TOKENS, bytes)?)?;
        let kinds = metadata.integers(KINDS, bytes)?;
        let mut kinds = one_each(texts.len(), "kinds", KINDS, kinds, NORMAL)?;
        let mut seen = HashSet::new();
        let mut empty = None;
        for (id, (text, kind)) in texts.iter().zip(&mut kinds).enumerate() {
            if text.is_empty() {
                *kind = UNUSED;
                empty = empty.or(Some(id));
            } else if !seen.insert(*text) {
                bail!(Tokenizer, "token {id}, '{text}', occurs twice");
            }
        }
        let id = |key: &str| -> Result<Option<u64>> {
            let id = metadata.unsigned(key)?;
            match id.filter(|&id| id >= texts.len() as u64) {
                Some(id) => {
                    let count = texts.len();
                    bail!(Tokenizer, "metadata key '{key}' is {id}, but there are {count} tokens")
                }
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
            empty,
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

    /// The score of every token; without scores all tokens are equally probable. Errors: `Tokenizer` when their number differs.
    pub fn scores(&self, metadata: &Metadata, bytes: &[u8]) -> Result<Vec<f32>> {
        let scores = metadata.floats(SCORES, bytes)?;
        one_each(self.texts.len(), "scores", SCORES, scores, 0.0)
    }

    /// The step that puts start and end tokens around a text; `None` if there are none.
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

    /// `tokenizer.json`.
    pub fn document(&self, metadata: &Metadata, rebuilt: Rebuilt) -> Result<Value> {
        let bos = metadata.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(rebuilt.bos);
        let eos = metadata.bool("tokenizer.ggml.add_eos_token")?.unwrap_or(rebuilt.eos);
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.added(),
            "normalizer": rebuilt.normalizer,
            "pre_tokenizer": rebuilt.pre_tokenizer,
            "post_processor": self.template(bos, eos)?,
            "decoder": rebuilt.decoder,
            "model": rebuilt.model,
        }))
    }

    /// The header's `tokenizer_config`.
    pub fn config(&self, metadata: &Metadata, notes: &mut Vec<String>) -> Result<Map<String, Value>> {
        let mut config = Map::new();
        if let Some(id) = self.empty {
            notes.push(format!(
                "token {id} has no text: it is never matched, and adds nothing to an answer"
            ));
        }
        if let Some(template) = metadata.string("tokenizer.chat_template")? {
            config.insert("chat_template".into(), template.into());
        }
        let others = metadata.keys();
        let mut others: Vec<&str> = others
            .filter_map(|key| key.strip_prefix("tokenizer.chat_template."))
            .collect();
        others.sort_unstable();
        let left_out = |name| format!("chat template '{name}' is left out; only the default is kept");
        notes.extend(others.into_iter().map(left_out));
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
