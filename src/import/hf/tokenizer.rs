//! The tokenizer of a Hugging Face model: `tokenizer.json`, with the added tokens that only `tokenizer_config.json` has.

use super::folder::Files;
use crate::error::{Result, bail, error};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// An added token as `tokenizer_config.json` describes it, see `AddedToken` in transformers.
#[derive(Deserialize)]
struct Added {
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    special: bool,
    normalized: Option<bool>,
}

/// The added tokens of `tokenizer.json`.
#[derive(Deserialize)]
struct Known {
    added_tokens: Option<Vec<Value>>,
}

/// `tokenizer.json`, `None` if there is none. Tokens of `added_tokens_decoder` in `tokenizer_config.json` that it lacks, or has
/// with other flags, are put in, as transformers does. Else its bytes are unchanged.
///
/// Errors: `Tokenizer` for a token with another id in `tokenizer.json`; `Parse`, `Io`.
pub(super) fn complete(files: &dyn Files) -> Result<Option<Vec<u8>>> {
    let Some(bytes) = files.bytes("tokenizer.json")? else {
        return Ok(None);
    };
    let config = files.json("tokenizer_config.json")?.unwrap_or_default();
    let Some(decoder) = config.get("added_tokens_decoder").filter(|decoder| !decoder.is_null()) else {
        return Ok(Some(bytes));
    };
    let wanted = BTreeMap::<u64, Added>::deserialize(decoder)
        .map_err(|err| error!(Parse, "tokenizer_config.json: 'added_tokens_decoder': {err}"))?;
    let bad = |err| error!(Tokenizer, "tokenizer.json: {err}");
    let Known { added_tokens } = serde_json::from_slice(&bytes).map_err(bad)?;
    let mut tokens = added_tokens.unwrap_or_default();
    let mut is_changed = false;
    for (id, added) in wanted {
        let Added { content, special, .. } = added;
        let normalized = added.normalized.unwrap_or(!special);
        let token = json!({
            "id": id, "content": content, "single_word": added.single_word, "lstrip": added.lstrip,
            "rstrip": added.rstrip, "normalized": normalized, "special": special,
        });
        match tokens
            .iter_mut()
            .find(|known| known.get("content") == token.get("content"))
        {
            Some(known) if *known == token => continue,
            Some(known) if known.get("id") != token.get("id") => bail!(
                Tokenizer,
                "added token '{content}' has id {id} in tokenizer_config.json, but {} in tokenizer.json",
                known.get("id").unwrap_or(&Value::Null)
            ),
            Some(known) => *known = token,
            None => tokens.push(token),
        }
        is_changed = true;
    }
    if !is_changed {
        return Ok(Some(bytes));
    }
    // The `tokenizers` crate expects ascending ids.
    tokens.sort_by_key(|token| token.get("id").and_then(Value::as_u64));
    let mut document: Map<String, Value> = serde_json::from_slice(&bytes).map_err(bad)?;
    document.insert("added_tokens".to_owned(), tokens.into());
    serde_json::to_vec(&document).map(Some).map_err(bad)
}
