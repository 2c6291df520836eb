//! GGUF files: the same network as the directory it was made from, and every readable block type.

use crate::build::{Block, Gguf, MODELS, Meta, convert_gguf, converted, fixture, gguf_of, run, values};
use cmf_gpu::Kind;
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::source::LayerType;
use cmf_gpu::tools::skill;
use std::ops::ControlFlow;
use tempfile::TempDir;

#[test]
fn the_same_network_comes_out_of_both_formats() {
    for model in MODELS {
        let (_dir, _, wanted) = converted(&fixture(model), Dtype::F16);
        let mut file = gguf_of(model);
        if model == "llama3_rope" {
            let divisors = wanted.header().arch.rope_freq_factors.clone().unwrap();
            let divisors: Vec<f32> = divisors.into_iter().map(|divisor| divisor as f32).collect();
            file.f32("rope_freqs.weight", &[16], &divisors);
        }
        let (_dir, report, found) = convert_gguf(&file, Dtype::F16).unwrap();
        assert!(report.dropped.is_empty());
        // These files hold no draft heads.
        let mut all = values(&wanted);
        all.retain(|name, _| !name.starts_with("model.mtp."));
        assert!(values(&found) == all, "{model}: values differ");
        assert_eq!(found.infos(), &wanted.infos()[..all.len()], "{model}");
        let (mut found, mut wanted) = (found.header().arch.clone(), wanted.header().arch.clone());
        wanted.mtp = None;
        if model == "gemma2" {
            // These files do not store the attention scale. In all sizes of this family but one it follows from head_dim.
            assert_eq!(found.query_pre_attn_scalar, Some(48.0));
            found.query_pre_attn_scalar = wanted.query_pre_attn_scalar;
        }
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
    let (_dir, _, wanted) = convert_gguf(&file, Dtype::Q8Row).unwrap();
    file.version = 2;
    file.alignment = 128;
    file.set("general.alignment", Meta::U32(128));
    let (_dir, _, found) = convert_gguf(&file, Dtype::Q8Row).unwrap();
    assert_eq!(found.infos(), wanted.infos());
}

/// A skill can only be made from two sources with the same tensors.
#[test]
fn a_skill_comes_from_a_gguf_file() {
    let mut file = gguf_of("qwen2");
    let (dir, _, base) = convert_gguf(&file, Dtype::F16).unwrap();
    drop(base);
    let changed = file
        .tensors
        .iter_mut()
        .find(|tensor| tensor.name == "blk.1.ffn_down.weight")
        .unwrap();
    changed.data[..4].copy_from_slice(&3f32.to_le_bytes());
    let (src, model) = (dir.path().join("tuned.gguf"), dir.path().join("out.cmf"));
    std::fs::write(&src, file.bytes()).unwrap();
    let new = skill::New {
        id: "s".into(),
        ..skill::New::default()
    };
    let written = skill::add(&model, &src, &new, &mut |_, _| ControlFlow::Continue(())).unwrap();
    let grown = CmfContainer::open(&model).unwrap();
    assert_eq!((written.tensors, &grown.skills()[0].layers), (1, &vec![1]));
    assert!(grown.find("skill.s.model.layers.1.mlp.down_proj.weight").is_some());
}

#[test]
fn yarn_is_spelled_out() {
    let mut file = gguf_of("qwen3");
    file.set("qwen3.rope.scaling.type", Meta::Str("yarn".into()));
    file.set("qwen3.rope.scaling.factor", Meta::F32(4.0));
    file.set("qwen3.rope.scaling.original_context_length", Meta::U32(512));
    let (_dir, _, found) = convert_gguf(&file, Dtype::F16).unwrap();
    let yarn = found.header().arch.yarn.clone().unwrap();
    assert_eq!((yarn.factor, yarn.original_max_position_embeddings), (4.0, 512));
    assert_eq!(yarn.attention_factor, Some(0.1 * 4f64.ln() + 1.0));
}

/// Interleaved rows are also restored in block types, from any first row on.
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
    let (_dir, _, found) = convert_gguf(&file, Dtype::F32).unwrap();
    let found = &values(&found)["model.layers.0.self_attn.q_proj.weight"].1;
    for (row, values) in found.chunks(cols).enumerate() {
        let (head, within) = (row / 48, row % 48);
        let source = head * 48 + 2 * (within % 24) + within / 24;
        assert!(values.iter().all(|&value| value == (source % 100) as f32), "row {row}");
    }
}

