//! The tokenizer of a Hugging Face model: `tokenizer.json`, with the added tokens that only `tokenizer_config.json` has.

use super::folder::Files;
use crate::error::{Result, bail, error};
use crate::import::added::{AddedToken, AddedTokens};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// `tokenizer.json`, `None` if there is none. Tokens of `added_tokens_decoder` in `tokenizer_config.json` that it lacks, or has
/// with other flags, are put in, as transformers does. Otherwise its bytes are unchanged.
///
/// Errors: `Tokenizer` for a token with another id in `tokenizer.json`; `Parse`, `Io`.
pub fn complete(files: &dyn Files) -> Result<Option<Vec<u8>>> {
    let Some(bytes) = files.bytes("tokenizer.json")? else {
        return Ok(None);
    };
    let config = files.json("tokenizer_config.json")?.unwrap_or_default();
    let Some(decoder) = config.get("added_tokens_decoder").filter(|decoder| !decoder.is_null()) else {
        return Ok(Some(bytes));
    };
    let wanted = BTreeMap::<u64, AddedToken>::deserialize(decoder)
        .map_err(|err| error!(Parse, "tokenizer_config.json: 'added_tokens_decoder': {err}"))?;
    let bad = |err| error!(Tokenizer, "tokenizer.json: {err}");
    let AddedTokens { added_tokens } = serde_json::from_slice(&bytes).map_err(bad)?;
    let mut tokens = added_tokens.unwrap_or_default();
    let mut is_changed = false;
    for (id, mut token) in wanted {
        token.id = Some(id);
        token.normalized = token.normalized.or(Some(!token.special));
        match tokens.iter_mut().find(|known| known.content == token.content) {
            Some(known) if *known == token => continue,
            Some(known) if known.id != token.id => bail!(
                Tokenizer,
                "added token '{}' has id {id} in tokenizer_config.json, but {:?} in tokenizer.json",
                token.content,
                known.id
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
    tokens.sort_by_key(|token| token.id);
    let mut document: Map<String, Value> = serde_json::from_slice(&bytes).map_err(bad)?;
    let added = serde_json::to_value(&tokens).map_err(bad)?;
    document.insert("added_tokens".to_owned(), added);
    serde_json::to_vec(&document).map(Some).map_err(bad)
}
