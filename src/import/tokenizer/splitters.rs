//! Pre-tokenizers: how text is split before byte-level merges apply. One row for each name in files.
//!
//! A name stands for the tokenizer of a model. The expressions are those of that tokenizer if it is public, else those of the
//! programs that read such files.

/// A step that cuts text into pieces. Merges never cross pieces.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// Every match is a piece, and so is the text between two matches.
    Regex(&'static str),
    /// Every digit is a piece.
    Digits,
    /// The words of GPT-2; bytes become the characters that stand for them.
    Words,
    /// The whole text; bytes become the characters that stand for them.
    Letters,
}
use Step::{Digits, Letters, Regex, Words};

/// A pre-tokenizer and the settings that go with it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Splitter {
    pub steps: &'static [Step],
    /// Whether text is normalised to NFC first.
    pub nfc: bool,
    /// Whether a piece that is a token as a whole is taken without merges.
    pub whole_first: bool,
    /// Whether texts begin with the start token by default.
    pub starts: bool,
}

/// The entry of a table whose names, separated by blanks, include `name`.
fn find<T>(table: &'static [(&str, T)], name: &str) -> Option<&'static T> {
    let row = table
        .iter()
        .find(|(names, _)| names.split(' ').any(|known| known == name));
    row.map(|(_, entry)| entry)
}

impl Splitter {
    /// The pre-tokenizer of a name in files.
    pub fn of(name: &str) -> Option<&'static Splitter> {
        find(NAMES, name)
    }

    /// Every pre-tokenizer with its first name.
    #[cfg(feature = "tools")]
    pub fn all() -> impl Iterator<Item = (&'static str, &'static Splitter)> {
        let first = |names: &'static str| names.split(' ').next().unwrap_or(names);
        NAMES.iter().map(move |(names, splitter)| (first(names), splitter))
    }

    /// Why a known name is not supported.
    pub fn refusal(name: &str) -> Option<&'static str> {
        find(REFUSED, name).copied()
    }

    /// All names, for error messages.
    pub fn names() -> String {
        let names = NAMES.iter().flat_map(|(names, _)| names.split(' '));
        names.collect::<Vec<_>>().join(", ")
    }
}

const fn by(steps: &'static [Step]) -> Splitter {
    Splitter {
        steps,
        nfc: false,
        whole_first: false,
        starts: false,
    }
}

const fn composed(mut splitter: Splitter) -> Splitter {
    splitter.nfc = true;
    splitter
}

const fn whole(mut splitter: Splitter) -> Splitter {
    splitter.whole_first = true;
    splitter
}

const fn started(mut splitter: Splitter) -> Splitter {
    splitter.starts = true;
    splitter
}

/// The names in files, separated by blanks, and the pre-tokenizers they stand for.
const NAMES: &[(&str, Splitter)] = &[
    (
        "gpt-2 phi-2 jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert jina-es jina-de \
         jina-v2-es jina-v2-de",
        WORDS,
    ),
    ("mpt olmo", composed(WORDS)),
    (
        "smollm starcoder refact codeshell exaone minerva-7b mellum2",
        DIGIT_WORDS,
    ),
    ("command-r", composed(DIGIT_WORDS)),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        started(whole(LLAMA3)),
    ),
    ("dbrx smaug-bpe glm4 chatglm-bpe", LLAMA3),
    (
        "minicpm5",
        whole(by(&[Regex(THREE_DIGITS), Regex(LONG_NUMBERS), Letters])),
    ),
    ("jais-2", by(&[Regex(JAIS2), Letters])),
    ("qwen2 deepseek-r1-qwen", composed(QWEN2)),
    (
        "megrez kormo f2llmv2 stablelm2 hunyuan solar-open grok-2 bailingmoe bailingmoe2 llada-moe",
        QWEN2,
    ),
    ("laguna", by(&[Regex(LINES), Regex(ONE_DIGIT), Letters])),
    ("ufakzeka", by(&[Regex(NO_CONTRACTIONS), Letters])),
    ("seed-coder", by(&[Regex(SEED_CODER), Letters])),
    ("exaone-moe", by(&[Regex(EXAONE_MOE), Letters])),
    ("qwen35", composed(by(&[Regex(WITH_MARKS), Letters]))),
    ("tekken", started(whole(by(&[Regex(TEKKEN), Letters])))),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", GPT4O),
    ("granite-embed-multi-97m", whole(GPT4O)),
    ("tiny_aya cohere2moe", AYA),
    ("kimi-k2", by(&[Regex(KIMI), Letters])),
    ("youtu", whole(by(&[Regex(YOUTU_SCRIPTS), Regex(CASED_DIGIT), Letters]))),
    ("deepseek-llm", DEEPSEEK_LLM),
    ("deepseek-coder", DEEPSEEK_CODER),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", DEEPSEEK3),
    ("spark2_5", SPARK),
    (
        "afmoe",
        by(&[Regex(AFMOE_DIGITS), Regex(AFMOE_SCRIPTS), Regex(SYMBOLS), Letters]),
    ),
    ("falcon", by(&[Regex(FALCON), Regex(GPT2), Regex(TRIPLE), Letters])),
    (
        "default",
        by(&[Regex(MARKS), Regex(GPT2), Regex(r"\p{N}+"), Regex(TRIPLE), Letters]),
    ),
    ("poro-chat bloom gpt3-finnish", by(&[Regex(BLOOM), Letters])),
    ("viking", by(&[Regex(BLOOM), Digits, Letters])),
    (
        "superbpe",
        by(&[Regex(r"\p{N}+"), Regex(r"(?=(\d{3})+(?!\d))"), Letters]),
    ),
    ("chameleon", started(CHAMELEON)),
];

