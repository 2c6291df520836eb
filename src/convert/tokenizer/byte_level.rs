//! Byte-level BPE, and the table of the ways in which text is split before merges apply.
//!
//! The keys only name the way; an unknown name is refused.

use super::Vocabulary;
use crate::container::gguf::Metadata;
use crate::error::{Result, bail};
use serde_json::{Value, json};

/// A step that cuts text into pieces; merges stay within a piece.
#[derive(Clone, Copy)]
enum Step {
    /// Every match is a piece, and so is what lies between.
    Regex(&'static str),
    /// Every digit is a piece.
    Digits,
    /// Words of GPT-2, as characters that stand for bytes.
    Words,
    /// No cut; bytes become the characters that stand for them.
    Letters,
}

/// A way to split text, and what goes with it.
struct Splitter {
    steps: &'static [Step],
    /// Whether text is composed first.
    nfc: bool,
    /// Whether a piece that is a token is not merged; such files add a start token unless they say otherwise.
    words_first: bool,
}

const fn splitter(steps: &'static [Step]) -> Splitter {
    Splitter {
        steps,
        nfc: false,
        words_first: false,
    }
}

/// The names in files, and the ways they stand for.
const NAMES: [(&[&str], Splitter); 13] = [
    (&["gpt-2", "phi-2"], splitter(&[Step::Words])),
    (
        &["smollm", "starcoder", "refact"],
        splitter(&[Step::Digits, Step::Words]),
    ),
    (
        &["command-r"],
        Splitter {
            nfc: true,
            ..splitter(&[Step::Digits, Step::Words])
        },
    ),
    (
        &["olmo"],
        Splitter {
            nfc: true,
            ..splitter(&[Step::Words])
        },
    ),
    (
        &["llama-bpe", "llama3", "llama-v3", "falcon3"],
        Splitter {
            words_first: true,
            ..splitter(&[Step::Regex(LLAMA3), Step::Letters])
        },
    ),
    (&["dbrx", "smaug-bpe"], splitter(&[Step::Regex(LLAMA3), Step::Letters])),
    (
        &["qwen2", "deepseek-r1-qwen"],
        Splitter {
            nfc: true,
            ..splitter(&[Step::Regex(QWEN2), Step::Letters])
        },
    ),
    (
        &["qwen35"],
        Splitter {
            nfc: true,
            ..splitter(&[Step::Regex(QWEN35), Step::Letters])
        },
    ),
    (
        &["tekken"],
        Splitter {
            words_first: true,
            ..splitter(&[Step::Regex(TEKKEN), Step::Letters])
        },
    ),
    (&["gpt-4o"], splitter(&[Step::Regex(GPT4O), Step::Letters])),
    (
        &["deepseek-coder"],
        splitter(&[
            Step::Regex(r"[\r\n]"),
            Step::Regex(r"\s?\p{L}+"),
            Step::Regex(r"\s?\p{P}+"),
            Step::Regex("[\u{4e00}-\u{9fa5}\u{800}-\u{4e00}\u{ac00}-\u{d7ff}]+"),
            Step::Digits,
            Step::Letters,
        ]),
    ),
    (
        &["deepseek-v3"],
        splitter(&[
            Step::Regex(r"\p{N}{1,3}"),
            Step::Regex("[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+"),
            Step::Regex(DEEPSEEK3),
            Step::Letters,
        ]),
    ),
    (
        &["default"],
        splitter(&[
            Step::Regex(r"[\p{P}\$\+<=>\^~\|]+"),
            Step::Regex(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
            Step::Regex(r"\p{N}+"),
            Step::Regex(r"[0-9][0-9][0-9]"),
            Step::Letters,
        ]),
    ),
];

/// Contractions in any case, words with one leading symbol, up to three digits, punctuation with line ends, blanks.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with single digits.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with marks as parts of words.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Words end where a capital follows a small letter; single digits; punctuation with line ends and slashes.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with contractions and up to three digits.
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// What the third step of that tokenizer finds: a symbol before letters, words with marks, punctuation, blanks.
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

impl Splitter {
    fn of(name: &str) -> Option<&'static Splitter> {
        const TABLE: &[(&[&str], Splitter)] = &NAMES;
        let row = TABLE.iter().find(|(names, _)| names.contains(&name));
        row.map(|(_, splitter)| splitter)
    }
}

/// Byte-level BPE: text becomes the 256 characters that stand for bytes, is split, and merged by rank.
pub(super) fn rebuild(metadata: &Metadata, bytes: &[u8], vocabulary: &Vocabulary) -> Result<Value> {
    let Some(pre) = metadata.string("tokenizer.ggml.pre")? else {
        bail!(
            Tokenizer,
            "metadata key 'tokenizer.ggml.pre' is missing: how to split text is unknown"
        );
    };
    let Some(Splitter {
        steps,
        nfc,
        words_first,
    }) = Splitter::of(pre)
    else {
        bail!(
            Tokenizer,
            "metadata key 'tokenizer.ggml.pre' is '{pre}'; known are {}",
            NAMES.map(|(names, _)| names.join(", ")).join(", ")
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
    let add_bos = metadata.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(*words_first);
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
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": words_first,
            "vocab": vocabulary.ids(), "merges": merges,
        },
    }))
}
