//! Models that run from the files they were published in: the golden models from their directories, and the same networks from
//! GGUF files, on the host and on the device.

use crate::build::{Block, Gguf, MODELS, Meta, fixture, gguf_of, run, source_values};
use crate::golden::{Recorded, described};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::gpu::{Device, DeviceOptions, adapters};
use cmf_gpu::options::{DeviceChoice, Kv};
use cmf_gpu::source::{self, MemoryTensors, ModelSource};
use cmf_gpu::{Engine, Kind, LoadOptions};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, LazyLock};

/// Another order of summation changes logits by at most a tenth of this; a wrong connection by more than ten times as much.
const TOLERANCE: f32 = 1e-3;

static DEVICE: LazyLock<Arc<Device>> = LazyLock::new(|| {
    let all = adapters();
    let best = all.first().expect("an adapter; software Vulkan counts");
    Arc::new(Device::open(best, DeviceOptions::default()).unwrap())
});

/// The places where a model runs: the device, or the reference on the host.
const ON_DEVICE: [bool; 2] = [true, false];

/// Logits of every token: the first three in one run, the others one by one.
pub fn logits(source: ModelSource, tokens: &[u32], on_device: bool) -> Vec<Vec<f32>> {
    let options = LoadOptions::default().ctx(128u32).kv(Kv::F32).all_logits(true);
    let mut progress = |_, _| ControlFlow::Continue(());
    let mut engine = match on_device {
        true => Engine::open_on(source, Some(DEVICE.clone()), &options, &mut progress),
        false => Engine::open(source, &options.device(DeviceChoice::Cpu), &mut progress),
    }
    .unwrap();
    let mut all = Vec::new();
    let mut sink = |_: usize, logits: &[f32], _: &[Vec<f32>]| {
        all.push(logits.to_vec());
        Ok(())
    };
    engine.session().logits(tokens, 3, false, &mut sink).unwrap();
    all
}

/// The most probable token after each token.
pub fn best_after(source: &ModelSource, tokens: &[u32], on_device: bool) -> Vec<u32> {
    let best = |logits: Vec<f32>| {
        let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
        best.unwrap().0 as u32
    };
    logits(source.clone(), tokens, on_device)
        .into_iter()
        .map(best)
        .collect()
}

/// The tokens of a recorded prompt.
fn prompt(model: &str) -> Vec<u32> {
    let tokens = described(model)["prompts"][1]["prompt"].as_array().unwrap().clone();
    tokens.iter().map(|token| token.as_u64().unwrap() as u32).collect()
}

/// Compares with what transformers computed.
fn as_recorded(model: &str, found: &[Vec<f32>]) {
    let wanted = Recorded::of(model).rows("logits.p1");
    assert_eq!(found.len(), wanted.len());
    for (found, wanted) in found.iter().zip(&wanted) {
        for (found, value) in found.iter().zip(&wanted.values) {
            assert!(
                (found - value).abs() <= TOLERANCE + wanted.slack,
                "{model}: {found} {value}"
            );
        }
    }
}

/// The same tensors in memory, with their rows and columns in order. All have types without blocks.
fn in_order(source: &ModelSource) -> ModelSource {
    let tensors = &source.tensors;
    let copies = tensors.infos().iter().enumerate().map(|(id, info)| {
        let stored = tensors.stored(id).unwrap();
        let (rows, cols) = info.rows_cols();
        let decoder = stored.decoder().unwrap();
        let read = |first: usize, out: &mut [f32]| {
            let rows = out.chunks_mut(cols).enumerate();
            rows.for_each(|(row, out)| decoder.row(first + row, out));
            Ok(())
        };
        let bytes = cmf_gpu::dtype::encode::encode(info.dtype, rows, cols, &read).unwrap();
        (info.name.clone(), info.dtype, info.shape.clone(), bytes)
    });
    let mut plain = source.clone();
    plain.tensors = Arc::new(MemoryTensors::new(copies).unwrap());
    plain
}

