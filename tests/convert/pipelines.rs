//! Text-to-image pipelines: diffusers directories, and containers with other types.

use crate::build::{Copy, converted, file_values, run, safetensors_f32};
use crate::golden::pipeline::{F16, REFERENCE_Q4T, container, dir};
use cmf_gpu::Kind;
use cmf_gpu::convert::{Options, convert, quantised};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::image;
use cmf_gpu::source::{ModelSource, TensorInfo};
use cmf_gpu::tools::diff::diff;
use cmf_gpu::tools::shard::{compact, shard};
use serde_json::{Value, json};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

/// Checks configurations, names and shapes as before a picture is made.
fn bind(source: &ModelSource) -> cmf_gpu::Result<image::Network> {
    source.require_image()?;
    image::bind(&image::Config::of(&*source.tensors)?, &*source.tensors)
}

/// Name, type, shape and checksum of every tensor.
fn directory(file: &CmfContainer) -> Vec<(TensorInfo, u64)> {
    let payloads = file.payloads().iter().map(|payload| payload.hash);
    file.infos().iter().cloned().zip(payloads).collect()
}

#[test]
fn the_f16_container_has_the_tensors_of_the_golden_one() {
    let (_dir, report, file) = converted(&dir(), Dtype::F16);
    let golden = CmfContainer::open(&container(F16)).unwrap();
    assert_eq!(directory(&file), directory(&golden));
    assert_eq!(file.tokenizer_json(), golden.tokenizer_json());
    assert_eq!(file.header().tokenizer_config, golden.header().tokenizer_config);
    let provenance = &file.header().provenance;
    assert_eq!(provenance["components"]["dit"], "Lumina2Transformer2DModel");
    assert_eq!(provenance["source_format"], "diffusers");
    assert!(report.dropped.iter().all(|name| name.starts_with("vae.encoder.")));
    let vae = file_values(&dir().join("vae/diffusion_pytorch_model.safetensors"));
    let encoder = vae.keys().filter(|name| name.starts_with("encoder.")).count();
    assert_eq!((report.dropped.len(), encoder), (72, 72));
}

/// Every type for matrices, the fixed types for the rest, and a network that binds.
#[test]
fn matrices_have_any_type() {
    for quant in Dtype::all().filter(|dtype| !dtype.quant_name().is_empty()) {
        let (_dir, report, file) = converted(&dir(), quant);
        let dtype = |name: &str| file.infos()[file.find(name).unwrap()].dtype;
        let floats = quant.code_bits() >= 16;
        let (small, wide) = match quant.code_bits() {
            16.. => (quant, quant),
            8 => (Dtype::F16, quant),
            _ => (Dtype::F16, Dtype::Q82f),
        };
        assert_eq!(dtype("dit.layers.2.attn.to_q.weight"), quant);
        assert_eq!(dtype("dit.time_caption_embed.caption_embedder.1.weight"), quant);
        assert_eq!(dtype("te.layers.1.mlp.down_proj.weight"), quant);
        assert_eq!(dtype("te.embed_tokens.weight"), wide);
        assert_eq!(dtype("dit.noise_refiner.0.norm1.linear.weight"), wide);
        for name in [
            "vae.decoder.conv_in.weight",
            "vae.decoder.mid_block.attentions.0.to_q.weight",
            "dit.x_embedder.weight",
            "dit.norm_out.linear_2.weight",
        ] {
            assert_eq!(dtype(name), small, "{name} of {}", quant.name());
        }
        for name in [
            "dit.x_embedder.bias",
            "te.norm.weight",
            "vae.decoder.conv_norm_out.weight",
        ] {
            assert_eq!(dtype(name), Dtype::F16);
        }
        assert_eq!(dtype("te.config_json"), Dtype::U8);
        let told = report.notes.iter().any(|note| note.contains("convolutions are f16"));
        assert_eq!(told, !floats, "{:?}", report.notes);
        bind(&ModelSource::from_cmf(Arc::new(file)).unwrap()).unwrap();
    }
}

#[test]
fn a_pipeline_is_quantised_while_it_is_loaded_as_convert_does() {
    let (_dir, _, file) = converted(&dir(), Dtype::Q4Tiled);
    let loaded = quantised(&dir(), Options::new(Dtype::Q4Tiled)).unwrap();
    for (id, info) in loaded.tensors.infos().iter().enumerate() {
        let found = file.find(&info.name).unwrap();
        assert_eq!(info, &file.infos()[found]);
        assert!(
            *loaded.tensors.stored(id).unwrap().bytes == *file.bytes(found).unwrap(),
            "{}",
            info.name
        );
    }
    bind(&loaded).unwrap();
}

