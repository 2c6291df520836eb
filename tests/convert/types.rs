//! The types of tensors, and the report about them.

use crate::build::{Copy, converted, fixture, source_values, values};
use cmf_gpu::convert::{Options, Report, RouterStats, convert};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::TensorSpec;
use cmf_gpu::format::cmf::{CmfContainer, CmfWriter, Sections};
use cmf_gpu::{Kind, Result};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use tempfile::TempDir;

fn run(src: &Path, options: &Options) -> Result<(TempDir, Report, CmfContainer)> {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out.cmf");
    let report = convert(src, &out, options, &mut |_| ControlFlow::Continue(()))?;
    let container = CmfContainer::open(&out)?;
    assert!(container.verify(&mut |_, _| {}).ok());
    Ok((dir, report, container))
}

fn overrides(list: &[(&str, Dtype)]) -> Options {
    Options {
        overrides: list.iter().map(|&(glob, dtype)| (glob.to_owned(), dtype)).collect(),
        ..Options::new(Dtype::Q4tp)
    }
}

fn types(container: &CmfContainer) -> BTreeMap<&str, Dtype> {
    container
        .infos()
        .iter()
        .map(|info| (info.name.as_str(), info.dtype))
        .collect()
}

/// Bit 2 of the features: some tensors have two-field types.
fn two_fields(dir: &TempDir) -> bool {
    std::fs::read(dir.path().join("out.cmf")).unwrap()[0x0C] & 4 != 0
}

#[test]
fn low_bit_files_keep_the_outermost_matrices_at_eight() {
    for dtype in [
        Dtype::VbitRo,
        Dtype::Vbit,
        Dtype::Q1,
        Dtype::Q1s,
        Dtype::Q1t,
        Dtype::Q4tp,
    ] {
        let (dir, report, container) = converted(&fixture("llama_untied"), dtype);
        let types = types(&container);
        assert_eq!(types["model.embed_tokens.weight"], Dtype::Q82f);
        assert_eq!(types["lm_head.weight"], Dtype::Q82f);
        assert_eq!(types["model.layers.1.mlp.down_proj.weight"], dtype);
        assert_eq!(types["model.norm.weight"], Dtype::F16);
        assert!(two_fields(&dir));
        assert_eq!(container.header_json()["quant_type"], dtype.name().to_uppercase());
        let weights: u64 = report.groups.iter().map(|group| group.weights).sum();
        let tensors: usize = report.groups.iter().map(|group| group.tensors).sum();
        let elements: u64 = container
            .infos()
            .iter()
            .map(|info| info.shape.iter().product::<u64>())
            .sum();
        assert_eq!((tensors, weights), (report.tensors, elements));
    }
    let (dir, _, container) = converted(&fixture("llama_untied"), Dtype::Q8Row);
    assert_eq!(types(&container)["lm_head.weight"], Dtype::Q8Row);
    assert!(!two_fields(&dir));
}

#[test]
fn the_report_has_bits_and_errors() {
    let source = source_values("qwen3");
    for dtype in [Dtype::F32, Dtype::Q82f, Dtype::Q4tp, Dtype::VbitRo, Dtype::Q1s] {
        let (_dir, report, container) = converted(&fixture("qwen3"), dtype);
        let found = values(&container);
        let name = |layer: usize| format!("model.layers.{layer}.mlp.up_proj.weight");
        let (mut lost, mut whole, mut bytes) = (0.0, 0.0, 0);
        for layer in 0..3 {
            for (w, f) in source[&name(layer)].1.iter().zip(&found[&name(layer)].1) {
                lost += f64::from(w - f).powi(2);
                whole += f64::from(*w).powi(2);
            }
            bytes += container
                .infos()
                .iter()
                .find(|info| info.name == name(layer))
                .unwrap()
                .nbytes;
        }
        let group = report
            .groups
            .iter()
            .find(|group| group.name == "model.layers.*.mlp.up_proj.weight");
        let group = group.unwrap();
        assert_eq!(
            (group.dtype, group.tensors, group.bytes, group.matrices),
            (dtype, 3, bytes, true)
        );
        assert!((group.relative_error() - (lost / whole).sqrt()).abs() < 1e-6);
        assert_eq!(group.bits_per_weight(), bytes as f64 * 8.0 / (3.0 * 288.0 * 128.0));
        assert_eq!(group.relative_error() == 0.0, dtype == Dtype::F32);
        let norm = report
            .groups
            .iter()
            .find(|group| group.name == "model.norm.weight")
            .unwrap();
        assert!(!norm.matrices && norm.relative_error() == 0.0);
    }
}

