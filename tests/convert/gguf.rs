//! GGUF files: the same network as the directory it was made from, and every readable block type.

use crate::build::{Block, Gguf, MODELS, Meta, converted, fixture, gguf_of, values};
use cmf_gpu::container::gguf::BlockType;
use cmf_gpu::container::{Container, Tensors};
use cmf_gpu::dtype::Dtype;
use serde_json::Value;
use tempfile::TempDir;

fn convert_gguf(file: &Gguf, quant: Dtype) -> (TempDir, cmf_gpu::convert::Report, Container) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, file.bytes()).unwrap();
    converted(&path, quant)
}

#[test]
fn the_same_network_comes_out_of_both_formats() {
    for model in MODELS {
        let (_dir, _, wanted) = converted(&fixture(model), Dtype::F16);
        let mut file = gguf_of(model);
        if model == "llama_bias" {
            file.set("llama.rope.scaling.type", Meta::Str("linear".into()));
            file.set("llama.rope.scaling.factor", Meta::F32(2.0));
        }
        if model == "llama3_rope" {
            let divisors = wanted.header().arch.rope_freq_factors.clone().unwrap();
            let divisors: Vec<f32> = divisors.into_iter().map(|divisor| divisor as f32).collect();
            file.f32("rope_freqs.weight", &[16], &divisors);
        }
        let (_dir, report, found) = convert_gguf(&file, Dtype::F16);
        assert!(report.dropped.is_empty());
        assert!(values(&found) == values(&wanted), "{model}: values differ");
        assert_eq!(found.infos(), wanted.infos(), "{model}");
        let (mut found, mut wanted) = (found.header().arch.clone(), wanted.header().arch.clone());
        let pairs = found
            .rope_freq_factors
            .take()
            .into_iter()
            .flatten()
            .zip(wanted.rope_freq_factors.take().into_iter().flatten());
        pairs.for_each(|(found, wanted)| assert!((found - wanted).abs() < 1e-6 * wanted, "{model}: {found} {wanted}"));
        assert_eq!(found, wanted, "{model}");
    }
}

#[test]
fn version_2_and_other_alignments_are_read() {
    let mut file = gguf_of("qwen2");
    let (_dir, _, wanted) = convert_gguf(&file, Dtype::Q8Row);
    file.version = 2;
    file.alignment = 128;
    file.set("general.alignment", Meta::U32(128));
    let (_dir, _, found) = convert_gguf(&file, Dtype::Q8Row);
    assert_eq!(found.infos(), wanted.infos());
}

#[test]
fn yarn_is_spelled_out() {
    let mut file = gguf_of("qwen3");
    file.set("qwen3.rope.scaling.type", Meta::Str("yarn".into()));
    file.set("qwen3.rope.scaling.factor", Meta::F32(4.0));
    file.set("qwen3.rope.scaling.original_context_length", Meta::U32(512));
    let (_dir, _, found) = convert_gguf(&file, Dtype::F16);
    let yarn = found.header().arch.yarn.clone().unwrap();
    assert_eq!((yarn.factor, yarn.original_max_position_embeddings), (4.0, 512));
    assert_eq!(yarn.attention_factor, Some(0.1 * 4f64.ln() + 1.0));
}

/// Bytes and values by the format's own Python package.
#[test]
fn blocks_decode_to_the_values_of_the_reference_package() {
    let text = include_str!("../fixtures/gguf/blocks.json");
    let cases: serde_json::Map<String, Value> = serde_json::from_str(text).unwrap();
    assert_eq!(cases.len(), 6);
    for (name, case) in cases {
        let kind = [
            BlockType::Bf16,
            BlockType::Q4_0,
            BlockType::Q4_1,
            BlockType::Q5_0,
            BlockType::Q5_1,
            BlockType::Q8_0,
        ]
        .into_iter()
        .find(|kind| format!("{kind:?}").eq_ignore_ascii_case(&name))
        .unwrap();
        let hex = |key: &str| -> Vec<u8> {
            let text = case[key].as_str().unwrap().as_bytes();
            text.chunks(2)
                .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
                .collect()
        };
        let wanted: Vec<u32> = hex("values")
            .chunks(4)
            .map(|b| u32::from_le_bytes(b.try_into().unwrap()))
            .collect();
        let mut found = vec![f32::NAN; wanted.len()];
        kind.decode(&hex("bytes"), &mut found).unwrap();
        assert_eq!(
            found.iter().map(|value| value.to_bits()).collect::<Vec<_>>(),
            wanted,
            "{name}"
        );
        assert!(kind.decode(&hex("bytes")[1..], &mut found).is_err());
    }
}

/// Interleaved rows are found again in block types as well, whatever row a block of rows starts with.
#[test]
fn interleaved_rows_of_blocks_are_sorted() {
    let mut file = gguf_of("llama_untied");
    let tensor = file
        .tensors
        .iter_mut()
        .find(|tensor| tensor.name == "blk.0.attn_q.weight")
        .unwrap();
    let (cols, rows) = (tensor.dims[0] as usize, tensor.dims[1] as usize);
    // Row r of the file holds r mod 100 everywhere: exact in a Q8_0 block of scale 1.
    let block = |row: usize| [vec![0x00, 0x3c], vec![(row % 100) as u8; 32]].concat();
    let data: Vec<u8> = (0..rows)
        .flat_map(|row| (0..cols / 32).flat_map(move |_| block(row)))
        .collect();
    *tensor = Block {
        kind: 8,
        data,
        ..tensor.clone()
    };
    let (_dir, _, found) = convert_gguf(&file, Dtype::F32);
    let found = &values(&found)["model.layers.0.self_attn.q_proj.weight"].1;
    for (row, values) in found.chunks(cols).enumerate() {
        let (head, within) = (row / 48, row % 48);
        let source = head * 48 + 2 * (within % 24) + within / 24;
        assert!(values.iter().all(|&value| value == (source % 100) as f32), "row {row}");
    }
}

#[test]
fn a_file_without_tokenizer_says_so() {
    let (_dir, report, found) = convert_gguf(&gguf_of("qwen2"), Dtype::F16);
    assert_eq!(found.tokenizer_json(), None);
    assert!(
        report.notes.iter().any(|note| note.contains("no tokenizer")),
        "{:?}",
        report.notes
    );
}