#[test]
fn single_tensors_have_the_type_that_is_asked_for() {
    let out = TempDir::new().unwrap();
    let path = out.path().join("o.cmf");
    let mut options = Options::new(Dtype::Q8Row);
    options.overrides = vec![
        ("vae.*".into(), Dtype::F32),
        ("te.*".into(), Dtype::Q4Tiled),
        ("vae.decoder.conv_out.*".into(), Dtype::Q4Block),
    ];
    let report = convert(&dir(), &path, &options, &mut |_| ControlFlow::Continue(())).unwrap();
    let file = CmfContainer::open(&path).unwrap();
    let dtype = |name: &str| file.infos()[file.find(name).unwrap()].dtype;
    assert_eq!(dtype("vae.decoder.conv_in.weight"), Dtype::F32);
    assert_eq!(dtype("vae.decoder.conv_out.weight"), Dtype::F16, "never quantised");
    assert_eq!(dtype("te.embed_tokens.weight"), Dtype::Q4Tiled);
    assert_eq!(dtype("te.config_json"), Dtype::U8);
    assert_eq!(dtype("dit.layers.0.attn.to_k.weight"), Dtype::Q8Row);
    let refused = report
        .notes
        .iter()
        .any(|note| note.contains("q4_block does not allow their shape"));
    assert!(refused, "{:?}", report.notes);
    options.overrides = vec![("te.config_json".into(), Dtype::F16)];
    let err = convert(&dir(), &path, &options, &mut |_| ControlFlow::Continue(())).unwrap_err();
    assert_eq!(err.kind, Kind::Usage, "{err}");
}

#[test]
fn other_types_leave_configurations_and_convolutions_as_they_are() {
    for name in [F16, REFERENCE_Q4T] {
        let source = CmfContainer::open(&container(name)).unwrap();
        let (_dir, _, file) = converted(&container(name), Dtype::Q8Row);
        for (info, hash) in directory(&source) {
            let (now, stored) = &directory(&file)[file.find(&info.name).unwrap()];
            let is_kept = info.dtype == Dtype::U8 || info.shape.len() == 4;
            assert!(!is_kept || (&info, &hash) == (now, stored), "{}", info.name);
            assert!(
                is_kept || info.shape.len() > 1 || now.dtype == Dtype::F16,
                "{}",
                info.name
            );
        }
        assert_eq!(file.tokenizer_json(), source.tokenizer_json());
        bind(&ModelSource::from_cmf(Arc::new(file)).unwrap()).unwrap();
    }
}

#[test]
fn files_of_pipelines_are_split_joined_and_compared() {
    let out = TempDir::new().unwrap();
    let whole = container(F16);
    let none = &mut |_, _| ControlFlow::Continue(());
    let (paths, written) = shard(&whole, 1_000_000, out.path(), none).unwrap();
    assert_eq!(paths.len(), 4);
    let [a, b] = [&whole, &paths[2]].map(|path| CmfContainer::open(path).unwrap());
    assert_eq!(written.tensors, a.infos().len());
    assert!(diff(&a, &b).unwrap().is_empty());
    assert!(b.verify(&mut |_, _| {}).ok());
    bind(&ModelSource::from_cmf(Arc::new(b)).unwrap()).unwrap();
    let joined = out.path().join("joined.cmf");
    compact(&paths[0], &joined, none).unwrap();
    assert!(diff(&a, &CmfContainer::open(&joined).unwrap()).unwrap().is_empty());
    let (_dir, _, other) = converted(&container(F16), Dtype::Q8Row);
    let found = diff(&a, &other).unwrap();
    assert!(
        found
            .tensors
            .iter()
            .all(|tensor| !tensor.name.ends_with(".config_json"))
    );
    assert!(
        found
            .tensors
            .iter()
            .any(|tensor| tensor.name == "dit.layers.0.attn.to_q.weight")
    );
}

/// A first convolution of latents, in the autoencoder of the copy.
fn add_post_quant(copy: &Copy) {
    let path = copy.path().join("vae/diffusion_pytorch_model.safetensors");
    let mut tensors = file_values(&path);
    tensors.insert("post_quant_conv.weight".into(), (vec![16, 16, 1, 1], vec![0.5; 256]));
    tensors.insert("post_quant_conv.bias".into(), (vec![16], vec![0.25; 16]));
    tensors.insert("quant_conv.bias".into(), (vec![32], vec![0.0; 32]));
    std::fs::write(path, safetensors_f32(&tensors)).unwrap();
}

#[test]
fn the_first_convolution_of_latents_is_kept_when_it_is_used() {
    const NAME: &str = "vae.post_quant_conv.weight";
    let copy = Copy::of_pipeline();
    add_post_quant(&copy);
    let (_dir, report, file) = converted(copy.path(), Dtype::Q8Row);
    assert!(file.find(NAME).is_none());
    assert!(report.dropped.iter().any(|dropped| dropped.starts_with(NAME)));
    // Absent means that it is used.
    copy.edit("vae/config.json", |config| drop(config.remove("use_post_quant_conv")));
    let (_dir, report, file) = converted(copy.path(), Dtype::Q8Row);
    assert_eq!(file.infos()[file.find(NAME).unwrap()].dtype, Dtype::F16);
    assert!(
        report
            .dropped
            .iter()
            .any(|dropped| dropped.starts_with("vae.quant_conv.bias"))
    );
    assert!(
        bind(&ModelSource::from_cmf(Arc::new(file)).unwrap())
            .unwrap()
            .vae
            .post_quant
            .is_some()
    );
}