#[test]
fn the_last_glob_that_matches_counts() {
    let options = overrides(&[
        ("*proj*", Dtype::Q8Row),
        ("model.layers.?.mlp.*", Dtype::Q4Tiled),
        ("model.layers.2.*.up_proj.weight", Dtype::F32),
        ("model.layers.0.self_attn.q_*", Dtype::Q8Row),
        ("model.embed*", Dtype::Q1),
    ]);
    let (_dir, _, container) = run(&fixture("qwen3"), &options).unwrap();
    let types = types(&container);
    assert_eq!(types["model.layers.1.self_attn.o_proj.weight"], Dtype::Q8Row);
    assert_eq!(types["model.layers.1.mlp.up_proj.weight"], Dtype::Q4Tiled);
    assert_eq!(types["model.layers.2.mlp.up_proj.weight"], Dtype::F32);
    assert_eq!(types["model.embed_tokens.weight"], Dtype::Q1);
    // Vectors are always f16; a glob may match them along with matrices.
    assert_eq!(types["model.layers.0.self_attn.q_norm.weight"], Dtype::F16);
    assert_eq!(types["model.layers.0.self_attn.q_proj.weight"], Dtype::Q8Row);
    // Naming f16 for vectors is allowed.
    assert!(run(&fixture("qwen3"), &overrides(&[("*norm*", Dtype::F16)])).is_ok());
}

