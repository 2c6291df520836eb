//! Byte-level BPE: text is mapped to the 256 characters that stand for bytes, split, and merged by rank.
//!
//! The keys only name the pre-tokenizer, which splits the text. An unknown name is refused.

use super::splitters::{Splitter, Step};
use super::vocabulary::{Rebuilt, Vocabulary, need};
use crate::error::{Result, bail};
use crate::format::gguf::Metadata;
use serde_json::{Value, json};

pub(super) const MERGES: &str = "tokenizer.ggml.merges";

/// The normalizer of a pre-tokenizer's tokenizer.
pub(super) fn normalizer(splitter: &Splitter) -> Option<Value> {
    splitter.nfc.then(|| json!({"type": "NFC"}))
}

/// The steps of a pre-tokenizer. `prefix`: whether a blank is put before texts.
pub(super) fn steps(splitter: &Splitter, prefix: bool) -> Vec<Value> {
    let steps = splitter.steps.iter().map(|step| match step {
        Step::Regex(regex) => {
            json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})
        }
        Step::Digits => json!({"type": "Digits", "individual_digits": true}),
        Step::Words | Step::Letters => {
            let words = matches!(step, Step::Words);
            json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": words})
        }
    });
    steps.collect()
}

/// Rebuilds a tokenizer of this kind. Errors: `Tokenizer` for a pre-tokenizer that is unknown or not supported, and for merges
/// that are missing or malformed.
pub(super) fn rebuild(metadata: &Metadata, bytes: &[u8], vocabulary: &Vocabulary) -> Result<Rebuilt> {
    let Some(pre) = metadata.string("tokenizer.ggml.pre")? else {
        bail!(
            Tokenizer,
            "metadata key 'tokenizer.ggml.pre' is missing; it says how text is split"
        );
    };
    if let Some(why) = Splitter::refusal(pre) {
        bail!(
            Tokenizer,
            "metadata key 'tokenizer.ggml.pre' is '{pre}', which is not supported: {why}"
        );
    }
    let Some(splitter) = Splitter::of(pre) else {
        bail!(
            Tokenizer,
            "metadata key 'tokenizer.ggml.pre' is '{pre}'; known are {}",
            Splitter::names()
        );
    };
    let prefix = metadata.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(false);
    let merges = need(MERGES, metadata.strings(MERGES, bytes)?)?.into_iter().enumerate();
    let merges = merges.map(|(rank, merge)| match merge.split_once(' ') {
        Some((left, right)) if !left.is_empty() && !right.is_empty() && !right.contains(' ') => {
            Ok(json!([left, right]))
        }
        _ => bail!(
            Tokenizer,
            "merge {rank}, '{merge}', is not two tokens with a blank between"
        ),
    });
    let merges: Vec<Value> = merges.collect::<Result<_>>()?;
    Ok(Rebuilt {
        normalizer: normalizer(splitter),
        pre_tokenizer: Some(json!({"type": "Sequence", "pretokenizers": steps(splitter, prefix)})),
        decoder: json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
        model: json!({
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": splitter.whole_first, "vocab": vocabulary.ids(), "merges": merges,
        }),
        bos: splitter.starts,
        eos: false,
    })
}
