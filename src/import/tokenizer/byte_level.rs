//! Byte-level BPE: text is mapped to the 256 characters that stand for bytes, split, and merged by rank.
//!
//! The keys only name the pre-tokenizer, which splits the text. An unknown name is refused.

use super::splitters::{Splitter, Step};
use super::vocabulary::Vocabulary;
use crate::error::{Result, bail};
use crate::format::gguf::Metadata;
use serde_json::{Value, json};

/// Rebuilds a tokenizer of this kind. Errors: `Tokenizer` for a pre-tokenizer that is unknown or not supported, and for merges
/// that are missing or malformed.
pub(super) fn rebuild(metadata: &Metadata, bytes: &[u8], vocabulary: &Vocabulary) -> Result<Value> {
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
    let Some(Splitter {
        steps,
        nfc,
        whole_first,
        starts,
    }) = Splitter::of(pre)
    else {
        bail!(
            Tokenizer,
            "metadata key 'tokenizer.ggml.pre' is '{pre}'; known are {}",
            Splitter::names()
        );
    };
    let prefix = metadata.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(false);
    let steps = steps.iter().map(|step| match step {
        Step::Regex(regex) => {
            json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})
        }
        Step::Digits => json!({"type": "Digits", "individual_digits": true}),
        Step::Words | Step::Letters => {
            let words = matches!(step, Step::Words);
            json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": words})
        }
    });
    let steps: Vec<Value> = steps.collect();
    let Some(merges) = metadata.strings("tokenizer.ggml.merges", bytes)? else {
        bail!(Tokenizer, "metadata key 'tokenizer.ggml.merges' is missing");
    };
    let merges = merges
        .into_iter()
        .enumerate()
        .map(|(rank, merge)| match merge.split_once(' ') {
            Some((left, right)) if !left.is_empty() && !right.is_empty() && !right.contains(' ') => {
                Ok(json!([left, right]))
            }
            _ => bail!(
                Tokenizer,
                "merge {rank}, '{merge}', is not two tokens with a blank between"
            ),
        });
    let merges: Vec<Value> = merges.collect::<Result<_>>()?;
    let flag = |key: &str| metadata.bool(key).map(|flag| flag.unwrap_or(false));
    let add_bos = metadata.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(*starts);
    let decoder = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": vocabulary.added(),
        "normalizer": nfc.then(|| json!({"type": "NFC"})),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": vocabulary.template(add_bos, flag("tokenizer.ggml.add_eos_token")?)?,
        "decoder": decoder,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": whole_first,
            "vocab": vocabulary.ids(), "merges": merges,
        },
    }))
}
