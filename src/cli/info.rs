//! `info`: the content of a model file, whether this program can run it, and the memory that it needs. Uses no device.

mod pipeline;
mod print;

use super::args::{QuantArgs, open_as, whole};
use super::context::{Context, Result};
use super::model::{ModelArgs, open_file};
use super::output::short;
use super::{mask, skill};
use cmf_gpu::engine::{AUTO_DRAFTS, sampling_defaults, stop_tokens};
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::format::hadamard::Hadamard;
use cmf_gpu::format::hash64;
use cmf_gpu::gpu::MAX_BINDING;
use cmf_gpu::graph::Measured;
use cmf_gpu::lm::{ExpertOptions, LowerOptions, Plan, lower};
use cmf_gpu::model::{self, FeedForward, HeadInput, Layer, Model};
use cmf_gpu::options::{DEFAULT_CTX, Kv};
use cmf_gpu::source::{ModelSource, Place, SamplingDefaults, TensorInfo, Tensors};
use cmf_gpu::text::Tokenizer;
use cmf_gpu::{Error, Kind};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Tokens of a prefill chunk on a GPU, for which memory is planned.
const CHUNK: u32 = 256;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    quant: QuantArgs,
    /// Lists every tensor
    #[arg(long)]
    tensors: bool,
    /// Length of the context for which memory is planned; 0 = the length the model was trained for [default: that, at most
    /// 4096]
    #[arg(
        short,
        long,
        visible_alias = "ctx-size",
        env = "CMF_GPU_CTX",
        value_parser = whole::<u32>,
        allow_negative_numbers = true,
        hide_env_values = true
    )]
    ctx: Option<u32>,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let path = args.model.path()?;
    let source = match args.quant.quant {
        Some(_) => open_as(&path, args.quant)?,
        None => open_file(&path)?,
    };
    let object = describe(&source, &args)?;
    let lines = print::lines(&object);
    context.answer(object, lines)
}

fn describe(source: &ModelSource, args: &Args) -> Result<Value> {
    let ModelSource { arch, text, cmf, .. } = source;
    let infos = source.tensors.infos();
    let planned = planned(source, args.ctx);
    let model = planned.as_ref().ok().map(|planned| &planned.model);
    let mut layers: BTreeMap<&str, usize> = BTreeMap::new();
    for layer in model.iter().flat_map(|model| &model.layers) {
        *layers.entry(layer.mixer.name()).or_default() += 1;
    }
    let mut bytes_by_dtype: BTreeMap<&str, u64> = BTreeMap::new();
    for info in infos {
        *bytes_by_dtype.entry(info.dtype.name()).or_default() += info.nbytes;
    }
    let shards = source.files.iter().map(|path| path.display().to_string());
    // The tokenizer decides which tokens are special, so the stop tokens are unknown if it is invalid.
    let tokenizer = text.tokenizer_json().map(Tokenizer::from_json).transpose();
    let stops = tokenizer.map(|tokenizer| stop_tokens(&text.eos_token_ids, arch.vocab_size, tokenizer.as_ref()));
    let unused = planned.iter().flat_map(|planned| &planned.unused);
    let unused: Vec<&String> = unused.chain(&source.dropped).collect();
    let elements: u64 = infos.iter().map(|info| info.shape.iter().product::<u64>()).sum();
    let mut arch_value = match cmf {
        Some(container) => container.header_json().get("arch").cloned(),
        None => serde_json::to_value(arch).ok(),
    };
    // Thousands of signs say nothing to a reader; `hadamard` says whether there are any.
    let rotation = arch_value.as_mut().and_then(|arch| arch.get_mut("prism_hadamard"));
    if let Some(rotation) = rotation.and_then(Value::as_object_mut) {
        rotation.remove("signs");
    }
    let mut object = json!({
        "format": source.format,
        "bytes": source.file_bytes()?,
        "arch": arch_value,
        "quant_type": cmf.as_ref().and_then(|container| container.header().quant_type.clone()),
        "params": planned.as_ref().map_or_else(|_| elements, |planned| planned.parameters),
        "runs": planned.is_ok(),
        "reason": planned.as_ref().err().map(ToString::to_string),
        "layers": layers,
        "tensor_count": infos.len(),
        "bytes_by_dtype": bytes_by_dtype,
        "tokenizer": text.tokenizer_json().map(|bytes| json!({"bytes": bytes.len()})),
        "template": template(text.chat_template.as_deref()),
        "eos_token_ids": text.eos_token_ids,
        "stop_token_ids": stops.ok(),
        "bos_token_id": text.bos_token_id,
        "pad_token_id": text.pad_token_id,
        "sampling": sampling(&text.sampling),
        "masks": cmf.as_ref().map_or_else(Vec::new, |container| mask::describe(container)),
        "skills": cmf.as_ref().map_or_else(Vec::new, |container| skill::describe(container)),
        "shards": shards.collect::<Vec<_>>(),
        "index": cmf.as_ref().map_or(Value::Null, |container| index(container)),
        "hadamard": hadamard(source),
        "mtp": arch.mtp,
        "draft_head": model.map(|model| model.mtp.is_some()),
        "moe": arch.moe,
        "experts_per_layer": model.and_then(experts),
        "unused": unused,
        "notes": source.notes,
        "memory": planned.as_ref().ok().map(|planned| memory(&planned.plan)),
        "provenance": source.provenance,
    });
    if let Some(kind) = source.pipeline() {
        pipeline::describe(source, kind, &mut object);
    }
    if args.tensors {
        let tensors = infos.iter().enumerate();
        object["tensors"] = tensors
            .map(|(id, info)| tensor(info, source.tensors.place(id)))
            .collect();
    }
    Ok(object)
}