/// The same values as f32 in memory.
pub fn as_f32(source: &ModelSource) -> ModelSource {
    let copies = source.tensors.infos().iter().enumerate().map(|(id, info)| {
        let stored = source.tensors.stored(id).unwrap();
        let (rows, cols) = info.rows_cols();
        let mut values = vec![0f32; rows * cols];
        let decoder = stored.decoder().unwrap();
        let all = values.chunks_mut(cols).enumerate();
        all.for_each(|(row, out)| decoder.row(row, out));
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        (info.name.clone(), Dtype::F32, info.shape.clone(), bytes)
    });
    let mut plain = source.clone();
    plain.tensors = Arc::new(MemoryTensors::new(copies).unwrap());
    plain
}

/// Writes a file whose matrices are of a type, as `encode` makes them from f32.
pub fn write(mut file: Gguf, kind: u32, encode: impl Fn(&[f32]) -> Vec<u8>, path: &Path) {
    for Block {
        dims,
        kind: old,
        data,
        name,
        ..
    } in &mut file.tensors
    {
        if dims.len() > 1 && dims[0].is_multiple_of(32) && !name.contains("conv1d") && *old == 0 {
            let values: Vec<f32> = data
                .as_chunks()
                .0
                .iter()
                .map(|bytes| f32::from_le_bytes(*bytes))
                .collect();
            (*data, *old) = (encode(&values), kind);
        }
    }
    std::fs::write(path, file.bytes()).unwrap();
}

fn halves(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|&value| half::f16::from_f32(value).to_le_bytes())
        .collect()
}

fn brains(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|&value| half::bf16::from_f32(value).to_le_bytes())
        .collect()
}

/// Blocks of an f16 scale and 32 signed bytes.
pub fn bytes(values: &[f32]) -> Vec<u8> {
    let block = |values: &[f32]| {
        let top = values.iter().fold(0f32, |top, value| top.max(value.abs()));
        let scale = half::f16::from_f32(top / 127.0);
        let code = |value: &f32| (value / scale.to_f32()).round().clamp(-127.0, 127.0) as i8 as u8;
        let codes = values.iter().map(move |value| if top == 0.0 { 0 } else { code(value) });
        scale.to_le_bytes().into_iter().chain(codes).collect::<Vec<u8>>()
    };
    values.chunks(32).flat_map(block).collect()
}

/// The golden models as GGUF files, those with experts and recurrences included.
pub fn as_gguf(model: &str) -> Gguf {
    match model {
        "qwen3_5" => crate::recurrent::gguf(),
        "qwen3_next" => crate::next::gguf_of(&source_values(model), crate::next::GOLDEN, crate::next::Form::Parts),
        _ => gguf_of(model),
    }
}

/// Models whose GGUF files are as they are published: their keys say everything.
const AS_GGUF: [&str; 12] = [
    "llama_tied",
    "llama_bias",
    "qwen2",
    "qwen3",
    "qwen3_yarn",
    "mistral_swa",
    "gemma3",
    "phi3",
    "phi3_longrope",
    "qwen3_5",
    "qwen3_next",
    "gemma2",
];

#[test]
fn every_golden_model_runs_from_its_directory() {
    let more = [
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_next",
        "qwen3_5_hub",
        "qwen3_5_moe_hub",
    ];
    for model in MODELS.into_iter().chain(more) {
        let source = source::open(&fixture(model)).unwrap();
        assert_eq!(source.format, "safetensors");
        as_recorded(model, &logits(source, &prompt(model), true));
    }
    for model in ["llama_untied", "qwen3_5_moe_hub"] {
        as_recorded(
            model,
            &logits(source::open(&fixture(model)).unwrap(), &prompt(model), false),
        );
    }
}

#[test]
fn gguf_files_run_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    for (i, model) in AS_GGUF.into_iter().enumerate() {
        match i % 2 {
            0 => write(as_gguf(model), 1, halves, &path),
            _ => write(as_gguf(model), 30, brains, &path),
        }
        let source = source::open(&path).unwrap();
        assert_eq!(source.format, "gguf");
        let (tokens, plain) = (prompt(model), in_order(&source));
        let found = logits(source, &tokens, true);
        assert!(
            found == logits(plain, &tokens, true),
            "{model}: the order of rows matters"
        );
        // These files do not say how gemma2 scales its scores.
        if model != "gemma2" {
            as_recorded(model, &found);
        }
    }
    for model in ["llama_tied", "qwen3_5"] {
        write(as_gguf(model), 1, halves, &path);
        as_recorded(model, &logits(source::open(&path).unwrap(), &prompt(model), false));
    }
}

