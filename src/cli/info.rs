//! `info`: what is in a model file, whether this program runs it, and how much memory that takes. Needs no device.

use super::args::whole;
use super::model::{ModelArgs, open};
use super::output::{Output, size};
use super::{Context, Outcome, Result, mask, skill};
use clap::builder::FalseyValueParser;
use cmf_gpu::container::{Container, SkillView, TensorInfo, Tensors, hash64};
use cmf_gpu::engine::{AUTO_DRAFTS, sampling_defaults, stop_tokens};
use cmf_gpu::error::escape;
use cmf_gpu::kernel::Kv;
use cmf_gpu::model::{self, FeedForward, Layer, Model};
use cmf_gpu::options::DEFAULT_CTX;
use cmf_gpu::program::{self, ExpertOptions, Plan, PlanOptions};
use cmf_gpu::text::Tokenizer;
use cmf_gpu::{Error, Kind};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Columns of a prefill chunk that the memory plan reckons with: those of a GPU.
const CHUNK: u32 = 256;

/// Members of `arch` that people are told where they are not what they are in most networks.
const CONSTANTS: [&str; 13] = [
    "partial_rotary_factor",
    "local_partial_rotary_factor",
    "rope_local_base_freq",
    "yarn",
    "qk_norm_after_rope",
    "attn_v_norm",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "sliding_window",
    "sliding_window_pattern",
    "embed_multiplier",
    "final_logit_softcapping",
    "logit_multiplier",
];

/// Those that most networks have as 1.
const FACTORS: [&str; 3] = ["partial_rotary_factor", "embed_multiplier", "logit_multiplier"];

/// Flags of `info`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Lists every tensor
    #[arg(long, env = "CMF_GPU_TENSORS", value_parser = FalseyValueParser::new(), hide_env = true)]
    tensors: bool,
    /// Positions of the context that memory is planned for; 0 = what the model was trained for [default: that, at most 4096]
    #[arg(
        short,
        long,
        visible_alias = "ctx-size",
        env = "CMF_GPU_CTX",
        value_parser = whole::<u32>,
        allow_negative_numbers = true,
        hide_env = true
    )]
    ctx: Option<u32>,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let container = open(&args.model.path(context)?)?;
    let object = describe(&container, &args);
    if context.out.json {
        context.out.json(&Value::Object(object))?;
    } else {
        show(&object, &mut context.out)?;
    }
    Ok(Outcome::Done)
}

