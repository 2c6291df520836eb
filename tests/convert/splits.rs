//! Every pre-tokenizer name of GGUF files gives a tokenizer that splits text as another regular expression engine does.
//!
//! `splits.json` holds, for texts in many scripts, the lengths in characters of the pieces of each pre-tokenizer, computed with
//! Python's `regex`.

use crate::build::{Gguf, Meta, converted, gguf_of, run};
use cmf_gpu::Kind;
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::cmf::CmfContainer;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::sync::OnceLock;
use tempfile::TempDir;
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, Tokenizer};

#[derive(Deserialize)]
struct Recorded {
    texts: Vec<String>,
    ways: Vec<Way>,
}

#[derive(Deserialize)]
struct Way {
    names: Vec<String>,
    /// For each text the lengths of its pieces.
    pieces: Vec<Vec<usize>>,
}

fn recorded() -> Recorded {
    serde_json::from_str(include_str!("../fixtures/gguf/splits.json")).unwrap()
}

/// The character that stands for a byte.
fn letter(byte: u8) -> char {
    // Printable characters of Latin-1 stand for themselves, those from U+0100 on for the other bytes.
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match printable(byte) {
        true => char::from(byte),
        false => {
            let before = (0..byte).filter(|&byte| !printable(byte)).count() as u32;
            char::from_u32(0x100 + before).unwrap()
        }
    }
}

/// A small model whose tokens are the bytes, "ab", "bc", "abc" and a start token. The only merge for "abc" is ab·c.
fn file(pre: &str) -> Gguf {
    static MODEL: OnceLock<Gguf> = OnceLock::new();
    let mut file = MODEL.get_or_init(|| gguf_of("llama_tied")).clone();
    let mut tokens: Vec<String> = (0..=255).map(|byte| letter(byte).to_string()).collect();
    tokens.extend(["ab", "bc", "abc", "<start>", "xyz"].map(str::to_owned));
    let mut kinds = vec![1; tokens.len()];
    kinds[259] = 3;
    tokens.extend((tokens.len()..512).map(|id| format!("[PAD{id}]")));
    kinds.resize(512, 5);
    file.set("tokenizer.ggml.model", Meta::Str("gpt2".into()));
    file.set("tokenizer.ggml.pre", Meta::Str(pre.into()));
    file.set("tokenizer.ggml.tokens", Meta::Strs(tokens));
    file.set("tokenizer.ggml.token_type", Meta::I32s(kinds));
    file.set("tokenizer.ggml.bos_token_id", Meta::U32(259));
    let merges = ["b c", "a b", "ab c"].map(str::to_owned);
    file.set("tokenizer.ggml.merges", Meta::Strs(merges.into()));
    file
}

fn tokenizer(pre: &str) -> Tokenizer {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, file(pre).bytes()).unwrap();
    let (_out, _, container): (_, _, CmfContainer) = converted(&path, Dtype::F16);
    Tokenizer::from_bytes(container.tokenizer_json().unwrap()).unwrap()
}

fn refusal(pre: &str) -> String {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, file(pre).bytes()).unwrap();
    let err = run(&path, &dir.path().join("o.cmf"), Dtype::F16).unwrap_err();
    assert_eq!(err.kind, Kind::Tokenizer, "{err}");
    err.message
}

#[test]
fn every_name_splits_as_another_engine_does() {
    let recorded = recorded();
    assert_eq!(recorded.texts.len(), 11);
    let mut tested = BTreeSet::new();
    for way in &recorded.ways {
        for name in &way.names {
            let tokenizer = tokenizer(name);
            let split = tokenizer.get_pre_tokenizer().unwrap();
            for (text, wanted) in recorded.texts.iter().zip(&way.pieces) {
                let mut pieces = PreTokenizedString::from(text.as_str());
                split.pre_tokenize(&mut pieces).unwrap();
                let found = pieces.get_splits(OffsetReferential::Original, OffsetType::Char);
                let found: Vec<usize> = found.iter().map(|(_, (start, end), _)| end - start).collect();
                assert_eq!(found, *wanted, "{name}: {text:?}");
                let ids = tokenizer.encode(text.as_str(), false).unwrap();
                assert_eq!(
                    tokenizer.decode(ids.get_ids(), false).unwrap(),
                    composed(name, text),
                    "{name}"
                );
            }
            assert!(tested.insert(name.clone()), "{name} twice");
        }
    }
    // The error message for an unknown name lists all known names.
    let refused = refusal("strange");
    let known: BTreeSet<String> = refused
        .split_once("known are ")
        .unwrap()
        .1
        .split(", ")
        .map(str::to_owned)
        .collect();
    assert_eq!(known, tested);
    assert!(known.len() > 80);
}

/// The text in NFC, if the name normalises: one accented letter in these texts has a composed form.
fn composed(name: &str, text: &str) -> String {
    let composes = ["mpt", "olmo", "command-r", "qwen2", "deepseek-r1-qwen", "qwen35"].contains(&name);
    match composes {
        true => text.replace("e\u{301}", "\u{e9}"),
        false => text.to_owned(),
    }
}

#[test]
fn whole_words_and_start_tokens_are_as_the_names_say() {
    for (name, whole, starts) in [
        ("gpt-2", false, false),
        ("dbrx", false, false),
        ("llama-bpe", true, true),
        ("pixtral", true, true),
        ("tekken", true, true),
        ("minicpm5", true, false),
        ("youtu", true, false),
        ("chameleon", false, true),
    ] {
        let tokenizer = tokenizer(name);
        // bc ranks first, so merges give a·bc; the whole word is a token, too.
        let wanted: &[u32] = if whole { &[258] } else { &[b'a' as u32, 257] };
        assert_eq!(tokenizer.encode("abc", false).unwrap().get_ids(), wanted, "{name}");
        let ids = tokenizer.encode("abc", true).unwrap();
        assert_eq!(ids.get_ids()[0] == 259, starts, "{name}");
    }
}

#[test]
fn names_of_other_tokenizers_are_refused_with_the_reason() {
    for (name, why) in [
        ("gemma4", "merges are of characters"),
        ("sarvam-moe", "merges are of characters"),
        ("granite-embed-multi-311m", "merges are of characters"),
        ("whitespace", "merges are of characters"),
        ("jina-v1-en", "separator"),
        ("jina-v2-code", "separator"),
        ("roberta-bpe", "separator"),
    ] {
        let message = refusal(name);
        assert!(message.contains(name) && message.contains(why), "{message}");
    }
}