/// A container of the same types and values computes the same bits.
#[test]
fn a_converted_model_computes_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let (path, out) = (dir.path().join("model.gguf"), dir.path().join("model.cmf"));
    for model in ["llama_untied", "gemma3"] {
        write(as_gguf(model), 1, halves, &path);
        run(&path, &out, Dtype::F16).unwrap();
        let tokens = prompt(model);
        let from = |path: &Path, place| logits(source::open(path).unwrap(), &tokens, place);
        for place in ON_DEVICE {
            assert!(from(&path, place) == from(&out, place), "{model} as GGUF");
        }
        run(&fixture(model), &out, Dtype::Bf16).unwrap();
        assert!(
            from(&fixture(model), true) == from(&out, true),
            "{model} as a directory"
        );
    }
}

/// Rows and columns of blocks are permuted, not rounded again.
#[test]
fn block_types_run_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    for model in ["llama_tied", "qwen3_5"] {
        write(as_gguf(model), 8, bytes, &path);
        let source = source::open(&path).unwrap();
        assert!(source.tensors.infos().iter().any(|info| info.dtype == Dtype::Q8_0));
        let plain = as_f32(&source);
        let tokens = prompt(model);
        for place in ON_DEVICE {
            let (found, wanted) = (
                logits(source.clone(), &tokens, place),
                logits(plain.clone(), &tokens, place),
            );
            let pairs = found.iter().flatten().zip(wanted.iter().flatten());
            let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            assert!(worst < TOLERANCE, "{model}: {worst}");
        }
    }
}

/// Loading in another type computes what the converted file computes.
#[test]
fn a_directory_is_quantised_while_it_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("model.cmf");
    for (model, quant) in [
        ("qwen2", Dtype::Q4tp),
        ("qwen3_moe", Dtype::VbitRo),
        ("qwen3_next", Dtype::Q8Row),
    ] {
        let (src, tokens) = (fixture(model), prompt(model));
        run(&src, &out, quant).unwrap();
        let options = cmf_gpu::convert::Options::new(quant);
        for place in ON_DEVICE {
            let loaded = cmf_gpu::convert::quantised(&src, options.clone()).unwrap();
            let wanted = logits(source::open(&out).unwrap(), &tokens, place);
            assert!(logits(loaded, &tokens, place) == wanted, "{model}");
        }
    }
    let err = cmf_gpu::convert::quantised(&out, cmf_gpu::convert::Options::new(Dtype::F16)).map(|_| ());
    assert_eq!(err.unwrap_err().kind, Kind::UnsupportedFeature);
}

#[test]
fn sources_are_verified_without_checksums() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    write(as_gguf("llama_tied"), 1, halves, &path);
    let report = source::open(&path).unwrap().verify(&mut |_, _| ()).unwrap();
    assert!(report.ok() && report.notes[0].contains("no checksums"), "{report:?}");
    let infinite = |values: &[f32]| {
        let mut bytes = halves(values);
        bytes[2..4].copy_from_slice(&half::f16::INFINITY.to_le_bytes());
        bytes
    };
    write(as_gguf("llama_tied"), 1, infinite, &path);
    let report = source::open(&path).unwrap().verify(&mut |_, _| ()).unwrap();
    let first = &report.failures[0].error;
    assert!(
        first.kind == Kind::NonFinite && first.message.contains("row 0, column 1"),
        "{first}"
    );
}

/// Heads narrower than a block of their type stay in the order of the file, and the network follows it.
#[test]
fn heads_that_are_no_whole_blocks_stay_in_their_order() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    // 8 heads of 16 columns: blocks of 32 hold two.
    write(crate::recurrent::gguf_with_eight_heads(), 8, bytes, &path);
    let source = source::open(&path).unwrap();
    let find = |part: &str| {
        source
            .tensors
            .find(&format!("model.layers.0.linear_attn.{part}"))
            .unwrap()
    };
    assert!(source.tensors.has_tiled_columns(find("out_proj.weight")));
    assert!(!source.tensors.has_tiled_columns(find("in_proj_z.weight")));
    let out = dir.path().join("model.cmf");
    run(&path, &out, Dtype::F32).unwrap();
    let tokens = prompt("qwen3_5");
    for place in ON_DEVICE {
        let found = logits(source.clone(), &tokens, place);
        let wanted = logits(source::open(&out).unwrap(), &tokens, place);
        let pairs = found.iter().flatten().zip(wanted.iter().flatten());
        let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        // The container has vectors in f16.
        assert!(worst < 20.0 * TOLERANCE, "{worst}");
    }
}