/// Names of tokenizers that are not supported, with the reason.
const REFUSED: &[(&str, &str)] = &[
    (
        "gemma4 sarvam-moe granite-embed-multi-311m whitespace",
        "its merges are of characters; only merges of bytes are supported",
    ),
    (
        "jina-v1-en jina-v2-code roberta-bpe",
        "it ends texts with a separator, as models do that do not generate text",
    ),
];

const WORDS: Splitter = by(&[Words]);
const DIGIT_WORDS: Splitter = by(&[Digits, Words]);
const LLAMA3: Splitter = by(&[Regex(THREE_DIGIT), Letters]);
const QWEN2: Splitter = by(&[Regex(ONE_DIGIT), Letters]);
const GPT4O: Splitter = by(&[Regex(CASED), Letters]);
const AYA: Splitter = by(&[Regex(r"\d{1,3}(?=(?:\d{3})*\b)"), Regex(CASED), Letters]);
const DEEPSEEK_LLM: Splitter = by(&[
    Regex(r"[\r\n]"),
    Regex(CASED_LETTERS),
    Regex("\\s?[!-/:-~\u{ff01}-\u{ff0f}\u{ff1a}-\u{ff5e}\u{2018}-\u{201f}\u{3000}-\u{3002}]+"),
    Regex(r"\s+$"),
    Regex(EAST_ASIAN),
    Digits,
    Letters,
]);
const DEEPSEEK_CODER: Splitter = by(&[
    Regex(r"[\r\n]"),
    Regex(r"\s?\p{L}+"),
    Regex(r"\s?\p{P}+"),
    Regex(EAST_ASIAN),
    Digits,
    Letters,
]);
const DEEPSEEK3: Splitter = by(&[Regex(THREE_DIGITS), Regex(IDEOGRAPHS), Regex(SYMBOLS), Letters]);
const SPARK: Splitter = by(&[
    Regex(THREE_DIGITS),
    Regex(IDEOGRAPHS),
    Regex(SPARK_SYMBOLS),
    Digits,
    Letters,
]);
const CHAMELEON: Splitter = by(&[
    Regex("<sentinel:[0-9]+>"),
    Regex("(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z"),
    Regex(r"([\t\n]|    |  )"),
    Digits,
    Regex(r"[\p{P}!-/:-@\[-`{-~]"),
    Words,
]);

