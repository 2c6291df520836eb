//! Special tokens: the names that templates use for them, and messages in which they stay ordinary text.

use super::tokenizer::Tokenizer;
use crate::error::{Result, bail};
use serde_json::{Map, Value};

/// Deepest nesting of a member of a message.
const MAX_MESSAGE_DEPTH: usize = 128;

/// The variables of templates for special tokens: `bos_token`, `eos_token` and `pad_token`, for those with an id.
///
/// Errors: `Tokenizer` for an id without a token.
pub fn special_tokens_map(
    tokenizer: &Tokenizer,
    bos: Option<u32>,
    eos: Option<u32>,
    pad: Option<u32>,
) -> Result<Map<String, Value>> {
    let mut map = Map::new();
    for (name, id) in [("bos_token", bos), ("eos_token", eos), ("pad_token", pad)] {
        let Some(id) = id else { continue };
        let Some(token) = tokenizer.token(id) else {
            bail!(
                Tokenizer,
                "{name} has id {id}, which is no token of a vocabulary of {}",
                tokenizer.vocab_size()
            );
        };
        map.insert(name.to_string(), Value::String(token));
    }
    Ok(map)
}

/// `messages` with [`Tokenizer::guard`] applied to all texts except roles, which templates compare.
///
/// Errors: `Usage` for messages that are nested too deeply.
pub fn guard_messages(tokenizer: &Tokenizer, messages: &[Value]) -> Result<Vec<Value>> {
    let guarded = messages.iter().map(|message| guard(tokenizer, message, 0));
    guarded.collect()
}

/// `value` with guarded texts; at depth 0 it is a message.
fn guard(tokenizer: &Tokenizer, value: &Value, depth: usize) -> Result<Value> {
    if depth > MAX_MESSAGE_DEPTH + 1 {
        bail!(
            Usage,
            "messages are nested too deeply, expected at most {MAX_MESSAGE_DEPTH} levels"
        );
    }
    Ok(match value {
        Value::String(text) => Value::String(tokenizer.guard(text)),
        Value::Array(items) => {
            let items = items.iter().map(|item| guard(tokenizer, item, depth + 1));
            Value::Array(items.collect::<Result<_>>()?)
        }
        Value::Object(fields) => {
            let guarded = fields.iter().map(|(key, value)| {
                Ok(match depth {
                    0 if key == "role" => (key.clone(), value.clone()),
                    0 => (key.clone(), guard(tokenizer, value, 1)?),
                    _ => (tokenizer.guard(key), guard(tokenizer, value, depth + 1)?),
                })
            });
            Value::Object(guarded.collect::<Result<_>>()?)
        }
        other => other.clone(),
    })
}
