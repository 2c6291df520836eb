//! The description of a model file as text.

use crate::cli::output::size;
use cmf_gpu::error::escape;
use serde_json::Value;

/// Fields of `arch` that are printed if they differ from their usual value.
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

/// Those of them whose usual value is 1.
const FACTORS: [&str; 3] = ["partial_rotary_factor", "embed_multiplier", "logit_multiplier"];

/// The most names of one kind that are printed.
const NAMES: usize = 24;

/// Types of weights that are published in a rotated basis.
const TERNARY: [&str; 2] = ["PQ2_0", "PTQ1_0"];

/// The JSON object of `info` as text.
pub fn lines(object: &Value) -> Vec<String> {
    let sections: &[fn(&Value) -> Vec<String>] = match object.get("pipeline") {
        Some(_) => &[pipeline, weights, tokenizer, names, tensors],
        None => &[network, weights, tokenizer, texts, names, experts, memory, tensors],
    };
    sections.iter().flat_map(|section| section(object)).collect()
}

/// A JSON value in one line: strings without quotes.
fn text(value: &Value) -> String {
    escape(match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    })
}

fn bytes(value: &Value) -> String {
    size(value.as_u64().unwrap_or(0))
}

fn items(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// A number that may differ by layer: "4", or "2 to 6". `all` is the number for all layers, where `each` is no list.
fn by_layer(each: &Value, all: &Value) -> String {
    let counts = || items(each).iter().filter_map(Value::as_u64);
    match counts().min().zip(counts().max()) {
        Some((least, most)) if least != most => format!("{least} to {most}"),
        Some((same, _)) => same.to_string(),
        None => text(all),
    }
}

fn network(object: &Value) -> Vec<String> {
    let arch = &object["arch"];
    let [name, layers, hidden, vocab] =
        ["arch_name", "num_layers", "hidden_size", "vocab_size"].map(|member| text(&arch[member]));
    let heads = by_layer(&arch["attention_heads_per_layer"], &arch["num_attention_heads"]);
    let kv_heads = by_layer(&arch["kv_heads_per_layer"], &arch["num_kv_heads"]);
    let mut lines = vec![
        format!("format       {}, {}", text(&object["format"]), bytes(&object["bytes"])),
        format!(
            "network      {name}: {layers} layers, hidden {hidden}, {heads} heads, {kv_heads} kv heads, vocabulary {vocab}"
        ),
    ];
    let kinds = object["layers"].as_object().into_iter().flatten();
    let kinds: Vec<_> = kinds.map(|(kind, count)| format!("{count} {kind}")).collect();
    if !kinds.is_empty() {
        lines.push(format!("layers       {}", kinds.join(", ")));
    }
    if let Some(loops) = arch["num_loops"].as_u64().filter(|&loops| loops > 1) {
        let norm = match arch["loop_final_norm"] {
            Value::Bool(true) => ", with the final norm between them",
            _ => "",
        };
        lines.push(format!("loops        {loops} over the layers{norm}"));
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
        lines.push(format!("constants    {}", constants.join(", ")));
    }
    lines
}

fn weights(object: &Value) -> Vec<String> {
    let mut lines = vec![
        format!("parameters   {}", text(&object["params"])),
        match &object["reason"] {
            Value::Null => "runs         yes".to_owned(),
            reason => format!("runs         no: {}", text(reason)),
        },
    ];
    let by_dtype = object["bytes_by_dtype"].as_object().into_iter().flatten();
    lines.extend(by_dtype.map(|(dtype, total)| format!("{dtype:<12} {}", bytes(total))));
    // Ternary weights are usually rotated, so that it matters if these are not.
    let is_ternary = TERNARY
        .iter()
        .any(|&dtype| object["bytes_by_dtype"].get(dtype).is_some());
    match &object["hadamard"] {
        Value::Null if !is_ternary => {}
        Value::Null => lines.push("hadamard: none".to_owned()),
        rotation => {
            let [block, signs] = ["block", "signs"].map(|key| text(&rotation[key]));
            lines.push(format!("hadamard: block {block}, {signs} signs"));
        }
    }
    lines
}

/// The components of a pipeline and its schedule.
fn pipeline(object: &Value) -> Vec<String> {
    let pipeline = &object["pipeline"];
    let mut lines = vec![
        format!("format       {}, {}", text(&object["format"]), bytes(&object["bytes"])),
        format!("pipeline     {}", text(&pipeline["kind"])),
    ];
    for component in items(&pipeline["components"]) {
        let dimensions = component["dimensions"].as_object().into_iter().flatten();
        let known = dimensions.filter(|(_, value)| !value.is_null());
        let dimensions: Vec<_> = known.map(|(key, value)| format!("{key} {}", text(value))).collect();
        let (name, size) = (text(&component["name"]), bytes(&component["bytes"]));
        let (params, count) = (text(&component["params"]), text(&component["tensors"]));
        lines.push(format!(
            "{name:<12} {params} parameters, {count} tensors, {size}; {}",
            dimensions.join(", ")
        ));
    }
    let scheduler = &pipeline["scheduler"];
    if !scheduler.is_null() {
        let by_length = if scheduler["dynamic_shift"] == true {
            ", by the length"
        } else {
            ""
        };
        let stated = if scheduler["stated"] == true {
            ""
        } else {
            " (the file states none)"
        };
        lines.push(format!(
            "scheduler    shift {}{by_length}{stated}",
            text(&scheduler["shift"])
        ));
    }
    lines
}

fn tokenizer(object: &Value) -> Vec<String> {
    vec![match &object["tokenizer"] {
        Value::Null => "tokenizer    none".to_owned(),
        tokenizer => format!("tokenizer    {}", bytes(&tokenizer["bytes"])),
    }]
}

fn texts(object: &Value) -> Vec<String> {
    let template = &object["template"];
    vec![
        format!("template     {} {}", text(&template["source"]), text(&template["hash"])),
        format!("eos          {}", text(&object["eos_token_ids"])),
        match &object["stop_token_ids"] {
            Value::Null => "stop tokens  unknown, the tokenizer is invalid".to_owned(),
            ids if items(ids).is_empty() => "stop tokens  none".to_owned(),
            ids => format!("stop tokens  {}", text(ids)),
        },
        format!("sampling     {}", text(&object["sampling"])),
    ]
}

fn names(object: &Value) -> Vec<String> {
    let mut lines = Vec::new();
    for (key, name) in [("masks", "name"), ("skills", "id"), ("shards", ""), ("unused", "")] {
        let all = items(&object[key]).iter();
        let more = all.len().saturating_sub(NAMES);
        let names = all.take(NAMES).map(|item| text(item.get(name).unwrap_or(item)));
        let more = (more > 0).then(|| format!("and {more} more, which --json lists"));
        let names: Vec<_> = names.chain(more).collect();
        if !names.is_empty() {
            lines.push(format!("{key:<12} {}", names.join(", ")));
        }
    }
    let default = items(&object["masks"]).iter().find(|mask| mask["default"] == true);
    if let Some(mask) = default {
        let name = text(&mask["name"]);
        lines.push(format!(
            "task         {name} is active by default; --task none runs the full model"
        ));
    }
    let index = &object["index"];
    if let Some(entries) = index["entries"].as_array() {
        let (size, count) = (bytes(&index["bytes"]), entries.len());
        lines.push(format!("index        {size}, {count} entries"));
    }
    lines
}

fn experts(object: &Value) -> Vec<String> {
    let mut lines = Vec::new();
    for key in ["mtp", "moe"] {
        if !object[key].is_null() {
            lines.push(format!("{key:<12} {}", text(&object[key])));
        }
    }
    let layers = items(&object["experts_per_layer"]);
    let mixtures: Vec<Value> = layers.iter().filter(|&count| *count != 0).cloned().collect();
    if !mixtures.is_empty() {
        let (some, all) = (mixtures.len(), layers.len());
        let counts = by_layer(&Value::Array(mixtures), &Value::Null);
        lines.push(format!("experts      {counts} in {some} of {all} layers"));
    }
    if !object["mtp"].is_null() && object["draft_head"] == false {
        lines.push("draft head   declared, but its tensors are missing; the model runs without it".to_owned());
    }
    lines
}

fn memory(object: &Value) -> Vec<String> {
    let memory = &object["memory"];
    if memory.is_null() {
        return Vec::new();
    }
    let state = match memory["state_bytes"].as_u64() {
        Some(0) | None => String::new(),
        Some(bytes) => format!(" + {} state", size(bytes)),
    };
    vec![format!(
        "memory       {} = {} weights + {} {} cache for {} positions{state} + {} scratch",
        bytes(&memory["total_bytes"]),
        bytes(&memory["weight_bytes"]),
        bytes(&memory["kv_bytes"]),
        text(&memory["kv"]),
        text(&memory["ctx"]),
        bytes(&memory["scratch_bytes"]),
    )]
}

fn tensors(object: &Value) -> Vec<String> {
    let line = |tensor: &Value| {
        let of = |name| text(&tensor[name]);
        let (name, dtype, shape) = (of("name"), of("dtype"), of("shape"));
        let (offset, nbytes, hash) = (of("offset"), of("nbytes"), of("hash"));
        format!("{name} {dtype} {shape} offset {offset} bytes {nbytes} hash {hash}")
    };
    items(&object["tensors"]).iter().map(line).collect()
}
