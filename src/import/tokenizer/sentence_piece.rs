//! BPE over characters, with merges in the order of the tokens' scores.
//!
//! Blanks become `▁`; characters that are not tokens fall back to the tokens of their bytes.

use super::vocabulary::{CONTROL, Rebuilt, UNKNOWN, USER_DEFINED, Vocabulary};
use crate::error::{Result, bail};
use crate::format::gguf::Metadata;
use serde_json::json;
use std::collections::HashMap;

/// Rebuilds a tokenizer of this kind. Errors: `Tokenizer` for whitespace handling that is not supported.
pub(super) fn rebuild(metadata: &Metadata, bytes: &[u8], vocabulary: &Vocabulary) -> Result<Rebuilt> {
    let flag = |key: &str, default: bool| metadata.bool(key).map(|flag| flag.unwrap_or(default));
    if flag("tokenizer.ggml.remove_extra_whitespaces", false)? {
        bail!(
            Tokenizer,
            "metadata key 'tokenizer.ggml.remove_extra_whitespaces' is true, which is not supported"
        );
    }
    let scores = vocabulary.scores(metadata, bytes)?;
    let prefix = flag("tokenizer.ggml.add_space_prefix", true)?;
    let blank = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let normalizer = if prefix {
        json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, blank]})
    } else {
        blank
    };
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let unknown = vocabulary.used().find(|&(_, _, kind)| kind == UNKNOWN);
    Ok(Rebuilt {
        normalizer: Some(normalizer),
        pre_tokenizer: None,
        decoder: json!({"type": "Sequence", "decoders": decoders}),
        model: json!({
            "type": "BPE", "dropout": null, "unk_token": unknown.map(|(_, text, _)| text),
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true,
            "ignore_merges": false, "vocab": vocabulary.ids(), "merges": merges_of_scores(vocabulary, &scores),
        }),
        bos: true,
        eos: false,
    })
}

/// All merges: every split of a token into two tokens, ordered by descending score, then by the length of the left part and of
/// the right part, longest first, then by the order of the vocabulary. Control and user-defined tokens are never the result of
/// a merge: they are matched before the text is split.
fn merges_of_scores<'a>(vocabulary: &Vocabulary<'a>, scores: &[f32]) -> Vec<[&'a str; 2]> {
    struct Merge<'a> {
        score: f32,
        /// Characters of both parts.
        lengths: [usize; 2],
        /// Ids of the whole and of both parts.
        ids: [usize; 3],
        parts: [&'a str; 2],
    }
    let ids: HashMap<&str, usize> = vocabulary.used().map(|(id, text, _)| (text, id)).collect();
    let mut merges = Vec::new();
    for (id, text, kind) in vocabulary.used() {
        // Longer texts are not words, and splitting them everywhere takes quadratic time.
        if matches!(kind, UNKNOWN | CONTROL | USER_DEFINED) || text.len() > 1024 {
            continue;
        }
        let count = text.chars().count();
        for (chars, (at, _)) in text.char_indices().enumerate().skip(1) {
            let (left, right) = text.split_at(at);
            if let (Some(&l), Some(&r), Some(&score)) = (ids.get(left), ids.get(right), scores.get(id)) {
                merges.push(Merge {
                    score,
                    lengths: [chars, count - chars],
                    ids: [id, l, r],
                    parts: [left, right],
                });
            }
        }
    }
    merges.sort_by(|a, b| {
        b.score
            .total_cmp(&a.score)
            .then(b.lengths.cmp(&a.lengths))
            .then(a.ids.cmp(&b.ids))
    });
    merges.into_iter().map(|merge| merge.parts).collect()
}
