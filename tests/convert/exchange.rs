//! Ternary models written in the other format: tensors byte for byte, logits, and what is refused.

use crate::build::{Block, Gguf, Meta, fixture, gguf_of};
use crate::sources::logits;
use crate::ternary::{File, path};
use cmf_gpu::convert::{Exchange, Report, exchange};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::gguf;
use cmf_gpu::format::ninfer::{Format, Ninfer};
use cmf_gpu::source;
use cmf_gpu::{Kind, Result};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn to(src: &Path, out: &Path) -> Result<Report> {
    let format = Exchange::of(out).unwrap();
    exchange(src, out, format, false, &mut |_| ControlFlow::Continue(()))
}

/// The tensors and objects of a file: format, shape and bytes by name. Resources are left out: they are written anew.
fn tensors(path: &Path) -> BTreeMap<String, (String, Vec<u64>, Vec<u8>)> {
    let bytes = std::fs::read(path).unwrap();
    if Exchange::of(path) == Some(Exchange::Gguf) {
        let file = gguf::Gguf::parse(&bytes).unwrap();
        let all = file.tensors.into_iter().map(|tensor| {
            let payload = bytes[tensor.range].to_vec();
            (tensor.name, (tensor.dtype.name().to_owned(), tensor.shape, payload))
        });
        return all.collect();
    }
    let file = Ninfer::parse(&bytes).unwrap();
    let all = file.objects.into_iter().filter_map(|object| {
        let tensor = object.tensor?;
        let payload = bytes[object.range].to_vec();
        Some((object.name, (tensor.format.name().to_owned(), tensor.shape, payload)))
    });
    all.collect()
}

/// Errors: the names of the tensors that differ.
fn differences(a: &Path, b: &Path) -> Vec<String> {
    let (a, b) = (tensors(a), tensors(b));
    let names = a.keys().chain(b.keys()).filter(|name| a.get(*name) != b.get(*name));
    names.cloned().collect()
}

/// What a model says of its texts, and its logits.
fn behaviour(path: &Path) -> (Vec<u32>, Option<String>, Vec<u32>, Vec<Vec<f32>>) {
    let source = source::open(path).unwrap();
    let mut stops = source.text.eos_token_ids.clone();
    stops.sort_unstable();
    let template = source.text.chat_template.clone();
    let vocab = source.text.tokenizer_json().unwrap();
    let tokenizer = tokenizers::Tokenizer::from_bytes(vocab).unwrap();
    let text = "<|im_start|>user\nHow many trees, 1234?<|im_end|>\n<think>e\u{301}";
    let ids = tokenizer.encode(text, true).unwrap().get_ids().to_vec();
    (stops, template, ids, logits(source, &[5, 77, 301, 12, 450], false))
}

/// There and back, from either format: nothing changes on the way.
#[test]
fn models_go_to_the_other_format_and_back() {
    for name in [
        "dense-pq2_0.gguf",
        "dense-ptq1_0.ninfer",
        "hybrid-ptq1_0.gguf",
        "hybrid-ptq1_0.ninfer",
    ] {
        let dir = TempDir::new().unwrap();
        let first = path(name);
        let (other, own) = match name.ends_with("gguf") {
            true => ("ninfer", "gguf"),
            false => ("gguf", "ninfer"),
        };
        let there = dir.path().join(format!("there.{other}"));
        let back = dir.path().join(format!("back.{own}"));
        let report = to(&first, &there).unwrap();
        assert_eq!(report.bytes, there.metadata().unwrap().len(), "{name}");
        assert!(
            report.kept.tensors > 10 && report.dropped.is_empty(),
            "{name}: {report:?}"
        );
        to(&there, &back).unwrap();
        assert_eq!(differences(&first, &back), Vec::<String>::new(), "{name}");
        let wanted = behaviour(&first);
        assert!(behaviour(&there) == wanted && behaviour(&back) == wanted, "{name}");
    }
}

/// The two recorded files of one model: another program wrote both.
#[test]
fn a_written_file_has_the_tensors_of_the_recorded_one() {
    let dir = TempDir::new().unwrap();
    for (from, like) in [
        ("hybrid-ptq1_0.gguf", "hybrid-ptq1_0.ninfer"),
        ("hybrid-ptq1_0.ninfer", "hybrid-ptq1_0.gguf"),
    ] {
        let out = dir.path().join(like);
        to(&path(from), &out).unwrap();
        assert_eq!(differences(&out, &path(like)), Vec::<String>::new(), "{from}");
    }
}