#[test]
fn the_text_encoder_may_be_a_language_model() {
    let copy = Copy::of_pipeline();
    let path = copy.path().join("text_encoder/model.safetensors");
    let plain = file_values(&path);
    let mut named: std::collections::BTreeMap<_, _> = plain
        .into_iter()
        .map(|(name, tensor)| (format!("model.{name}"), tensor))
        .collect();
    named.insert("lm_head.weight".into(), (vec![512, 64], vec![0.0; 512 * 64]));
    std::fs::write(path, safetensors_f32(&named)).unwrap();
    let (_dir, report, file) = converted(copy.path(), Dtype::F16);
    assert_eq!(
        directory(&file),
        directory(&CmfContainer::open(&container(F16)).unwrap())
    );
    assert!(
        report
            .dropped
            .iter()
            .any(|dropped| dropped.starts_with("te.lm_head.weight"))
    );
}

#[test]
fn directories_that_are_no_such_pipeline_are_refused() {
    type Change = fn(&Copy);
    let remove = |copy: &Copy, file: &str| std::fs::remove_file(copy.path().join(file)).unwrap();
    let refused = |change: &dyn Fn(&Copy), kind: Kind, message: &str| {
        let copy = Copy::of_pipeline();
        change(&copy);
        let out = TempDir::new().unwrap();
        let err = run(copy.path(), &out.path().join("o.cmf"), Dtype::F16).expect_err(message);
        assert_eq!(err.kind, kind, "{err}");
        assert!(err.message.contains(message), "{err}");
        assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 0);
    };
    let set = |file: &'static str, key: &'static str, value: Value| {
        move |copy: &Copy| {
            copy.edit(file, |map| drop(map.insert(key.into(), value.clone())));
        }
    };
    let index = "model_index.json";
    refused(
        &set(index, "_class_name", json!("FluxPipeline")),
        Kind::UnsupportedModel,
        "'FluxPipeline'",
    );
    refused(
        &set(index, "transformer", json!(["diffusers", "FluxTransformer2DModel"])),
        Kind::UnsupportedModel,
        "transformer is 'FluxTransformer2DModel', expected 'Lumina2Transformer2DModel'",
    );
    refused(&set(index, "vae", json!(5)), Kind::UnsupportedModel, "vae is ''");
    refused(
        &set("text_encoder/config.json", "model_type", json!("gemma3_text")),
        Kind::UnsupportedModel,
        "gemma",
    );
    refused(&|copy| remove(copy, "vae/config.json"), Kind::Io, "vae/config.json");
    refused(
        &|copy| remove(copy, "tokenizer/tokenizer.json"),
        Kind::Io,
        "there is no tokenizer.json",
    );
    refused(
        &|copy| remove(copy, "transformer/diffusion_pytorch_model-00002-of-00003.safetensors"),
        Kind::ShardMismatch,
        "00002-of-00003",
    );
    refused(
        &|copy| remove(copy, "text_encoder/model.safetensors"),
        Kind::Io,
        "neither model.safetensors nor model.safetensors.index.json",
    );
    refused(
        &|copy| std::fs::write(copy.path().join("transformer/config.json"), "{").unwrap(),
        Kind::Parse,
        "transformer/config.json",
    );
    let single: Change = |copy| {
        let file = copy.path().join("transformer/diffusion_pytorch_model.safetensors");
        let tensors = [("cap_embedder.0.weight".to_owned(), (vec![64], vec![0.0; 64]))];
        std::fs::write(file, safetensors_f32(&tensors.into())).unwrap();
    };
    refused(&single, Kind::UnsupportedModel, "the names of a single-file checkpoint");
    // Before anything is written, strict conversion names what it would leave out.
    let options = Options {
        strict: true,
        ..Options::new(Dtype::F16)
    };
    let err = convert(&dir(), Path::new("unwritten.cmf"), &options, &mut |_| {
        ControlFlow::Continue(())
    })
    .unwrap_err();
    assert!(err.message.contains("vae.encoder."), "{err}");
}

#[test]
fn no_file_of_the_directory_is_replaced() {
    let copy = Copy::of_pipeline();
    for file in [
        "model_index.json",
        "vae/config.json",
        "tokenizer/tokenizer_config.json",
        "text_encoder/model.safetensors",
    ] {
        let err = run(copy.path(), &copy.path().join(file), Dtype::F16).unwrap_err();
        assert_eq!(err.kind, Kind::Usage, "{file}: {err}");
    }
}
