//! The tokenizer keys of a GGUF file for a `tokenizer.json`: what the other files of this folder read, written.
//!
//! Only byte-level BPE: the scores of other tokenizers are not in `tokenizer.json`.

use super::byte_level::{MERGES, normalizer, steps};
use super::splitters::Splitter;
use super::vocabulary::{CONTROL, END_OF_TURN, KINDS, NORMAL, TOKENS, UNUSED, USER_DEFINED, need};
use crate::error::{Result, bail, error};
use crate::format::gguf::Item;
use crate::format::json;
use crate::import::added::AddedToken;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// The most tokens of a vocabulary, larger than any published one.
const MOST_TOKENS: u64 = 1 << 24;

/// The keys of the tokenizer `vocab`, a `tokenizer.json`, with the settings `config`, a header's `tokenizer_config`, for an
/// embedding of `entries` rows. Rows without a token get unused ones.
///
/// Errors: `Tokenizer` names what the keys cannot state.
pub fn describe(vocab: &[u8], config: &Map<String, Value>, entries: usize) -> Result<Vec<(String, Item)>> {
    let document = json::parse_object(vocab, "tokenizer.json")?;
    let model = plain_bpe(&document)?;
    let added: Vec<AddedToken> = match document.get("added_tokens") {
        Some(list) => Deserialize::deserialize(list).map_err(|err| error!(Tokenizer, "added_tokens: {err}"))?,
        None => Vec::new(),
    };
    let (texts, kinds) = tokens(model, &added, entries)?;
    let (pre, prefix) = pre_tokenizer(&document)?;
    let mut keys = vec![
        ("tokenizer.ggml.model".to_owned(), Item::Text("gpt2".into())),
        ("tokenizer.ggml.pre".to_owned(), Item::Text(pre.into())),
    ];
    if prefix {
        keys.push(("tokenizer.ggml.add_space_prefix".into(), Item::Bool(true)));
    }
    let ends = Ends::of(&document)?;
    let ids = special(config, &texts, &kinds)?;
    for (wanted, key, what) in [(&ends.bos, "bos", "start"), (&ends.eos, "eos", "end")] {
        let id = ids.iter().find(|(name, _)| *name == key).map(|&(_, id)| id);
        let named = id.and_then(|id| texts.get(id as usize));
        if wanted.is_some() && named != wanted.as_ref() {
            bail!(
                Tokenizer,
                "texts have {wanted:?} as their {what} token, and the {key} token is {named:?}"
            );
        }
        keys.push((format!("tokenizer.ggml.add_{key}_token"), Item::Bool(wanted.is_some())));
    }
    keys.extend(
        ids.into_iter()
            .map(|(name, id)| (format!("tokenizer.ggml.{name}_token_id"), Item::Unsigned(id))),
    );
    keys.push((TOKENS.into(), Item::Texts(texts)));
    keys.push((KINDS.into(), Item::Integers(kinds)));
    keys.push((MERGES.into(), Item::Texts(merges(model)?)));
    if let Some(template) = config.get("chat_template").and_then(Value::as_str) {
        keys.push(("tokenizer.chat_template".into(), Item::Text(template.into())));
    }
    Ok(keys)
}

/// The model, if it is byte-level BPE without options that the keys cannot state. Errors: `Tokenizer`.
fn plain_bpe(document: &Map<String, Value>) -> Result<&Map<String, Value>> {
    let model = need("model", document.get("model").and_then(Value::as_object))?;
    let off = [Value::Null, false.into(), "".into()];
    let options = [
        "dropout",
        "unk_token",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "byte_fallback",
    ];
    let plain = |key: &&str| model.get(*key).is_none_or(|value| off.contains(value));
    let kind = model.get("type").and_then(Value::as_str).unwrap_or("BPE");
    if kind != "BPE" {
        bail!(
            Tokenizer,
            "the tokenizer's model is {kind}; written are byte-level BPE tokenizers"
        );
    }
    match options.iter().find(|key| !plain(key)) {
        None => Ok(model),
        Some(key) => bail!(
            Tokenizer,
            "the tokenizer's option '{key}' is {}; written are byte-level BPE tokenizers without it",
            model[*key]
        ),
    }
}

/// Text and kind of every token. Errors: `Tokenizer`.
fn tokens(model: &Map<String, Value>, added: &[AddedToken], entries: usize) -> Result<(Vec<String>, Vec<i32>)> {
    let vocab = need("model.vocab", model.get("vocab").and_then(Value::as_object))?;
    let id = |text: &str, id: Option<u64>| match id.filter(|&id| id < MOST_TOKENS && id < entries as u64) {
        Some(id) => Ok(id as usize),
        None => bail!(Tokenizer, "token '{text}' has id {id:?}, expected one below {entries}"),
    };
    let mut texts = vec![None; entries];
    for (text, value) in vocab {
        texts[id(text, value.as_u64())?] = Some((text.clone(), NORMAL));
    }
    for token in added {
        if token.single_word || token.lstrip || token.rstrip {
            bail!(
                Tokenizer,
                "token '{}' changes the text around it, which GGUF cannot state",
                token.content
            );
        }
        let kind = if token.special { CONTROL } else { USER_DEFINED };
        texts[id(&token.content, token.id)?] = Some((token.content.clone(), kind));
    }
    let unused = |id: usize| (format!("[PAD{id}]"), UNUSED);
    let all = texts.into_iter().enumerate();
    let all = all.map(|(id, token)| token.unwrap_or_else(|| unused(id)));
    Ok(all.map(|(text, kind)| (text, kind as i32)).unzip())
}

