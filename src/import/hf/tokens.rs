//! Chat template and special tokens of a Hugging Face model, from the several files that may hold them.
//!
//! The tokenizer itself is copied.

use super::folder::Files;
use super::keys::Keys;
use crate::error::{Error, Kind, Result, bail};
use crate::import::added::AddedTokens;
use serde::Deserialize;
use serde_json::{Map, Value};

/// The sampler settings of the generation configuration that are kept, for the user's information.
const SAMPLING: [&str; 7] = [
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
];

/// The header's `tokenizer_config`, and the sampling defaults of the source.
pub struct Tokens {
    pub config: Map<String, Value>,
    pub sampling: Map<String, Value>,
    pub notes: Vec<String>,
}

/// The vocabulary in `tokenizer.json`. It is only read when it is needed.
#[derive(Deserialize)]
struct WithModel {
    model: WithVocab,
}

#[derive(Deserialize)]
struct WithVocab {
    vocab: Value,
}

/// Reads template and ids. `config` is `config.json`, `vocab` is `tokenizer.json`.
pub fn read(files: &dyn Files, config: &Map<String, Value>, vocab: Option<&[u8]>) -> Result<Tokens> {
    let generation = files.json("generation_config.json")?.unwrap_or_default();
    let tokenizer = files.json("tokenizer_config.json")?.unwrap_or_default();
    let mut notes = Vec::new();
    let mut out = Map::new();
    if let Some(template) = template(files, &tokenizer, &mut notes)? {
        out.insert("chat_template".into(), template.into());
    }
    let sources = [
        Keys::new(&generation, "generation_config.json"),
        Keys::new(config, "config.json"),
    ];
    let inner = config.get("text_config").and_then(Value::as_object);
    let inner = inner.map(|inner| Keys::new(inner, "config.json (text_config)"));
    let sources: Vec<Keys> = sources.into_iter().chain(inner).collect();

    let mut eos: Vec<u64> = Vec::new();
    for keys in &sources {
        eos.extend(ids(keys, "eos_token_id")?);
    }
    eos.extend(named_token(&tokenizer, "eos_token", vocab, &mut notes)?);
    let mut seen = Vec::new();
    eos.retain(|id| {
        !seen.contains(id) && {
            seen.push(*id);
            true
        }
    });
    if eos.is_empty() {
        notes.push("there is no end-of-sequence token; answers end at their length limit".into());
    }
    out.insert("eos_token_ids".into(), eos.into());
    for (key, name) in [("bos_token_id", "bos_token"), ("pad_token_id", "pad_token")] {
        let mut id = None;
        for keys in &sources {
            id = id.or(ids(keys, key)?.first().copied());
        }
        if id.is_none() {
            id = named_token(&tokenizer, name, vocab, &mut notes)?;
        }
        if let Some(id) = id {
            out.insert(key.into(), id.into());
        }
    }
    let sampling = SAMPLING.iter().filter_map(|&key| {
        let value = generation.get(key).filter(|value| !value.is_null())?;
        Some((key.to_owned(), value.clone()))
    });
    Ok(Tokens {
        config: out,
        sampling: sampling.collect(),
        notes,
    })
}

/// One id or a list of ids. Transformers writes −1 for no id.
fn ids(keys: &Keys, key: &str) -> Result<Vec<u64>> {
    let bad = |value: &Value| Error::new(Kind::Parse, format!("key '{key}': expected token ids, found {value}"));
    match keys.get(key) {
        None => Ok(Vec::new()),
        Some(value) if value.as_i64() == Some(-1) => Ok(Vec::new()),
        Some(Value::Array(list)) => list
            .iter()
            .map(|value| value.as_u64().ok_or_else(|| bad(value)))
            .collect(),
        Some(value) => Ok(vec![value.as_u64().ok_or_else(|| bad(value))?]),
    }
}

/// The id of a token that `tokenizer_config.json` gives by its text.
fn named_token(
    tokenizer: &Map<String, Value>,
    key: &str,
    vocab: Option<&[u8]>,
    notes: &mut Vec<String>,
) -> Result<Option<u64>> {
    let text = match tokenizer.get(key) {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) => text.as_str(),
        Some(Value::Object(token)) => match token.get("content").and_then(Value::as_str) {
            Some(text) => text,
            None => bail!(Parse, "tokenizer_config.json: key '{key}' has no text in 'content'"),
        },
        Some(other) => bail!(
            Parse,
            "tokenizer_config.json: key '{key}': expected a token, found {other}"
        ),
    };
    let Some(vocab) = vocab else { return Ok(None) };
    let bad = |err: serde_json::Error| Error::new(Kind::Tokenizer, format!("tokenizer.json: {err}"));
    let AddedTokens { added_tokens } = serde_json::from_slice(vocab).map_err(bad)?;
    let mut added = added_tokens.iter().flatten();
    if let Some(token) = added.find(|token| token.content == text) {
        return Ok(token.id);
    }
    let WithModel { model } = serde_json::from_slice(vocab).map_err(bad)?;
    let found = match &model.vocab {
        Value::Object(ids) => ids.get(text).and_then(Value::as_u64),
        Value::Array(pieces) => {
            let place = pieces
                .iter()
                .position(|piece| piece.get(0).and_then(Value::as_str) == Some(text));
            place.map(|place| place as u64)
        }
        _ => None,
    };
    if found.is_none() {
        notes.push(format!(
            "{key} is '{text}' in tokenizer_config.json, but tokenizer.json has no such token"
        ));
    }
    Ok(found)
}

/// The chat template, from its own file or from the older places.
fn template(files: &dyn Files, tokenizer: &Map<String, Value>, notes: &mut Vec<String>) -> Result<Option<String>> {
    if let Some(text) = files.text("chat_template.jinja")? {
        return Ok(Some(text));
    }
    let older = files.json("chat_template.json")?;
    let value = match &older {
        Some(map) => map.get("chat_template"),
        None => tokenizer.get("chat_template"),
    };
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Array(list)) => {
            let named = |entry: &Value| {
                Some((
                    entry.get("name")?.as_str()?.to_owned(),
                    entry.get("template")?.as_str()?.to_owned(),
                ))
            };
            let mut chosen = None;
            for entry in list {
                match named(entry) {
                    Some((name, text)) if name == "default" => chosen = Some(text),
                    Some((name, _)) => {
                        notes.push(format!("chat template '{name}' is left out; only 'default' is kept"))
                    }
                    None => bail!(
                        Parse,
                        "tokenizer_config.json: an entry of 'chat_template' lacks name or template"
                    ),
                }
            }
            match chosen {
                Some(text) => Ok(Some(text)),
                None => bail!(
                    Template,
                    "tokenizer_config.json: there is no chat template called 'default'"
                ),
            }
        }
        Some(_) => bail!(Parse, "'chat_template' is neither a string nor a list of named strings"),
    }
}