fn describe(container: &Container, args: &Args) -> Map<String, Value> {
    let header = container.header();
    let infos = container.infos();
    let bound = match container.is_skill_file() {
        true => Err(Error::new(
            Kind::SkillFile,
            "a skill is applied to a model and never run by itself",
        )),
        false => SkillView::new(container, None)
            .and_then(|backbone| model::bind(&header.arch, &backbone).map(|model| (backbone, model))),
    };
    let planned = bound.and_then(|(backbone, model)| {
        let plan = plan(&model, &backbone, args.ctx)?;
        Ok((backbone, model, plan))
    });
    let mut layers: BTreeMap<&str, usize> = BTreeMap::new();
    let (params, unused, memory, reason) = match &planned {
        Ok((backbone, model, plan)) => {
            model
                .layers
                .iter()
                .for_each(|layer| *layers.entry(layer.mixer.name()).or_default() += 1);
            let unused = model
                .unused
                .iter()
                .map(|&id| backbone.infos()[id].name.as_str())
                .collect();
            (model.parameters(backbone), unused, memory(plan), Value::Null)
        }
        Err(err) => (
            infos.iter().map(elements).sum(),
            Vec::new(),
            Value::Null,
            Value::from(err.to_string()),
        ),
    };
    let mut bytes_by_dtype: BTreeMap<&str, u64> = BTreeMap::new();
    for info in infos {
        *bytes_by_dtype.entry(info.dtype.name()).or_default() += info.nbytes;
    }
    let shards: Vec<String> = container
        .shard_paths()
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    let config = &header.tokenizer_config;
    let sampling = sampling_defaults(&header.provenance);
    // Of a tokenizer that cannot be read nobody knows which of its tokens are special.
    let tokenizer = container.tokenizer_json().map(Tokenizer::from_json).transpose();
    let stops = tokenizer.map(|tokenizer| stop_tokens(header, tokenizer.as_ref()));
    let object = json!({
        "format": "cmf-v2",
        "bytes": container.file_bytes(),
        "arch": container.header_json().get("arch"),
        "quant_type": header.quant_type,
        "params": params,
        "runs": planned.is_ok(),
        "reason": reason,
        "layers": layers,
        "tensor_count": infos.len(),
        "bytes_by_dtype": bytes_by_dtype,
        "tokenizer": container.tokenizer_json().map(|bytes| json!({"bytes": bytes.len()})),
        "template": match &config.chat_template {
            Some(source) => json!({
                "source": "file", "bytes": source.len(), "hash": format!("{:016x}", hash64(source.as_bytes())),
            }),
            None => json!({"source": "chatml", "bytes": 0, "hash": null}),
        },
        "eos_token_ids": config.eos_token_ids,
        "stop_token_ids": stops.ok(),
        "bos_token_id": config.bos_token_id,
        "pad_token_id": config.pad_token_id,
        "sampling": {
            "temperature": short(sampling.temperature),
            "top_k": sampling.top_k,
            "top_p": short(sampling.top_p),
            "min_p": short(sampling.min_p),
        },
        "masks": mask::describe(container),
        "skills": skill::describe(container),
        "shards": shards,
        "index": index(container),
        "mtp": header.arch.mtp,
        "draft_head": planned.as_ref().ok().map(|(_, model, _)| model.mtp.is_some()),
        "moe": header.arch.moe,
        "experts_per_layer": planned.as_ref().ok().and_then(|(_, model, _)| experts(model)),
        "unused": unused,
        "memory": memory,
        "provenance": header.provenance,
    });
    let Value::Object(mut object) = object else {
        return Map::new();
    };
    if args.tensors {
        object.insert("tensors".into(), infos.iter().map(tensor).collect());
    }
    object
}

fn plan(model: &Model, tensors: &dyn Tensors, ctx: Option<u32>) -> Result<Plan> {
    let trained = model.max_positions.and_then(|positions| u32::try_from(positions).ok());
    let ctx = match ctx {
        None => trained.map_or(DEFAULT_CTX, |trained| trained.min(DEFAULT_CTX)),
        Some(0) => trained.unwrap_or(DEFAULT_CTX),
        Some(ctx) => ctx,
    };
    let with = |drafts: u32| {
        let options = PlanOptions {
            ctx,
            chunk: CHUNK,
            kv: Kv::F16,
            // The least that every WebGPU device offers would be less; hardware offers this.
            max_binding: (1 << 31) - 4,
            all_logits: false,
            drafts,
            experts: ExpertOptions::default(),
        };
        program::plan(model, tensors, &options)
    };
    // As `run` does: a draft head that cannot be used is left out.
    match model.mtp {
        Some(_) => with(AUTO_DRAFTS).or_else(|_| with(0)),
        None => with(0),
    }
}

fn memory(plan: &Plan) -> Value {
    let of = |ends: &[&str]| -> u64 {
        let some = plan.buffers.iter();
        let some = some.filter(|buffer| ends.iter().any(|end| buffer.label.ends_with(end)));
        some.map(|buffer| buffer.bytes).sum()
    };
    let (kv, state) = (of(&["_cache"]), of(&["gdn.state", "gdn.ring"]));
    let (weights, buffers) = (plan.weight_bytes(), plan.buffer_bytes());
    json!({
        "ctx": plan.ctx,
        "kv": plan.kv.name(),
        "weight_bytes": weights,
        "kv_bytes": kv,
        "state_bytes": state,
        "scratch_bytes": buffers - kv - state,
        "total_bytes": weights + buffers,
    })
}