/// The words of GPT-2 in text that is split further.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
/// Contractions in any case, words with one leading symbol, up to three digits, punctuation with line ends, blanks.
const THREE_DIGIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with any number of digits, which an earlier step has split.
const LONG_NUMBERS: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with blanks in powers of two.
const JAIS2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}";
/// The same with single digits.
const ONE_DIGIT: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Single digits and no contractions.
const NO_CONTRACTIONS: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Single digits, and punctuation without line ends.
const SEED_CODER: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Several words in a row, single digits and single line ends.
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
/// Single digits, and marks as parts of words.
const WITH_MARKS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Words end where a capital follows a small letter; single digits; punctuation with line ends and slashes.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with contractions and up to three digits.
const CASED: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with contractions and single digits.
const CASED_DIGIT: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Runs of Chinese characters, and words as above without Chinese characters.
const KIMI: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Korean, wide punctuation, Bopomofo, and Chinese with Japanese.
const YOUTU_SCRIPTS: &str = "[\u{ac00}-\u{d7a3}\u{3131}-\u{318e}]+|[\u{ff01}\u{2026}\u{201c}\u{201d}\u{2018}\u{2019}\u{2014}\u{ff1a}\u{ff1b}\u{ff0c}\u{3001}-\u{303f}\u{fe30}-\u{fe4f}]+|[\u{3105}-\u{312f}]+|[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+";
/// Chinese, Japanese and Korean, by the ranges of early models.
const EAST_ASIAN: &str = "[\u{4e00}-\u{9fa5}\u{800}-\u{4e00}\u{ac00}-\u{d7ff}]+";
/// Chinese and Japanese.
const IDEOGRAPHS: &str = "[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+";
const THREE_DIGITS: &str = r"\p{N}{1,3}";
/// A symbol before letters, words with marks, punctuation with line ends, blanks.
const SYMBOLS: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
/// The same with punctuation and line ends in separate pieces.
const SPARK_SYMBOLS: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"##;
/// Digits in threes from the right.
const AFMOE_DIGITS: &str = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))";
/// Scripts whose words have no blanks between them.
const AFMOE_SCRIPTS: &str = "[\u{4e00}-\u{9fff}\u{3400}-\u{4dbf}\u{f900}-\u{faff}\u{3040}-\u{309f}\u{30a0}-\u{30ff}\u{ff65}-\u{ff9f}\u{2f00}-\u{2fdf}\u{e40}-\u{e7f}\u{e80}-\u{eff}\u{1780}-\u{17ff}\u{1000}-\u{109f}\u{aa60}-\u{aa7f}\u{a9e0}-\u{a9ff}\u{ac00}-\u{d7af}\u{1100}-\u{11ff}]+";
/// Lines, and runs of line ends.
const LINES: &str = r"[^\n]+|[\n]+";
/// Runs of punctuation.
const FALCON: &str = r"[\p{P}\$\+<=>\^~\|`]+";
const MARKS: &str = r"[\p{P}\$\+<=>\^~\|]+";
const TRIPLE: &str = "[0-9][0-9][0-9]";
/// Runs of characters other than blanks and the sentence marks of several scripts.
const BLOOM: &str = " ?[^(\\s|.,!?\u{2026}\u{3002}\u{ff0c}\u{3001}\u{964}\u{6d4}\u{60c})]+";
/// Letters that have a case, by the list of the model's tokenizer.
const CASED_LETTERS: &str = "\\s?[A-Za-z\u{b5}\u{c0}-\u{d6}\u{d8}-\u{f6}\u{f8}-\u{1ba}\u{1bc}-\u{1bf}\u{1c4}-\u{293}\u{295}-\u{2af}\u{370}-\u{373}\u{376}\u{377}\u{37b}-\u{37d}\u{37f}\u{386}\u{388}-\u{38a}\u{38c}\u{38e}-\u{3a1}\u{3a3}-\u{3f5}\u{3f7}-\u{481}\u{48a}-\u{52f}\u{531}-\u{556}\u{10a0}-\u{10c5}\u{13a0}-\u{13f5}\u{13f8}-\u{13fd}\u{1c90}-\u{1cba}\u{1cbd}-\u{1cbf}\u{1d00}-\u{1d2b}\u{1d6b}-\u{1d77}\u{1d79}-\u{1d9a}\u{1e00}-\u{1f15}\u{1f18}-\u{1f1d}\u{1f20}-\u{1f45}\u{1f48}-\u{1f4d}\u{1f50}-\u{1f57}\u{1f59}\u{1f5b}\u{1f5d}\u{1f5f}-\u{1f7d}\u{1f80}-\u{1fb4}\u{1fb6}-\u{1fbc}\u{1fbe}\u{1fc2}-\u{1fc4}\u{1fc6}-\u{1fcc}\u{1fd0}-\u{1fd3}\u{1fd6}-\u{1fdb}\u{1fe0}-\u{1fec}\u{1ff2}-\u{1ff4}\u{1ff6}-\u{1ffc}\u{2102}\u{2107}\u{210a}-\u{2113}\u{2115}\u{2119}-\u{211d}\u{2124}\u{2126}\u{2128}\u{212a}-\u{212d}\u{212f}-\u{2134}\u{2139}\u{213c}-\u{213f}\u{2145}-\u{2149}\u{214e}\u{2183}\u{2184}\u{2c00}-\u{2c7b}\u{2c7e}-\u{2ce4}\u{2ceb}-\u{2cee}\u{2cf2}\u{2cf3}\u{a640}-\u{a66d}\u{a680}-\u{a69b}\u{a722}-\u{a76f}\u{a771}-\u{a787}\u{a78b}-\u{a78e}\u{ab70}-\u{abbf}\u{fb00}-\u{fb06}\u{fb13}-\u{fb17}\u{ff21}-\u{ff3a}\u{ff41}-\u{ff5a}\u{10400}-\u{1044f}\u{104b0}-\u{104d3}\u{104d8}-\u{104fb}\u{10c80}-\u{10cb2}\u{10cc0}-\u{10cf2}\u{118a0}-\u{118df}\u{1e900}-\u{1e943}]+";
