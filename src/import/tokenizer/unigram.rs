//! Unigram tokenizers: the most likely sequence of pieces, with scores that are log probabilities.
//!
//! Text is normalised by a table in the file, if there is one; blanks become `▁`.

use super::charsmap;
use super::vocabulary::{BYTE, Rebuilt, UNKNOWN, UNUSED, Vocabulary};
use crate::error::{Result, bail};
use crate::format::base64;
use crate::format::gguf::{Metadata, shortest};
use serde_json::{Value, json};

/// Rebuilds a tokenizer of this kind. Errors: `Tokenizer` when scores or the unknown token are missing.
pub(super) fn rebuild(metadata: &Metadata, bytes: &[u8], vocabulary: &Vocabulary) -> Result<Rebuilt> {
    let flag = |key: &str, default: bool| metadata.bool(key).map(|flag| flag.unwrap_or(default));
    let scores = vocabulary.scores(metadata, bytes)?;
    let Some((unknown, _, _)) = vocabulary.used().find(|&(_, _, kind)| kind == UNKNOWN) else {
        bail!(
            Tokenizer,
            "the file has no unknown token in 'tokenizer.ggml.token_type'"
        );
    };
    // The index of a piece is its id, so unused pieces stay, with a score that is never the best.
    let worst = scores.iter().copied().fold(0.0, f32::min) - 1e4;
    let used = |id: usize| vocabulary.kinds.get(id).is_some_and(|&kind| kind != UNUSED);
    let pieces = vocabulary.texts.iter().zip(&scores).enumerate();
    let pieces = pieces.map(|(id, (text, &score))| json!([text, shortest(if used(id) { score } else { worst })]));
    let pieces: Vec<Value> = pieces.collect();
    let mut normalizers = Vec::new();
    if let Some(table) = metadata.bytes("tokenizer.ggml.precompiled_charsmap", bytes)?
        && !table.is_empty()
    {
        charsmap::check(table)?;
        normalizers.push(json!({"type": "Precompiled", "precompiled_charsmap": base64(table)}));
    }
    if flag("tokenizer.ggml.remove_extra_whitespaces", false)? {
        normalizers.push(json!({"type": "Replace", "pattern": {"Regex": " +$"}, "content": ""}));
        normalizers.push(json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}));
    }
    let scheme = match flag("tokenizer.ggml.add_space_prefix", true)? {
        true => "first",
        false => "never",
    };
    let blanks = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true});
    let byte_fallback = vocabulary.used().filter(|&(_, _, kind)| kind == BYTE).count() == 256;
    Ok(Rebuilt {
        normalizer: (!normalizers.is_empty()).then(|| json!({"type": "Sequence", "normalizers": normalizers})),
        decoder: json!({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, blanks]}),
        pre_tokenizer: Some(blanks),
        model: json!({"type": "Unigram", "unk_id": unknown, "vocab": pieces, "byte_fallback": byte_fallback}),
        bos: false,
        eos: true,
    })
}
