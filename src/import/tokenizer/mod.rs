//! `tokenizer.json` rebuilt from the tokenizer keys of a GGUF file.
//!
//! The ids are those of the file. There are three kinds of tokenizers: byte-level BPE, BPE over characters, and unigram. Knows
//! keys and the `tokenizers` format, not models.

mod byte_level;
mod charsmap;
#[cfg(feature = "tools")]
mod describe;
mod sentence_piece;
mod splitters;
mod unigram;
mod vocabulary;

#[cfg(feature = "tools")]
pub use describe::describe;

use crate::error::{Result, bail, error};
use crate::format::gguf::Metadata;
use serde_json::{Map, Value};
use vocabulary::Vocabulary;

/// The tokenizer of a file.
pub(super) struct Tokens {
    /// `tokenizer.json`, `None` when the file has no tokenizer.
    pub vocab: Option<Vec<u8>>,
    pub config: Map<String, Value>,
    pub notes: Vec<String>,
}

/// Reads the tokenizer of a file whose bytes are `bytes`.
///
/// Errors: `Tokenizer` names the model or the pre-tokenizer that cannot be rebuilt, or the keys that are inconsistent; `Parse`
/// the keys of the wrong type.
pub(super) fn read(metadata: &Metadata, bytes: &[u8]) -> Result<Tokens> {
    let mut notes = Vec::new();
    let Some(model) = metadata.string("tokenizer.ggml.model")? else {
        notes.push("the file has no tokenizer: the result only runs with token ids".to_owned());
        return Ok(Tokens {
            vocab: None,
            config: Map::new(),
            notes,
        });
    };
    let vocabulary = Vocabulary::read(metadata, bytes)?;
    let rebuilt = match model {
        "gpt2" => byte_level::rebuild(metadata, bytes, &vocabulary)?,
        "llama" => sentence_piece::rebuild(metadata, bytes, &vocabulary)?,
        "t5" => unigram::rebuild(metadata, bytes, &vocabulary)?,
        other => bail!(
            Tokenizer,
            "metadata key 'tokenizer.ggml.model' is '{other}'; known are gpt2, llama and t5"
        ),
    };
    let document = vocabulary.document(metadata, rebuilt)?;
    let vocab = serde_json::to_vec(&document);
    let vocab = vocab.map_err(|err| error!(Tokenizer, "the rebuilt tokenizer is not valid JSON: {err}"))?;
    Ok(Tokens {
        vocab: Some(vocab),
        config: vocabulary.config(metadata, &mut notes)?,
        notes,
    })
}