/// Experts of each layer, where any has some.
fn experts(model: &Model) -> Option<Vec<usize>> {
    let count = |layer: &Layer| match &layer.ffn {
        FeedForward::Moe(moe) => moe.experts.len(),
        FeedForward::Dense(_) => 0,
    };
    let counts: Vec<usize> = model.layers.iter().map(count).collect();
    counts.iter().any(|&count| count != 0).then_some(counts)
}

/// A number as it was written: 0.7, not the f64 nearest to the f32 nearest to it.
fn short(value: f32) -> Option<f64> {
    value.to_string().parse().ok()
}

fn elements(info: &TensorInfo) -> u64 {
    info.shape.iter().product()
}

fn tensor(info: &TensorInfo) -> Value {
    json!({
        "name": info.name,
        "dtype": info.dtype.name(),
        "shape": info.shape,
        "offset": info.offset,
        "nbytes": info.nbytes,
        "hash": format!("{:016x}", info.hash),
        "shard": info.shard,
    })
}

/// The sparse index: how much of which layer it says is active.
fn index(container: &Container) -> Value {
    let Some(entries) = container.index() else {
        return Value::Null;
    };
    let entries: Vec<Value> = entries
        .iter()
        .map(|entry| {
            json!({
                "task_id": entry.task_id, "layer": entry.layer, "groups": entry.groups.len(), "heads": entry.heads.len()
            })
        })
        .collect();
    json!({"bytes": container.index_section().map_or(0, <[u8]>::len), "entries": entries})
}

/// A count that the header gives for all layers, unless it does for each: "4", or "2 to 6".
fn by_layer(each: &Value, all: &Value) -> String {
    let counts = || each.as_array().into_iter().flatten().filter_map(Value::as_u64);
    match counts().min().zip(counts().max()) {
        Some((least, most)) if least != most => format!("{least} to {most}"),
        Some((same, _)) => same.to_string(),
        None => escape(all.to_string()),
    }
}

