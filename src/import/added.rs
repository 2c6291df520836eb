//! The added tokens of a tokenizer: those that are matched in a text before it is split.

use serde::{Deserialize, Serialize};

/// An added token, see `AddedToken` in transformers.
#[derive(Debug, PartialEq, Deserialize, Serialize)]
pub(super) struct AddedToken {
    /// `tokenizer_config.json` has it as the key of the token.
    pub id: Option<u64>,
    pub content: String,
    #[serde(default)]
    pub single_word: bool,
    #[serde(default)]
    pub lstrip: bool,
    #[serde(default)]
    pub rstrip: bool,
    /// Whether the token is matched in normalised text; absent = unless it is special.
    pub normalized: Option<bool>,
    #[serde(default)]
    pub special: bool,
}

/// The member of `tokenizer.json` with them.
#[derive(Deserialize)]
pub(super) struct AddedTokens {
    pub added_tokens: Option<Vec<AddedToken>>,
}
