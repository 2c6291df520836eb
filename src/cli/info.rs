//! `info`: the content of a model file, whether this program can run it, and the memory that it needs. Uses no device.

mod print;

use super::args::whole;
use super::context::{Context, Result};
use super::model::{ModelArgs, open_cmf};
use super::{mask, skill};
use cmf_gpu::engine::{AUTO_DRAFTS, sampling_defaults, stop_tokens};
use cmf_gpu::format::cmf::{CmfContainer, Payload};
use cmf_gpu::format::hash64;
use cmf_gpu::gpu::MAX_BINDING;
use cmf_gpu::graph::Measured;
use cmf_gpu::lm::{ExpertOptions, LowerOptions, Plan, lower};
use cmf_gpu::model::{self, FeedForward, HeadInput, Layer, Model};
use cmf_gpu::options::{DEFAULT_CTX, Kv};
use cmf_gpu::source::{SamplingDefaults, SkillView, TensorInfo, Tensors};
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
    let container = open_cmf(&args.model.path()?)?;
    let object = describe(&container, &args);
    let lines = print::lines(&object);
    context.answer(object, lines)
}

fn describe(container: &CmfContainer, args: &Args) -> Value {
    let header = container.header();
    let infos = container.infos();
    let planned = planned(container, args.ctx);
    let model = planned.as_ref().ok().map(|planned| &planned.model);
    let mut layers: BTreeMap<&str, usize> = BTreeMap::new();
    for layer in model.iter().flat_map(|model| &model.layers) {
        *layers.entry(layer.mixer.name()).or_default() += 1;
    }
    let mut bytes_by_dtype: BTreeMap<&str, u64> = BTreeMap::new();
    for info in infos {
        *bytes_by_dtype.entry(info.dtype.name()).or_default() += info.nbytes;
    }
    let shards = container.shard_paths().iter().map(|path| path.display().to_string());
    let config = &header.tokenizer_config;
    // The tokenizer decides which tokens are special, so the stop tokens are unknown if it is invalid.
    let tokenizer = container.tokenizer_json().map(Tokenizer::from_json).transpose();
    let (eos, vocab) = (&config.eos_token_ids, header.arch.vocab_size);
    let stops = tokenizer.map(|tokenizer| stop_tokens(eos, vocab, tokenizer.as_ref()));
    let elements: u64 = infos.iter().map(|info| info.shape.iter().product::<u64>()).sum();
    let mut object = json!({
        "format": "cmf-v2",
        "bytes": container.file_bytes(),
        "arch": container.header_json().get("arch"),
        "quant_type": header.quant_type,
        "params": planned.as_ref().map_or_else(|_| elements, |planned| planned.parameters),
        "runs": planned.is_ok(),
        "reason": planned.as_ref().err().map(ToString::to_string),
        "layers": layers,
        "tensor_count": infos.len(),
        "bytes_by_dtype": bytes_by_dtype,
        "tokenizer": container.tokenizer_json().map(|bytes| json!({"bytes": bytes.len()})),
        "template": template(config.chat_template.as_deref()),
        "eos_token_ids": config.eos_token_ids,
        "stop_token_ids": stops.ok(),
        "bos_token_id": config.bos_token_id,
        "pad_token_id": config.pad_token_id,
        "sampling": sampling(&header.provenance),
        "masks": mask::describe(container),
        "skills": skill::describe(container),
        "shards": shards.collect::<Vec<_>>(),
        "index": index(container),
        "mtp": header.arch.mtp,
        "draft_head": model.map(|model| model.mtp.is_some()),
        "moe": header.arch.moe,
        "experts_per_layer": model.and_then(experts),
        "unused": planned.as_ref().map_or(&[][..], |planned| &planned.unused),
        "memory": planned.as_ref().ok().map(|planned| memory(&planned.plan)),
        "provenance": header.provenance,
    });
    if args.tensors {
        object["tensors"] = infos.iter().zip(container.payloads()).map(tensor).collect();
    }
    object
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

fn planned(container: &CmfContainer, ctx: Option<u32>) -> Result<Planned> {
    if container.is_skill_file() {
        let message = "this file is a skill; it cannot run without its base model";
        return Err(Error::new(Kind::SkillFile, message));
    }
    let backbone = SkillView::new(container, container.skills(), None)?;
    let model = model::bind(&container.header().arch, &backbone)?;
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

fn sampling(provenance: &Value) -> Value {
    let sampling = sampling_defaults(&SamplingDefaults::of(provenance));
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
        chunk: CHUNK,
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

/// An f32 as the shortest decimal number: 0.7, not 0.699999988.
fn short(value: f32) -> Option<f64> {
    value.to_string().parse().ok()
}

fn tensor((info, payload): (&TensorInfo, &Payload)) -> Value {
    json!({
        "name": info.name,
        "dtype": info.dtype.name(),
        "shape": info.shape,
        "offset": payload.offset,
        "nbytes": info.nbytes,
        "hash": format!("{:016x}", payload.hash),
        "shard": payload.shard,
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
