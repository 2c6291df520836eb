//! Containers of pipelines: several networks and their configurations in one file (section 12 of the format).

use crate::golden::pipeline::{F16, REFERENCE_Q4T, container, dir};
use crate::raw::{Raw, Record, record};
use crate::{on_disk, refusal};
use cmf_gpu::Kind;
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::image;
use cmf_gpu::source::{self, ModelSource};
use serde_json::{Value, json};

#[test]
fn golden_containers_are_rebuilt_byte_for_byte() {
    for (name, bytes, hash) in [
        (F16, 3_132_265, 0x48be_5bed_86e4_ddc4),
        (REFERENCE_Q4T, 4_724_999, 0x9229_1623_5cac_6889),
    ] {
        let file = std::fs::read(container(name)).unwrap();
        assert_eq!((file.len(), cmf_gpu::format::hash64(&file)), (bytes, hash), "{name}");
    }
}

/// Checks configurations, names and shapes as before a picture is made.
fn bound(source: &ModelSource) -> cmf_gpu::Result<image::Network> {
    source.require_image()?;
    let tensors = &*source.tensors;
    image::bind(&image::Config::of(tensors)?, tensors)
}

/// Every value of a tensor.
fn values(source: &ModelSource, name: &str) -> Vec<f32> {
    let id = source.tensors.find(name).unwrap();
    let (rows, cols) = source.tensors.infos()[id].rows_cols();
    let stored = source.tensors.stored(id).unwrap();
    let decoder = stored.decoder().unwrap();
    let mut values = vec![0.0; rows * cols];
    for (row, out) in values.chunks_exact_mut(cols).enumerate() {
        decoder.row(row, out);
    }
    values
}

#[test]
fn a_directory_and_containers_are_the_same_pipeline() {
    let directory = source::open(&dir()).unwrap();
    let f16 = source::open(&container(F16)).unwrap();
    let reference = source::open(&container(REFERENCE_Q4T)).unwrap();
    assert_eq!((directory.format, f16.format), ("diffusers", "cmf-v2"));
    for source in [&directory, &f16, &reference] {
        assert_eq!(source.pipeline(), Some("lumina2-image"));
        let network = bound(source).unwrap();
        assert!(network.unused.is_empty());
        assert_eq!(source.require_language().unwrap_err().kind, Kind::UnsupportedModel);
        assert!(source.verify(&mut |_, _| {}).unwrap().ok());
    }
    let names = |source: &ModelSource| {
        let infos = source.tensors.infos().iter();
        infos
            .map(|info| (info.name.clone(), info.shape.clone()))
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&directory), names(&f16));
    for info in directory.tensors.infos() {
        assert_eq!(
            values(&directory, &info.name),
            values(&f16, &info.name),
            "{}",
            info.name
        );
    }
    // The configurations and the tokenizer are the files, unchanged.
    let config = std::fs::read(dir().join("vae/config.json")).unwrap();
    let id = f16.tensors.find("vae.config_json").unwrap();
    assert_eq!(
        (f16.tensors.infos()[id].dtype, &*f16.tensors.stored(id).unwrap().bytes),
        (Dtype::U8, &config[..])
    );
    assert_eq!(directory.text.tokenizer_json(), f16.text.tokenizer_json());
    // The header of the reference tool leaves out half of the encoder; its configuration does not.
    assert_eq!(reference.arch.attn_logit_softcapping, None);
    let config = |source: &ModelSource| image::Config::of(&*source.tensors).unwrap();
    assert_eq!(config(&reference), config(&f16));
    assert!(reference.tensors.find("scheduler.config_json").is_none());
    assert_eq!(config(&directory), config(&f16));
    assert_eq!(
        directory.arch,
        source::Arch {
            arch_name: "lumina2-image".into(),
            ..config(&f16).text
        }
    );
    // Of the files that a directory has, only the autoencoder's first half is left out.
    let dropped = &directory.dropped;
    assert!(
        !dropped.is_empty() && dropped.iter().all(|name| name.starts_with("vae.encoder.")),
        "{dropped:?}"
    );
}

/// The parts of the golden container, to be changed.
fn parts() -> Raw {
    let file = CmfContainer::open(&container(F16)).unwrap();
    let record = |(id, info): (usize, &source::TensorInfo)| {
        let shape: Vec<u32> = info.shape.iter().map(|&dim| dim as u32).collect();
        record(
            &info.name,
            info.dtype.id().unwrap(),
            &shape,
            file.bytes(id).unwrap().to_vec(),
        )
    };
    Raw {
        features: 1,
        header: Value::from(file.header_json().clone()).to_string().into_bytes(),
        records: file.infos().iter().enumerate().map(record).collect(),
        masks: Vec::new(),
        vocab: file.tokenizer_json().unwrap().to_vec(),
        index: Vec::new(),
        count: None,
        pool_off: None,
    }
}

fn without(raw: &mut Raw, prefix: &str) {
    let before = raw.records.len();
    raw.records.retain(|record| !record.name.starts_with(prefix.as_bytes()));
    assert!(raw.records.len() < before);
}