/// The same for people.
fn show(object: &Map<String, Value>, out: &mut Output) -> Result<()> {
    let value = |key: &str| object.get(key).unwrap_or(&Value::Null);
    let text = |value: &Value| match value {
        Value::String(text) => escape(text.clone()),
        other => escape(other.to_string()),
    };
    let bytes = |value: &Value| size(value.as_u64().unwrap_or(0));
    let names = |key: &str, name: &str| {
        let list = value(key).as_array().map(Vec::as_slice).unwrap_or_default();
        let names: Vec<_> = list.iter().map(|item| text(item.get(name).unwrap_or(item))).collect();
        names.join(", ")
    };
    let arch = value("arch");
    out.line(format!(
        "format       {}, {}",
        text(value("format")),
        bytes(value("bytes"))
    ))?;
    out.line(format!(
        "network      {}: {} layers, hidden {}, {} heads, {} kv heads, vocabulary {}",
        text(&arch["arch_name"]),
        text(&arch["num_layers"]),
        text(&arch["hidden_size"]),
        by_layer(&arch["attention_heads_per_layer"], &arch["num_attention_heads"]),
        by_layer(&arch["kv_heads_per_layer"], &arch["num_kv_heads"]),
        text(&arch["vocab_size"]),
    ))?;
    let kinds = value("layers").as_object().into_iter().flatten();
    let kinds: Vec<_> = kinds.map(|(kind, count)| format!("{count} {kind}")).collect();
    if !kinds.is_empty() {
        out.line(format!("layers       {}", kinds.join(", ")))?;
    }
    if let Some(passes) = arch["num_loops"].as_u64().filter(|&passes| passes > 1) {
        let between = match arch["loop_final_norm"] {
            Value::Bool(true) => ", the final norm between them",
            _ => "",
        };
        out.line(format!("passes       {passes} over the layers{between}"))?;
    }
    let constants = CONSTANTS.iter().map(|&key| (key, &arch[key]));
    let constants: Vec<_> = constants
        .filter(|(key, value)| match value {
            Value::Null | Value::Bool(false) => false,
            value => value.as_f64() != Some(1.0) || !FACTORS.contains(key),
        })
        .map(|(key, value)| format!("{key} {}", text(value)))
        .collect();
    if !constants.is_empty() {
        out.line(format!("constants    {}", constants.join(", ")))?;
    }
    out.line(format!("parameters   {}", text(value("params"))))?;
    match value("reason") {
        Value::Null => out.line("runs         yes")?,
        reason => out.line(format!("runs         no: {}", text(reason)))?,
    }
    for (dtype, total) in value("bytes_by_dtype").as_object().into_iter().flatten() {
        out.line(format!("{dtype:<12} {}", bytes(total)))?;
    }
    let (tokenizer, template) = (value("tokenizer"), value("template"));
    match tokenizer {
        Value::Null => out.line("tokenizer    none")?,
        some => out.line(format!("tokenizer    {}", bytes(&some["bytes"])))?,
    }
    out.line(format!(
        "template     {} {}",
        text(&template["source"]),
        text(&template["hash"])
    ))?;
    out.line(format!("eos          {}", text(value("eos_token_ids"))))?;
    out.line(match value("stop_token_ids") {
        Value::Null => "stop tokens  not known: the tokenizer cannot be read".to_owned(),
        ids if ids.as_array().is_some_and(Vec::is_empty) => "stop tokens  none".to_owned(),
        ids => format!("stop tokens  {}", text(ids)),
    })?;
    out.line(format!("sampling     {}", text(value("sampling"))))?;
    for (title, key, name) in [
        ("masks", "masks", "name"),
        ("skills", "skills", "id"),
        ("shards", "shards", ""),
        ("unused", "unused", ""),
    ] {
        let names = names(key, name);
        if !names.is_empty() {
            out.line(format!("{title:<12} {names}"))?;
        }
    }
    let default = value("masks").as_array().and_then(|masks| {
        let mask = masks.iter().find(|mask| mask["default"] == true)?;
        mask["name"].as_str()
    });
    if let Some(name) = default {
        out.line(format!(
            "task         {} is active by default; --task none runs the full model",
            escape(name.to_owned())
        ))?;
    }
    if let Some(entries) = value("index")["entries"].as_array() {
        let size = bytes(&value("index")["bytes"]);
        out.line(format!("index        {size}, {} entries", entries.len()))?;
    }
    for key in ["mtp", "moe"] {
        if !value(key).is_null() {
            out.line(format!("{key:<12} {}", text(value(key))))?;
        }
    }
    let experts = value("experts_per_layer")
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    let some: Vec<Value> = experts.iter().filter(|&count| *count != 0).cloned().collect();
    if !some.is_empty() {
        let layers = (some.len(), experts.len());
        let counts = by_layer(&Value::Array(some), &Value::Null);
        out.line(format!("experts      {counts} in {} of {} layers", layers.0, layers.1))?;
    }
    if !value("mtp").is_null() && value("draft_head") == false {
        out.line("draft head   declared, its tensors are missing: the model runs without")?;
    }
    let memory = value("memory");
    if !memory.is_null() {
        out.line(format!(
            "memory       {} = {} weights + {} {} cache for {} positions{} + {} scratch",
            bytes(&memory["total_bytes"]),
            bytes(&memory["weight_bytes"]),
            bytes(&memory["kv_bytes"]),
            text(&memory["kv"]),
            text(&memory["ctx"]),
            match memory["state_bytes"].as_u64() {
                Some(0) | None => String::new(),
                Some(_) => format!(" + {} state", bytes(&memory["state_bytes"])),
            },
            bytes(&memory["scratch_bytes"]),
        ))?;
    }
    for tensor in value("tensors").as_array().into_iter().flatten() {
        out.line(format!(
            "{} {} {} offset {} bytes {} hash {}",
            text(&tensor["name"]),
            text(&tensor["dtype"]),
            text(&tensor["shape"]),
            text(&tensor["offset"]),
            text(&tensor["nbytes"]),
            text(&tensor["hash"]),
        ))?;
    }
    Ok(())
}