fn merges(model: &Map<String, Value>) -> Result<Vec<String>> {
    let merges = need("model.merges", model.get("merges").and_then(Value::as_array))?;
    let merge = |merge: &Value| match merge {
        Value::String(pair) => Some(pair.clone()),
        Value::Array(pair) => match &pair[..] {
            [Value::String(left), Value::String(right)] if !left.contains(' ') && !right.contains(' ') => {
                Some(format!("{left} {right}"))
            }
            _ => None,
        },
        _ => None,
    };
    merges
        .iter()
        .map(|pair| merge(pair).ok_or_else(|| error!(Tokenizer, "merge {pair} is not two tokens without blanks")))
        .collect()
}

/// The name of the pre-tokenizer, and whether it puts a blank before texts. Errors: `Tokenizer` if it has no name.
fn pre_tokenizer(document: &Map<String, Value>) -> Result<(&'static str, bool)> {
    let found = listed(document.get("pre_tokenizer"), "pretokenizers");
    let normal = document.get("normalizer").filter(|value| !value.is_null());
    let whole = document["model"]
        .get("ignore_merges")
        .and_then(Value::as_bool)
        .unwrap_or(false);
    for (name, splitter) in Splitter::all() {
        for prefix in [false, true] {
            let own = steps(splitter, prefix);
            let same = own.len() == found.len() && own.iter().zip(&found).all(|(own, found)| same_step(own, found));
            if same && splitter.whole_first == whole && normalizer(splitter).as_ref() == normal {
                return Ok((name, prefix));
            }
        }
    }
    bail!(
        Tokenizer,
        "GGUF has no name for the way in which tokenizer.json splits texts"
    )
}

/// Whether two steps cut texts at the same places.
fn same_step(own: &Value, found: &Value) -> bool {
    let part = |step: &Value, key: &str| match (key, step.get(key)) {
        // Older files leave this out.
        ("use_regex", None) if step["type"] == "ByteLevel" => true.into(),
        (_, value) => value.cloned().unwrap_or_default(),
    };
    let keys = [
        "type",
        "pattern",
        "behavior",
        "invert",
        "individual_digits",
        "add_prefix_space",
        "use_regex",
    ];
    keys.iter().all(|key| part(own, key) == part(found, key))
}

/// The members of a sequence, or the only step; none for `null`.
fn listed(value: Option<&Value>, member: &str) -> Vec<Value> {
    match value {
        None | Some(Value::Null) => Vec::new(),
        Some(step) if step["type"] == "Sequence" => step[member].as_array().cloned().unwrap_or_default(),
        Some(step) => vec![step.clone()],
    }
}

/// The tokens that are put around texts.
#[derive(Default)]
struct Ends {
    bos: Option<String>,
    eos: Option<String>,
}

impl Ends {
    /// Errors: `Tokenizer` for another post-processor.
    fn of(document: &Map<String, Value>) -> Result<Ends> {
        let mut ends = Ends::default();
        for step in listed(document.get("post_processor"), "processors") {
            if step["type"] == "ByteLevel" {
                continue;
            }
            let other = || error!(Tokenizer, "GGUF cannot state the post-processor {}", step["type"]);
            let parts = step["single"]
                .as_array()
                .filter(|_| step["type"] == "TemplateProcessing");
            let parts = parts.ok_or_else(other)?;
            let text = parts.iter().position(|part| part.get("Sequence").is_some());
            let text = text.ok_or_else(other)?;
            let named = |parts: &[Value]| match parts {
                [] => Ok(None),
                [part] => Ok(part["SpecialToken"]["id"].as_str().map(str::to_owned)),
                _ => Err(other()),
            };
            (ends.bos, ends.eos) = (named(&parts[..text])?, named(&parts[text + 1..])?);
        }
        Ok(ends)
    }
}

/// The ids of special tokens by name. Readers take tokens that usually end turns for such, and need no key for them.
fn special(config: &Map<String, Value>, texts: &[String], kinds: &[i32]) -> Result<Vec<(&'static str, u32)>> {
    let single = |key: &str| config.get(key).and_then(Value::as_u64).map(|id| id as u32);
    let stops = config.get("eos_token_ids").and_then(Value::as_array);
    let stops: Vec<u32> = stops
        .into_iter()
        .flatten()
        .filter_map(Value::as_u64)
        .map(|id| id as u32)
        .collect();
    let ends_turns = |id: u32| {
        let text = texts.get(id as usize).map(String::as_str);
        kinds.get(id as usize) == Some(&(CONTROL as i32)) && text.is_some_and(|text| END_OF_TURN.contains(&text))
    };
    let first = stops.first().copied();
    let others: BTreeSet<u32> = stops.iter().skip(1).copied().filter(|&id| !ends_turns(id)).collect();
    if others.len() > 2 {
        bail!(
            Tokenizer,
            "{} tokens end answers, and GGUF has keys for three",
            stops.len()
        );
    }
    let others = ["eot", "eom"].into_iter().zip(others.into_iter().map(Some));
    let named = [
        ("eos", first),
        ("bos", single("bos_token_id")),
        ("padding", single("pad_token_id")),
    ];
    Ok(named
        .into_iter()
        .chain(others)
        .filter_map(|(name, id)| Some((name, id?)))
        .collect())
}