#[test]
fn a_file_without_tokenizer_says_so() {
    let (_dir, report, found) = convert_gguf(&gguf_of("qwen2"), Dtype::F16).unwrap();
    assert_eq!(found.tokenizer_json(), None);
    assert!(
        report.notes.iter().any(|note| note.contains("no tokenizer")),
        "{:?}",
        report.notes
    );
}

/// A model split into three files, the first with the metadata and no tensors.
fn split(model: &str, dir: &TempDir) -> Vec<std::path::PathBuf> {
    let whole = gguf_of(model);
    let tensors = whole.tensors.len();
    let cut = [0..0, 0..tensors / 2, tensors / 2..tensors];
    let write = |(number, range): (usize, std::ops::Range<usize>)| {
        let mut part = Gguf::new();
        if number == 0 {
            part.metadata = whole.metadata.clone();
        }
        part.tensors = whole.tensors[range].to_vec();
        part.set("split.no", Meta::Raw(2, (number as u16).to_le_bytes().to_vec()));
        part.set("split.count", Meta::Raw(2, 3u16.to_le_bytes().to_vec()));
        part.set(
            "split.tensors.count",
            Meta::Raw(5, (tensors as i32).to_le_bytes().to_vec()),
        );
        let path = dir.path().join(format!("m-{:05}-of-00003.gguf", number + 1));
        std::fs::write(&path, part.bytes()).unwrap();
        path
    };
    cut.into_iter().enumerate().map(write).collect()
}

#[test]
fn split_files_are_opened_by_any_part() {
    let (_dir, _, wanted) = convert_gguf(&gguf_of("gemma3"), Dtype::Q8Row).unwrap();
    let dir = TempDir::new().unwrap();
    for part in split("gemma3", &dir) {
        let (_dir, _, found) = converted(&part, Dtype::Q8Row);
        assert_eq!(found.infos(), wanted.infos());
        assert_eq!(found.header().arch, wanted.header().arch);
        let model = cmf_gpu::source::open(&part).unwrap();
        assert_eq!((model.files.len(), &model.arch), (3, &wanted.header().arch));
        let places = (0..model.tensors.infos().len()).map(|id| model.tensors.place(id).unwrap().file);
        assert!(places.max() == Some(2) && model.verify(&mut |_, _| ()).unwrap().ok());
    }
}

#[test]
fn parts_that_do_not_fit_are_named() {
    let refusal = |change: &dyn Fn(&[std::path::PathBuf])| {
        let dir = TempDir::new().unwrap();
        let parts = split("qwen2", &dir);
        change(&parts);
        let out = dir.path().join("o.cmf");
        let err = run(if parts[0].exists() { &parts[0] } else { &parts[1] }, &out, Dtype::F16).unwrap_err();
        assert!(!out.exists());
        assert_eq!(err.kind, Kind::ShardMismatch, "{err}");
        err.message
    };
    let missing = refusal(&|parts| std::fs::remove_file(&parts[2]).unwrap());
    assert!(
        missing.contains("m-00003-of-00003.gguf: part 3 of 3 is missing"),
        "{missing}"
    );
    let missing = refusal(&|parts| std::fs::remove_file(&parts[0]).unwrap());
    assert!(
        missing.contains("m-00001-of-00003.gguf: part 1 of 3 is missing"),
        "{missing}"
    );
    let twice = refusal(&|parts| {
        std::fs::copy(&parts[1], &parts[2]).unwrap();
    });
    assert!(twice.contains("m-00003-of-00003.gguf: this is not part 3"), "{twice}");
    let other = refusal(&|parts| {
        std::fs::write(&parts[2], gguf_of("qwen2").bytes()).unwrap();
    });
    assert!(other.contains("this is not part 3"), "{other}");
    let fewer = refusal(&|parts| {
        let mut last = Gguf::new();
        last.f32("t", &[8], &[0.0; 8]);
        for (key, value) in [("split.no", 2u16), ("split.count", 3)] {
            last.set(key, Meta::Raw(2, value.to_le_bytes().to_vec()));
        }
        let count = gguf_of("qwen2").tensors.len() as u32;
        last.set("split.tensors.count", Meta::U32(count));
        std::fs::write(&parts[2], last.bytes()).unwrap();
    });
    assert!(fewer.contains("split.tensors.count says"), "{fewer}");
    let renamed = refusal(&|parts| {
        std::fs::rename(&parts[0], parts[0].with_file_name("x.gguf")).unwrap();
        std::fs::rename(&parts[1], &parts[0]).unwrap();
    });
    assert!(
        renamed.contains("part 2 of a split model is called NAME-00002-of-00003.gguf"),
        "{renamed}"
    );
}