#[test]
fn what_the_other_format_cannot_state_is_refused() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out.ninfer");
    let refused = |src: &Path, out: &Path, kind: Kind, text: &str| {
        let err = to(src, out).unwrap_err();
        assert!(err.kind == kind && err.message.contains(text), "{text}: {err}");
        assert!(!out.exists(), "{text}");
    };
    refused(
        &fixture("qwen3"),
        &out,
        Kind::UnsupportedFeature,
        "from GGUF and .ninfer files",
    );

    let plain = dir.path().join("plain.gguf");
    std::fs::write(&plain, gguf_of("qwen3").bytes()).unwrap();
    refused(
        &plain,
        &out,
        Kind::UnsupportedModel,
        "expected weights of type PQ2_0 or PTQ1_0",
    );

    let edited = |edit: &dyn Fn(&mut Gguf)| -> PathBuf {
        let mut file = ternary_gguf("dense-pq2_0.gguf");
        edit(&mut file);
        let path = dir.path().join("edited.gguf");
        std::fs::write(&path, file.bytes()).unwrap();
        path
    };
    let unrotated = edited(&|file| file.metadata.retain(|(key, _)| !key.starts_with("prism.")));
    refused(&unrotated, &out, Kind::UnsupportedFeature, "states no rotation");
    let one_plain = edited(&|file| {
        let names = file
            .metadata
            .iter_mut()
            .find(|(key, _)| key == "prism.hadamard.weight_names");
        if let Some((_, Meta::Strs(names))) = names {
            names.retain(|name| name != "blk.1.attn_v.weight");
        }
    });
    refused(&one_plain, &out, Kind::UnsupportedFeature, "layers.1.self_attn.v_proj");
    let another_type = edited(&|file| {
        let tensor = file
            .tensors
            .iter_mut()
            .find(|tensor| tensor.name == "blk.0.ffn_up.weight")
            .unwrap();
        (tensor.kind, tensor.data) = (8, vec![0; 256 * 384 / 32 * 34]);
        let names = file
            .metadata
            .iter_mut()
            .find(|(key, _)| key == "prism.hadamard.weight_names");
        if let Some((_, Meta::Strs(names))) = names {
            names.retain(|name| name != "blk.0.ffn_up.weight");
        }
    });
    refused(&another_type, &out, Kind::UnsupportedTensorType, "mlp.up_proj");
    let scaled = edited(&|file| {
        file.set("qwen3.rope.scaling.type", Meta::Str("linear".into()));
        file.set("qwen3.rope.scaling.factor", Meta::F32(4.0));
    });
    refused(&scaled, &out, Kind::UnsupportedModel, "rope_freq_factors");

    // A tokenizer whose scores are nowhere in tokenizer.json.
    let mut file = File::read("dense-ptq1_0.ninfer");
    let vocab = file
        .objects
        .iter_mut()
        .find(|object| object.name == "frontend/tokenizer.json")
        .unwrap();
    let text = String::from_utf8(vocab.bytes.clone()).unwrap();
    vocab.bytes = text
        .replace("\"byte_fallback\": false", "\"byte_fallback\": true")
        .into_bytes();
    assert!(vocab.bytes != text.as_bytes());
    let (_kept, src) = file.write();
    refused(&src, &dir.path().join("out.gguf"), Kind::Tokenizer, "byte_fallback");

    let same = dir.path().join("same.gguf");
    std::fs::copy(path("dense-pq2_0.gguf"), &same).unwrap();
    assert_eq!(to(&same, &same).unwrap_err().kind, Kind::Usage);
}

/// Parts that are not needed are named, or refused.
#[test]
fn other_parts_are_left_out_with_a_note() {
    let dir = TempDir::new().unwrap();
    let mut file = File::read("dense-ptq1_0.ninfer");
    file.add("vision/a", Some((&[1], Format::Fp32)), &[0; 4]);
    let (_kept, src) = file.write();
    let report = to(&src, &dir.path().join("out.gguf")).unwrap();
    assert!(
        report
            .notes
            .iter()
            .any(|note| note.contains("'vision/*' are left out: 1")),
        "{:?}",
        report.notes
    );
}