fn set(raw: &mut Raw, component: &str, key: &str, value: Value) {
    let record = raw.record(&format!("{component}.config_json"));
    let mut config: Value = serde_json::from_slice(&record.payload).unwrap();
    config[key] = value;
    replace(record, config.to_string().into_bytes());
}

fn replace(record: &mut Record, payload: Vec<u8>) {
    record.shape[0] = payload.len() as u32;
    record.payload = payload;
}

fn named(raw: &mut Raw, arch_name: &str) {
    let mut header: Value = serde_json::from_slice(&raw.header).unwrap();
    header["arch"]["arch_name"] = json!(arch_name);
    raw.header = header.to_string().into_bytes();
}

#[test]
fn malformed_bytes_do_not_open() {
    let refused = |change: fn(&mut Raw), message: &str| {
        let mut raw = parts();
        change(&mut raw);
        let err = refusal(&raw.build()).unwrap();
        assert_eq!(err.kind, Kind::Parse, "{err}");
        assert!(err.message.contains(message), "{err}");
    };
    refused(
        |raw| {
            let bias = raw.record("dit.x_embedder.bias");
            (bias.dtype, bias.shape[0]) = (6, bias.payload.len() as u32);
        },
        "'dit.x_embedder.bias': element type id 6 (u8",
    );
    refused(
        |raw| {
            let config = raw.record("vae.config_json");
            config.payload.truncate(config.payload.len() / 2 * 2);
            (config.dtype, config.shape[0]) = (1, config.payload.len() as u32 / 2);
        },
        "'vae.config_json': expected the bytes of a configuration",
    );
    refused(
        |raw| {
            let config = raw.record("vae.config_json");
            (config.ndim, config.shape[1]) = (2, 1);
        },
        "u8 of 2 dimensions",
    );
    refused(|raw| raw.record("te.config_json").shape[0] -= 1, "bytes, found");
}

#[test]
fn malformed_pipelines_open_and_make_no_picture() {
    use Kind::{MissingTensor, Parse, UnsupportedModel};
    type Change = fn(&mut Raw);
    let cases: [(&str, Change, Kind); 12] = [
        (
            "config not JSON",
            |raw| replace(raw.record("dit.config_json"), b"{\"a\":".to_vec()),
            Parse,
        ),
        (
            "config no object",
            |raw| replace(raw.record("te.config_json"), b"[1]".to_vec()),
            Parse,
        ),
        ("no dit config", |raw| without(raw, "dit.config_json"), MissingTensor),
        (
            "no te layer",
            |raw| without(raw, "te.layers.1.mlp.down_proj"),
            MissingTensor,
        ),
        (
            "no vae conv",
            |raw| without(raw, "vae.decoder.conv_out.weight"),
            MissingTensor,
        ),
        (
            "shape mismatch",
            |raw| set(raw, "dit", "hidden_size", json!(128)),
            Parse,
        ),
        (
            "axes sum",
            |raw| set(raw, "dit", "axes_dim_rope", json!([4, 4, 4])),
            Parse,
        ),
        ("caption width", |raw| set(raw, "dit", "cap_feat_dim", json!(72)), Parse),
        (
            "no post_quant",
            |raw| set(raw, "vae", "use_post_quant_conv", json!(true)),
            MissingTensor,
        ),
        (
            "latents mean",
            |raw| set(raw, "vae", "latents_mean", vec![0.0; 16].into()),
            UnsupportedModel,
        ),
        ("other pipeline", |raw| named(raw, "minimax-h3-av"), UnsupportedModel),
        (
            "karras",
            |raw| set(raw, "scheduler", "use_karras_sigmas", json!(true)),
            UnsupportedModel,
        ),
    ];
    for (name, change, kind) in cases {
        let mut raw = parts();
        change(&mut raw);
        let (_dir, path) = on_disk(&raw.build());
        let source = source::open(&path).unwrap_or_else(|err| panic!("{name}: {err}"));
        assert!(source.verify(&mut |_, _| {}).unwrap().ok(), "{name}");
        let err = bound(&source).expect_err(name);
        assert_eq!(err.kind, kind, "{name}: {err}");
    }
}

#[test]
fn other_pipelines_are_inspected_and_refused_by_name() {
    for (name, known) in [("ltx-2.5-av", true), ("some-other", false)] {
        let mut raw = parts();
        named(&mut raw, name);
        if known {
            // Zeros for what the encoder does not have.
            let mut header: Value = serde_json::from_slice(&raw.header).unwrap();
            header["arch"]["linear_num_key_heads"] = json!(0);
            raw.header = header.to_string().into_bytes();
        }
        let (_dir, path) = on_disk(&raw.build());
        let source = source::open(&path).unwrap();
        assert_eq!(source.pipeline(), Some(name));
        for refused in [source.require_image(), source.require_language()] {
            let err = refused.unwrap_err();
            assert_eq!(err.kind, Kind::UnsupportedModel);
            assert!(err.message.contains(name), "{err}");
        }
    }
}