/// A part of a rotation, taken for none, would give nonsense.
#[test]
fn an_incomplete_rotation_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let mut file = as_gguf("llama_tied");
    file.set("prism.hadamard.version", Meta::U32(1));
    write(file, 1, halves, &path);
    let err = source::open(&path).map(|_| ()).unwrap_err();
    assert!(
        err.kind == Kind::UnsupportedFeature && err.message.contains("'prism.hadamard.transform' is missing"),
        "{err}"
    );
}

/// A small network with random weights, whose matrices are all of one type of 256 columns.
pub fn random_model(dtype: Dtype) -> Gguf {
    let numbers = [
        ("block_count", 1),
        ("context_length", 64),
        ("embedding_length", 256),
        ("feed_forward_length", 512),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
    ];
    let mut file = Gguf::network("llama", &numbers, 1e-5);
    let mut seed = 1u32;
    for (name, shape) in [
        ("token_embd", [64u64, 256]),
        ("blk.0.attn_q", [256, 256]),
        ("blk.0.attn_k", [128, 256]),
        ("blk.0.attn_v", [128, 256]),
        ("blk.0.attn_output", [256, 256]),
        ("blk.0.ffn_gate", [512, 256]),
        ("blk.0.ffn_up", [512, 256]),
        ("blk.0.ffn_down", [256, 512]),
        ("output", [64, 256]),
    ] {
        let [rows, cols] = shape.map(|n| n as usize);
        let mut data = vec![0; rows * dtype.row_bytes(cols).unwrap()];
        seed = seed.wrapping_mul(0x9E37_79B9) | 1;
        let random = |bytes: &mut [u8]| {
            let mut state = seed;
            for byte in bytes {
                state ^= state << 13;
                state ^= state >> 17;
                state ^= state << 5;
                *byte = (state >> 11) as u8;
            }
        };
        assert!(dtype.fill_random(&mut data, [rows, cols], 1.0 / 16.0, &random));
        file.tensors.push(Block {
            name: format!("{name}.weight"),
            dims: vec![shape[1], shape[0]],
            kind: dtype.gguf().unwrap(),
            data,
            offset: None,
        });
    }
    for name in ["blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"] {
        file.f32(format!("{name}.weight"), &[256], &[1.0; 256]);
    }
    file
}

/// The same values as f32 give the same logits.
#[test]
fn every_type_of_a_gguf_file_runs() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    for dtype in Dtype::all().filter(|dtype| dtype.gguf().is_some() && dtype.id().is_none()) {
        std::fs::write(&path, random_model(dtype).bytes()).unwrap();
        let source = source::open(&path).unwrap();
        assert!(source.verify(&mut |_, _| ()).unwrap().ok());
        let (tokens, plain) = ([1, 2, 3, 5, 8, 13, 21], as_f32(&source));
        let wanted = logits(plain, &tokens, false);
        for place in ON_DEVICE {
            let found = logits(source.clone(), &tokens, place);
            let pairs = found.iter().flatten().zip(wanted.iter().flatten());
            let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            assert!(worst < TOLERANCE, "{}: {worst}", dtype.name());
        }
    }
}

#[test]
fn a_conversion_replaces_no_file_that_describes_its_source() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.json");
    let source = fixture("qwen3");
    for file in std::fs::read_dir(&source).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    let before = std::fs::read(&config).unwrap();
    let err = run(dir.path(), &config, Dtype::F16).map(|_| ()).unwrap_err();
    assert!(
        err.kind == Kind::Usage && err.message.contains("would replace an input"),
        "{err}"
    );
    assert_eq!(std::fs::read(&config).unwrap(), before);
}