/// A norm weight so small that 1 + w is not exact: the network computes with the sum.
#[test]
fn rounded_norms_are_named() {
    let dir = TempDir::new().unwrap();
    let mut file = File::read("hybrid-ptq1_0.ninfer");
    let norm = file
        .objects
        .iter_mut()
        .find(|object| object.name == "text/final_norm")
        .unwrap();
    norm.bytes[..2].copy_from_slice(&half::bf16::from_f32(1.234e-7).to_le_bytes());
    let (_kept, src) = file.write();
    let report = to(&src, &dir.path().join("out.gguf")).unwrap();
    let named = report.notes.iter().filter(|note| note.contains("'model.norm.weight'"));
    assert_eq!(named.count(), 1, "{:?}", report.notes);
}

#[test]
fn a_vector_that_is_not_finite_is_refused() {
    let dir = TempDir::new().unwrap();
    let mut file = ternary_gguf("dense-pq2_0.gguf");
    let norm = file
        .tensors
        .iter_mut()
        .find(|tensor| tensor.name == "output_norm.weight")
        .unwrap();
    norm.data[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    let (src, out) = (dir.path().join("src.gguf"), dir.path().join("out.ninfer"));
    std::fs::write(&src, file.bytes()).unwrap();
    let err = to(&src, &out).map(drop).unwrap_err();
    assert!(
        err.kind == Kind::NonFinite && err.message.contains("model.norm.weight"),
        "{err}"
    );
    assert!(!out.exists());
}

/// A tied embedding is both an output and a table of rows.
#[test]
fn tied_models_stay_tied() {
    let dir = TempDir::new().unwrap();
    let mut file = File::read("dense-ptq1_0.ninfer");
    file.take("text/output_head");
    let config = file
        .objects
        .iter_mut()
        .find(|object| object.name == "frontend/config.json")
        .unwrap();
    let text = String::from_utf8(config.bytes.clone()).unwrap();
    config.bytes = text
        .replace("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true")
        .into_bytes();
    let (_kept, src) = file.write();
    let (there, back) = (dir.path().join("there.gguf"), dir.path().join("back.ninfer"));
    to(&src, &there).unwrap();
    to(&there, &back).unwrap();
    assert_eq!(differences(&src, &back), Vec::<String>::new());
    assert!(behaviour(&src) == behaviour(&there));
}

/// A recorded GGUF file as one that can be edited.
pub fn ternary_gguf(name: &str) -> Gguf {
    let bytes = std::fs::read(path(name)).unwrap();
    let mut file = Gguf::new();
    let mut rest = &bytes[16..];
    let keys = word(&mut rest);
    for _ in 0..keys {
        let (key, kind) = (text(&mut rest), half_word(&mut rest));
        let value = match kind {
            8 => Meta::Str(text(&mut rest)),
            9 if rest[..4] == 8u32.to_le_bytes() => {
                rest = &rest[4..];
                let len = word(&mut rest);
                Meta::Strs((0..len).map(|_| text(&mut rest)).collect())
            }
            9 => {
                // All other lists are of 32-bit numbers.
                let len = u64::from_le_bytes(rest[4..12].try_into().unwrap()) as usize;
                Meta::Raw(9, take(&mut rest, 12 + 4 * len).to_vec())
            }
            _ => Meta::Raw(kind, take(&mut rest, if kind == 7 { 1 } else { 4 }).to_vec()),
        };
        file.set(key, value);
    }
    for tensor in gguf::Gguf::parse(&bytes).unwrap().tensors {
        file.tensors.push(Block {
            name: tensor.name,
            dims: tensor.shape.iter().rev().copied().collect(),
            kind: tensor.dtype.gguf().unwrap(),
            data: bytes[tensor.range].to_vec(),
            offset: None,
        });
    }
    file
}

fn take<'a>(rest: &mut &'a [u8], len: usize) -> &'a [u8] {
    let (own, others) = rest.split_at(len);
    *rest = others;
    own
}

fn word(rest: &mut &[u8]) -> u64 {
    u64::from_le_bytes(take(rest, 8).try_into().unwrap())
}

fn half_word(rest: &mut &[u8]) -> u32 {
    u32::from_le_bytes(take(rest, 4).try_into().unwrap())
}

fn text(rest: &mut &[u8]) -> String {
    let len = word(rest) as usize;
    String::from_utf8(take(rest, len).to_vec()).unwrap()
}

#[test]
fn an_ending_chooses_the_format() {
    assert_eq!(Exchange::of(Path::new("a.GGUF")), Some(Exchange::Gguf));
    assert_eq!(Exchange::of(Path::new("a.ninfer")), Some(Exchange::Ninfer));
    assert_eq!(Exchange::of(Path::new("a.cmf")), None);
    assert_eq!(Dtype::PQ2_0.gguf(), Some(142));
}