/// The rotation of the weights; `Null` if there is none.
fn hadamard(source: &ModelSource) -> Value {
    let describe = |rotation: &Hadamard| {
        json!({
            "block": rotation.block(),
            "signs": if rotation.is_identity() { "identity" } else { "explicit" },
            "forward": rotation.forward.len(),
            "inverse": rotation.inverse.len(),
        })
    };
    source.arch.prism_hadamard.as_ref().map_or(Value::Null, describe)
}

/// A model that can run.
struct Planned {
    model: Model,
    plan: Plan,
    /// Number of weights.
    parameters: u64,
    /// Tensors that the network does not use.
    unused: Vec<String>,
}

fn planned(source: &ModelSource, ctx: Option<u32>) -> Result<Planned> {
    if source.cmf.as_ref().is_some_and(|container| container.is_skill_file()) {
        let message = "this file is a skill; it cannot run without its base model";
        return Err(Error::new(Kind::SkillFile, message));
    }
    source.require_language()?;
    let backbone = source.with_skill(None)?;
    let model = model::bind(&source.arch, &backbone)?;
    let unused = model.unused.iter();
    Ok(Planned {
        plan: plan(&model, &backbone, ctx)?,
        parameters: model.parameters(&backbone),
        unused: unused.map(|&id| backbone.infos()[id].name.clone()).collect(),
        model,
    })
}

fn template(source: Option<&str>) -> Value {
    match source {
        Some(source) => json!({
            "source": "file", "bytes": source.len(), "hash": format!("{:016x}", hash64(source.as_bytes())),
        }),
        None => json!({"source": "chatml", "bytes": 0, "hash": null}),
    }
}

fn sampling(defaults: &SamplingDefaults) -> Value {
    let sampling = sampling_defaults(defaults);
    json!({
        "temperature": short(sampling.temperature),
        "top_k": sampling.top_k,
        "top_p": short(sampling.top_p),
        "min_p": short(sampling.min_p),
    })
}

fn plan(model: &Model, tensors: &dyn Tensors, ctx: Option<u32>) -> Result<Plan> {
    let trained = model.max_positions.and_then(|positions| u32::try_from(positions).ok());
    let ctx = match ctx {
        None => trained.map_or(DEFAULT_CTX, |trained| trained.min(DEFAULT_CTX)),
        Some(0) => trained.unwrap_or(DEFAULT_CTX),
        Some(ctx) => ctx,
    };
    let options = LowerOptions {
        ctx,
        // Like `run`, which needs no longer chunk than the context.
        chunk: CHUNK.min(ctx.div_ceil(8).max(1).saturating_mul(8)),
        kv: Kv::F16,
        // The limit of GPUs; WebGPU guarantees less.
        max_binding: MAX_BINDING,
        all_logits: false,
        drafts: 0,
        draft_input: HeadInput::Stream,
        experts: ExpertOptions::default(),
    };
    let planned = |drafts| {
        lower(
            model,
            tensors,
            &LowerOptions { drafts, ..options },
            &Measured::default(),
        )
    };
    match model.mtp {
        // Like `run`, which leaves out a draft head that cannot be used.
        Some(_) => planned(AUTO_DRAFTS).or_else(|_| planned(0)),
        None => planned(0),
    }
}

fn memory(plan: &Plan) -> Value {
    let cost = plan.cost();
    json!({
        "ctx": plan.ctx,
        "kv": plan.graph.kv.name(),
        "weight_bytes": cost.weight_bytes,
        "kv_bytes": cost.kv_bytes,
        "state_bytes": cost.state_bytes,
        "scratch_bytes": cost.other_bytes,
        "total_bytes": cost.weight_bytes + plan.graph.buffer_bytes(),
    })
}

/// Number of experts of each layer; `None` if no layer has any.
fn experts(model: &Model) -> Option<Vec<usize>> {
    let count = |layer: &Layer| match &layer.ffn {
        FeedForward::Moe(moe) => moe.experts.len(),
        FeedForward::Dense(_) => 0,
    };
    let counts: Vec<usize> = model.layers.iter().map(count).collect();
    counts.iter().any(|&count| count != 0).then_some(counts)
}

fn tensor(info: &TensorInfo, place: Option<Place>) -> Value {
    json!({
        "name": info.name,
        "dtype": info.dtype.name(),
        "shape": info.shape,
        "offset": place.map(|place| place.offset),
        "nbytes": info.nbytes,
        "hash": place.and_then(|place| place.hash).map(|hash| format!("{hash:016x}")),
        "shard": place.map(|place| place.file),
    })
}

/// The sparse index: active groups and heads by task and layer.
fn index(container: &CmfContainer) -> Value {
    let Some(entries) = container.index() else {
        return Value::Null;
    };
    let entries = entries.iter().map(|entry| {
        json!({"task_id": entry.task_id, "layer": entry.layer, "groups": entry.groups.len(), "heads": entry.heads.len()})
    });
    let bytes = container.index_section().map_or(0, <[u8]>::len);
    json!({"bytes": bytes, "entries": entries.collect::<Vec<_>>()})
}