#[test]
fn settings_of_the_sampler_are_kept() {
    let mut file = gguf_of("qwen2");
    file.set("general.sampling.temp", Meta::F32(0.6));
    file.set("general.sampling.top_k", Meta::Raw(5, 20i32.to_le_bytes().to_vec()));
    file.set("general.sampling.penalty_repeat", Meta::F32(1.1));
    let (_dir, _, found) = convert_gguf(&file, Dtype::F16).unwrap();
    assert_eq!(
        found.header_json()["provenance"]["generation_config"],
        serde_json::json!({"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1})
    );
}

/// Keys that are left out have the defaults of the programs that read such files.
#[test]
fn defaults_of_gemma_files() {
    let (sliding, full) = (LayerType::SlidingAttention, LayerType::FullAttention);
    let mut file = gguf_of("gemma3");
    file.metadata
        .retain(|(key, _)| !key.ends_with("sliding_window_pattern") && !key.ends_with("rope.freq_base"));
    let (_dir, _, found) = convert_gguf(&file, Dtype::F16).unwrap();
    let arch = &found.header().arch;
    assert_eq!(arch.layer_types, [sliding, sliding, sliding, sliding, sliding, full]);
    assert_eq!((arch.sliding_window, arch.sliding_window_pattern), (Some(8), Some(6)));
    assert_eq!((arch.rope_theta, arch.rope_local_base_freq), (1e6, Some(1e4)));
    assert_eq!(arch.query_pre_attn_scalar, Some(32.0));
    // A list of layers instead of a period, and a separate rotary base.
    file.set(
        "gemma3.attention.sliding_window_pattern",
        Meta::Raw(
            9,
            [[7, 0, 0, 0].as_slice(), &6u64.to_le_bytes(), &[1, 0, 0, 1, 1, 0]].concat(),
        ),
    );
    file.set("gemma3.rope.freq_base_swa", Meta::F32(5e3));
    let (_dir, _, found) = convert_gguf(&file, Dtype::F16).unwrap();
    let arch = &found.header().arch;
    assert_eq!(arch.layer_types, [sliding, full, full, sliding, sliding, full]);
    assert_eq!(
        (arch.sliding_window_pattern, arch.rope_local_base_freq),
        (None, Some(5e3))
    );
    let mut file = gguf_of("gemma2");
    file.metadata
        .retain(|(key, _)| !key.ends_with("sliding_window_pattern") && !key.ends_with("softcapping"));
    let (_dir, _, found) = convert_gguf(&file, Dtype::F16).unwrap();
    let arch = &found.header().arch;
    assert_eq!(arch.layer_types, [sliding, full, sliding, full]);
    assert_eq!(
        (arch.attn_logit_softcapping, arch.final_logit_softcapping),
        (Some(50.0), Some(30.0))
    );
}