#[test]
fn options_that_cannot_apply_are_refused() {
    let src = fixture("llama_bias");
    let vbit = |mean| Options {
        mean_bits: Some(mean),
        ..Options::new(Dtype::VbitRo)
    };
    let cases = [
        (
            overrides(&[("*", Dtype::Q8Row), ("*.down_prj.*", Dtype::F16)]),
            "*.down_prj.*",
        ),
        (overrides(&[("", Dtype::F16)]), "''"),
        (
            overrides(&[("*norm*", Dtype::Q4Block)]),
            "'*norm*' is to be q4_block, but the 5 tensors of such a name are vectors, which are always f16",
        ),
        (
            overrides(&[("model.norm.weight", Dtype::F32)]),
            "'model.norm.weight' is to be f32",
        ),
        // The override that cannot apply is named.
        (
            overrides(&[("*", Dtype::Q8Row), ("*_proj.bias", Dtype::Q8Row)]),
            "'*_proj.bias'",
        ),
        (vbit(2.5), "2.5"),
        (vbit(9.0), "9"),
        (vbit(f64::NAN), "NaN"),
        (
            Options {
                mean_bits: Some(4.0),
                ..Options::new(Dtype::Q4tp)
            },
            "no tensor is to be vbit",
        ),
        (
            Options {
                router_stats: Some(RouterStats::default()),
                ..Options::new(Dtype::F16)
            },
            "router statistics",
        ),
        (
            Options {
                router_stats: Some(RouterStats::from_json(br#"{"layers": {"0": [1, 2]}}"#).unwrap()),
                ..Options::new(Dtype::VbitRo)
            },
            "layer 0 has 0 experts, found 2",
        ),
    ];
    for (options, wanted) in cases {
        let err = run(&src, &options).map(drop).unwrap_err();
        assert!(
            err.kind == Kind::Usage && err.message.contains(wanted),
            "{wanted}: {err}"
        );
    }
    for json in [
        "",
        "[]",
        "{}",
        r#"{"layers": []}"#,
        r#"{"layers": {"x": [1]}}"#,
        r#"{"layers": {"-1": [1]}}"#,
        r#"{"layers": {"1": []}}"#,
        r#"{"layers": {"1": 1}}"#,
        r#"{"layers": {"1": [0, 0]}}"#,
        r#"{"layers": {"1": [1, -1]}}"#,
        r#"{"layers": {"1": [1, null]}}"#,
    ] {
        let err = RouterStats::from_json(json.as_bytes()).unwrap_err();
        assert!(
            err.kind == Kind::Parse && err.message.contains("router statistics"),
            "{json}: {err}"
        );
    }
}

#[test]
fn a_value_that_no_scale_reaches_names_its_tensor() {
    let copy = Copy::of("llama_bias");
    let mut tensors = source_values("llama_bias");
    tensors.get_mut("model.layers.1.mlp.up_proj.weight").unwrap().1[70] = 3e7;
    copy.tensors(&tensors);
    for dtype in [
        Dtype::Q8Row,
        Dtype::VbitRo,
        Dtype::Q4Tiled,
        Dtype::Q1,
        Dtype::Q1s,
        Dtype::Q1t,
    ] {
        let err = run(copy.path(), &Options::new(dtype)).map(drop).unwrap_err();
        assert_eq!(err.kind, Kind::UnsupportedTensorType);
        for part in ["model.layers.1.mlp.up_proj.weight", "row 1, col 6"] {
            assert!(err.message.contains(part), "{}: {err}", dtype.name());
        }
    }
}

/// The mean bits of a vbit_ro tensor's rows.
fn mean(container: &CmfContainer, name: &str) -> f64 {
    let index = container.infos().iter().position(|info| info.name == name).unwrap();
    let (rows, _) = container.infos()[index].rows_cols();
    assert_eq!(container.infos()[index].dtype, Dtype::VbitRo);
    let bits = &container.bytes(index).unwrap()[..rows];
    bits.iter().map(|&bits| f64::from(bits)).sum::<f64>() / rows as f64
}

#[test]
fn the_mean_is_that_of_every_matrix() {
    for bits in [None, Some(3.5), Some(6.0)] {
        let options = Options {
            mean_bits: bits,
            ..Options::new(Dtype::VbitRo)
        };
        let (dir, _, container) = run(&fixture("qwen3"), &options).unwrap();
        let wanted = bits.unwrap_or(4.25);
        for name in [
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.2.mlp.down_proj.weight",
        ] {
            let found = mean(&container, name);
            assert!(found <= wanted && found >= 0.99 * wanted, "{name}: {found} of {wanted}");
        }
        // Tensors that are vbit already get new widths only if a mean is asked for.
        let again = dir.path().join("out.cmf");
        let (_same, _, same) = run(&again, &Options::new(Dtype::VbitRo)).unwrap();
        assert_eq!(same.infos(), container.infos());
        let fewer = Options {
            mean_bits: Some(3.25),
            ..Options::new(Dtype::VbitRo)
        };
        let (_fewer, _, fewer) = run(&again, &fewer).unwrap();
        assert!(mean(&fewer, "model.layers.0.mlp.up_proj.weight") <= 3.25);
    }
}

const EXPERTS: usize = 4;

fn expert(layer: usize, expert: usize, role: &str) -> String {
    format!("model.layers.{layer}.mlp.experts.{expert}.{role}.weight")
}

/// A container whose experts are ordered by expert, each with twice the amplitude of the one before.
fn mixture(dir: &Path) -> std::path::PathBuf {
    let path = dir.join("experts.cmf");
    let mut tensors: Vec<(String, [u64; 2], f32)> = vec![("model.embed_tokens.weight".into(), [64, 64], 1.0)];
    for layer in 0..2 {
        tensors.push((
            format!("model.layers.{layer}.mlp.gate.weight"),
            [EXPERTS as u64, 64],
            1.0,
        ));
        for number in 0..EXPERTS {
            for role in ["down_proj", "gate_proj", "up_proj"] {
                tensors.push((expert(layer, number, role), [64, 64], (number as f32).exp2()));
            }
        }
    }
    let spec = |(name, shape, _): &(String, [u64; 2], f32)| TensorSpec {
        name: name.clone(),
        dtype: Dtype::F32,
        shape: shape.to_vec(),
    };
    let header = json!({"arch": {
        "arch_name": "test", "hidden_size": 64, "intermediate_size": 64, "num_layers": 2, "num_attention_heads": 1,
        "num_kv_heads": 1, "head_dim": 64, "vocab_size": 64, "rms_norm_eps": 1e-6, "norm_style": "qwen",
        "layer_types": ["FullAttention", "FullAttention"],
    }});
    let Value::Object(header) = header else { unreachable!() };
    let mut writer = CmfWriter::create(&path, header, tensors.iter().map(spec).collect(), Sections::default()).unwrap();
    for (_, shape, amplitude) in &tensors {
        let count = shape[0] * shape[1];
        let value = |i: u64| ((i * 7919 + 13) % 1009) as f32 / 504.5 - 1.0;
        let bytes: Vec<u8> = (0..count).flat_map(|i| (value(i) * amplitude).to_le_bytes()).collect();
        writer.write(&bytes).unwrap();
    }
    writer.finish().unwrap();
    path
}

#[test]
fn experts_share_their_bits_and_stand_by_role() {
    let dir = TempDir::new().unwrap();
    let path = mixture(dir.path());
    let (_dir, report, container) = run(&path, &Options::new(Dtype::VbitRo)).unwrap();
    for layer in 0..2 {
        for role in ["gate_proj", "up_proj", "down_proj"] {
            let means: Vec<f64> = (0..EXPERTS)
                .map(|e| mean(&container, &expert(layer, e, role)))
                .collect();
            assert!(
                means.is_sorted() && means[0] == 3.0 && means[3] > means[0] + 1.0,
                "{means:?}"
            );
            let all = means.iter().sum::<f64>() / EXPERTS as f64;
            assert!((0.99 * 4.25..=4.25).contains(&all), "{all}");
        }
    }
    let names: Vec<&str> = container.infos().iter().map(|info| info.name.as_str()).collect();
    let mut wanted = vec!["model.embed_tokens.weight".to_owned()];
    for layer in 0..2 {
        wanted.push(format!("model.layers.{layer}.mlp.gate.weight"));
        for role in ["gate_proj", "up_proj", "down_proj"] {
            wanted.extend((0..EXPERTS).map(|number| expert(layer, number, role)));
        }
    }
    assert_eq!(names, wanted);
    assert_eq!(types(&container)["model.layers.1.mlp.gate.weight"], Dtype::F16);
    assert!(
        report.notes.iter().any(|note| note.starts_with("2 small matrices")),
        "{:?}",
        report.notes
    );

    // In layer 1 the expert of smallest amplitude is chosen most; layer 0 is unchanged.
    let stats = RouterStats::from_json(br#"{"layers": {"1": [64, 1, 1, 0]}, "tokens": 5}"#).unwrap();
    let options = Options {
        router_stats: Some(stats),
        ..Options::new(Dtype::VbitRo)
    };
    let (_dir, _, used) = run(&path, &options).unwrap();
    let bits =
        |container: &CmfContainer, layer: usize, number: usize| mean(container, &expert(layer, number, "up_proj"));
    assert_eq!(bits(&used, 0, 3), bits(&container, 0, 3));
    assert_eq!(bits(&used, 1, 3), 3.0);
    assert!(bits(&used, 1, 0) > 5.0);
    let all = (0..EXPERTS).map(|number| bits(&used, 1, number)).sum::<f64>() / EXPERTS as f64;
    assert!((0.99 * 4.25..=4.25).contains(&all), "{all}");
}
