//! The description of a pipeline: its components, their dimensions, and whether it can make a picture.

use crate::cli::output::short;
use cmf_gpu::Result;
use cmf_gpu::dtype::Dtype;
use cmf_gpu::image::{self, Config};
use cmf_gpu::source::{ModelSource, TensorInfo};
use serde_json::{Map, Value, json};

/// Replaces and adds what is different for a pipeline in the description of a model.
pub fn describe(source: &ModelSource, kind: &str, object: &mut Value) {
    let infos = source.tensors.infos();
    let bound = bound(source);
    let unused = bound.iter().flat_map(|(_, network)| &network.unused);
    let unused = unused.map(|&id| &infos[id].name).chain(&source.dropped);
    object["unused"] = json!(unused.collect::<Vec<_>>());
    object["runs"] = bound.is_ok().into();
    object["reason"] = json!(bound.as_ref().err().map(ToString::to_string));
    object["params"] = infos.iter().map(weights).sum::<u64>().into();
    let config = bound.as_ref().ok().map(|(config, _)| config);
    object["pipeline"] = json!({
        "kind": kind,
        "components": components(infos, config),
        "scheduler": config.map(|config| {
            let (scheduler, stated) = (&config.scheduler, source.tensors.find("scheduler.config_json"));
            json!({
                "stated": stated.is_some(),
                "shift": scheduler.shift,
                "dynamic_shift": scheduler.dynamic.is_some(),
            })
        }),
    });
}

/// The configuration and the network. Errors: those that keep the pipeline from making a picture.
fn bound(source: &ModelSource) -> Result<(Config, image::Network)> {
    source.require_image()?;
    let config = Config::of(&*source.tensors)?;
    let network = image::bind(&config, &*source.tensors)?;
    Ok((config, network))
}

/// The number of weights of a tensor.
fn weights(info: &TensorInfo) -> u64 {
    match info.dtype {
        Dtype::U8 => 0,
        _ => info.shape.iter().product(),
    }
}

/// The components in the order of the file: the first part of the names of tensors, counts, and dimensions.
fn components(infos: &[TensorInfo], config: Option<&Config>) -> Vec<Value> {
    let mut found: Vec<(&str, Vec<&TensorInfo>)> = Vec::new();
    for info in infos {
        let name = info.name.split('.').next().unwrap_or_default();
        match found.iter_mut().find(|(other, _)| *other == name) {
            Some((_, tensors)) => tensors.push(info),
            None => found.push((name, vec![info])),
        }
    }
    // A schedule has no weights and is described apart.
    found.retain(|(_, tensors)| tensors.iter().any(|info| info.dtype != Dtype::U8));
    let describe = |(name, tensors): &(&str, Vec<&TensorInfo>)| {
        let mut dtypes = Map::new();
        for info in tensors.iter().filter(|info| info.dtype != Dtype::U8) {
            let bytes = dtypes.entry(info.dtype.name()).or_insert(0.into());
            *bytes = (bytes.as_u64().unwrap_or(0) + info.nbytes).into();
        }
        json!({
            "name": name,
            "params": tensors.iter().map(|info| weights(info)).sum::<u64>(),
            "bytes": tensors.iter().map(|info| info.nbytes).sum::<u64>(),
            "bytes_by_dtype": dtypes,
            "tensors": tensors.len(),
            "dimensions": config.map(|config| dimensions(config, name)),
        })
    };
    found.iter().map(describe).collect()
}

/// The main dimensions of a component.
fn dimensions(config: &Config, name: &str) -> Value {
    let Config { text, dit, vae, .. } = config;
    match name {
        "te" => json!({
            "hidden": text.hidden_size, "layers": text.num_layers, "heads": text.num_attention_heads,
            "kv_heads": text.num_kv_heads, "head_dim": text.head_dim, "vocabulary": text.vocab_size,
            "window": text.sliding_window,
        }),
        "dit" => json!({
            "hidden": dit.hidden, "layers": dit.layers, "refiners": dit.refiners, "heads": dit.heads,
            "kv_heads": dit.kv_heads, "head_dim": dit.head(), "channels": dit.channels, "patch": dit.patch,
            "axes": dit.axes_dim, "positions": dit.axes_lens, "size": dit.sample_size * 8,
        }),
        "vae" => json!({
            "channels": vae.channels, "latent": vae.latent, "layers_per_block": vae.layers_per_block,
            "groups": vae.groups, "scaling": short(vae.scaling), "shift": short(vae.shift), "attention": vae.mid_attention,
        }),
        _ => Value::Null,
    }
}
