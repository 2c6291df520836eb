//! Sources for the tests: the golden models, edited copies of them, and GGUF files written here.

use cmf_gpu::Result;
use cmf_gpu::convert::{Options, Report, convert};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::cmf::CmfContainer;
use safetensors::SafeTensors;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

pub const MODELS: [&str; 13] = [
    "llama_tied",
    "llama_untied",
    "llama3_rope",
    "llama_bias",
    "qwen2",
    "qwen3",
    "qwen3_yarn",
    "qwen3_mtp",
    "mistral_swa",
    "gemma2",
    "gemma3",
    "phi3",
    "phi3_longrope",
];

/// A golden model's directory.
pub fn fixture(model: &str) -> PathBuf {
    crate::golden::dir(model)
}

pub fn run(src: &Path, out: &Path, quant: Dtype) -> Result<Report> {
    convert(src, out, &Options::new(quant), &mut |_| ControlFlow::Continue(()))
}

/// Converts and opens; the directory keeps the file alive.
pub fn converted(src: &Path, quant: Dtype) -> (TempDir, Report, CmfContainer) {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out.cmf");
    let report = run(src, &out, quant).unwrap();
    assert_eq!(report.bytes, out.metadata().unwrap().len());
    let container = CmfContainer::open(&out).unwrap();
    assert!(container.verify(&mut |_, _| {}).failures.is_empty());
    (dir, report, container)
}

/// Shape and values of every tensor of a container.
pub fn values(container: &CmfContainer) -> BTreeMap<String, (Vec<u64>, Vec<f32>)> {
    let decode = |(id, info): (usize, &cmf_gpu::source::TensorInfo)| {
        let (rows, cols) = info.rows_cols();
        let decoder = info.dtype.decoder(container.bytes(id).unwrap(), rows, cols).unwrap();
        let mut out = vec![0.0; rows * cols];
        out.chunks_mut(cols)
            .enumerate()
            .for_each(|(row, out)| decoder.row(row, out));
        (info.name.clone(), (info.shape.clone(), out))
    };
    container.infos().iter().enumerate().map(decode).collect()
}

/// Shape and values of every tensor of a golden model, read without the importer.
pub fn source_values(model: &str) -> BTreeMap<String, (Vec<u64>, Vec<f32>)> {
    file_values(&fixture(model).join("model.safetensors"))
}

/// Shape and values of every tensor of a safetensors file, read without the importer.
pub fn file_values(path: &Path) -> BTreeMap<String, (Vec<u64>, Vec<f32>)> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let decode = |(name, view): (&str, safetensors::tensor::TensorView)| {
        let pair = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
        let values: Vec<f32> = match view.dtype() {
            safetensors::Dtype::F32 => view
                .data()
                .chunks(4)
                .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
                .collect(),
            safetensors::Dtype::F16 => view
                .data()
                .chunks(2)
                .map(|b| half::f16::from_bits(pair(b)).to_f32())
                .collect(),
            safetensors::Dtype::BF16 => view
                .data()
                .chunks(2)
                .map(|b| f32::from_bits(u32::from(pair(b)) << 16))
                .collect(),
            other => panic!("{other:?} in a golden model"),
        };
        (
            name.to_owned(),
            (view.shape().iter().map(|&dim| dim as u64).collect(), values),
        )
    };
    file.iter().map(decode).collect()
}

pub fn json(path: &Path) -> Map<String, Value> {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// A copy of a golden model that a test may change.
pub struct Copy(pub TempDir);

impl Copy {
    pub fn of(model: &str) -> Copy {
        let dir = TempDir::new().unwrap();
        for file in [
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ] {
            std::fs::copy(fixture(model).join(file), dir.path().join(file)).unwrap();
        }
        Copy(dir)
    }

    /// A copy of the golden pipeline.
    pub fn of_pipeline() -> Copy {
        let dir = TempDir::new().unwrap();
        let from = crate::golden::pipeline::dir();
        for entry in std::fs::read_dir(&from).unwrap().map(|entry| entry.unwrap().path()) {
            let to = dir.path().join(entry.file_name().unwrap());
            if entry.is_file() {
                std::fs::copy(entry, to).unwrap();
                continue;
            }
            std::fs::create_dir(&to).unwrap();
            for file in std::fs::read_dir(entry).unwrap().map(|file| file.unwrap().path()) {
                std::fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
            }
        }
        Copy(dir)
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn edit(&self, file: &str, change: impl FnOnce(&mut Map<String, Value>)) -> &Copy {
        let path = self.path().join(file);
        let mut map = json(&path);
        change(&mut map);
        std::fs::write(path, serde_json::to_vec(&map).unwrap()).unwrap();
        self
    }

    /// Replaces the weights.
    pub fn tensors(&self, tensors: &BTreeMap<String, (Vec<u64>, Vec<f32>)>) -> &Copy {
        std::fs::write(self.path().join("model.safetensors"), safetensors_f32(tensors)).unwrap();
        self
    }
}

/// A safetensors file of f32 tensors.
pub fn safetensors_f32(tensors: &BTreeMap<String, (Vec<u64>, Vec<f32>)>) -> Vec<u8> {
    let mut header = Map::new();
    let mut data = Vec::new();
    for (name, (shape, values)) in tensors {
        let start = data.len();
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        let entry = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]});
        header.insert(name.clone(), entry);
    }
    with_header(&Value::Object(header).to_string(), &data)
}

/// A safetensors file with this header, which may be invalid.
pub fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

/// A metadata value of a GGUF file.
#[derive(Clone)]
pub enum Meta {
    U32(u32),
    F32(f32),
    Bool(bool),
    Str(String),
    Strs(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    /// Any value type and bytes.
    Raw(u32, Vec<u8>),
}

/// A tensor of a GGUF file: dimensions as the file has them, innermost first.
#[derive(Clone)]
pub struct Block {
    pub name: String,
    pub dims: Vec<u64>,
    pub kind: u32,
    pub data: Vec<u8>,
    /// The offset in the record, if it is not the correct one.
    pub offset: Option<u64>,
}

/// A GGUF file to be written.
#[derive(Clone)]
pub struct Gguf {
    pub version: u32,
    pub metadata: Vec<(String, Meta)>,
    pub tensors: Vec<Block>,
    pub alignment: u64,
}

impl Gguf {
    pub fn new() -> Gguf {
        Gguf {
            version: 3,
            metadata: Vec::new(),
            tensors: Vec::new(),
            alignment: 32,
        }
    }

    /// The hyperparameters of an architecture, without tensors.
    pub fn network(architecture: &str, numbers: &[(&str, u32)], eps: f32) -> Gguf {
        let mut file = Gguf::new();
        file.set("general.architecture", Meta::Str(architecture.into()));
        for (key, value) in numbers {
            file.set(format!("{architecture}.{key}"), Meta::U32(*value));
        }
        file.set(
            format!("{architecture}.attention.layer_norm_rms_epsilon"),
            Meta::F32(eps),
        );
        file
    }

    pub fn set(&mut self, key: impl Into<String>, value: Meta) {
        let key = key.into();
        self.metadata.retain(|(present, _)| *present != key);
        self.metadata.push((key, value));
    }

    pub fn f32(&mut self, name: impl Into<String>, shape: &[u64], values: &[f32]) {
        let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let dims = shape.iter().rev().copied().collect();
        self.tensors.push(Block {
            name: name.into(),
            dims,
            kind: 0,
            data,
            offset: None,
        });
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            string(&mut out, key);
            value.write(&mut out);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            string(&mut out, &tensor.name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            out.extend(tensor.dims.iter().flat_map(|dim| dim.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            pad(&mut data, self.alignment);
            out.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&tensor.data);
        }
        pad(&mut out, self.alignment);
        out.extend(data);
        out
    }
}

impl Meta {
    fn write(&self, out: &mut Vec<u8>) {
        let mut tagged = |kind: u32, bytes: &[u8]| {
            out.extend(kind.to_le_bytes());
            out.extend(bytes);
        };
        match self {
            Meta::U32(value) => tagged(4, &value.to_le_bytes()),
            Meta::F32(value) => tagged(6, &value.to_le_bytes()),
            Meta::Bool(value) => tagged(7, &[u8::from(*value)]),
            Meta::Raw(kind, bytes) => tagged(*kind, bytes),
            Meta::Str(text) => {
                tagged(8, &[]);
                string(out, text);
            }
            Meta::Strs(texts) => {
                array(out, 8, texts.len());
                texts.iter().for_each(|text| string(out, text));
            }
            Meta::I32s(values) => {
                array(out, 5, values.len());
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
            Meta::F32s(values) => {
                array(out, 6, values.len());
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
        }
    }
}

fn array(out: &mut Vec<u8>, of: u32, len: usize) {
    out.extend(9u32.to_le_bytes());
    out.extend(of.to_le_bytes());
    out.extend((len as u64).to_le_bytes());
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn pad(out: &mut Vec<u8>, alignment: u64) {
    out.resize(out.len().next_multiple_of(alignment as usize), 0);
}

/// A golden model as other converters write it, with their names and keys, interleaved q and k, and 1+w for norms.
pub fn gguf_of(model: &str) -> Gguf {
    let config = json(&fixture(model).join("config.json"));
    let arch = match config["model_type"].as_str().unwrap() {
        "mistral" => "llama",
        "gemma3_text" => "gemma3",
        "qwen2_moe" => "qwen2moe",
        "qwen3_moe" => "qwen3moe",
        other => other,
    };
    let number = |key: &str| config[key].as_u64().unwrap();
    let (hidden, heads) = (number("hidden_size"), number("num_attention_heads"));
    let head_dim = config.get("head_dim").and_then(Value::as_u64).unwrap_or(hidden / heads);
    let mut file = Gguf::new();
    let key = |name: &str| format!("{arch}.{name}");
    file.set("general.architecture", Meta::Str(arch.to_owned()));
    for (name, value) in [
        ("block_count", Some(number("num_hidden_layers"))),
        ("context_length", Some(number("max_position_embeddings"))),
        ("embedding_length", Some(hidden)),
        ("feed_forward_length", Some(number("intermediate_size"))),
        ("attention.head_count", Some(heads)),
        ("attention.head_count_kv", Some(number("num_key_value_heads"))),
        ("attention.key_length", Some(head_dim)),
        ("attention.value_length", Some(head_dim)),
        ("rope.dimension_count", Some(head_dim)),
        ("vocab_size", Some(number("vocab_size"))),
        (
            "attention.sliding_window",
            config
                .get("sliding_window")
                .filter(|_| !arch.starts_with("qwen"))
                .and_then(Value::as_u64),
        ),
        (
            "attention.sliding_window_pattern",
            config.get("sliding_window_pattern").and_then(Value::as_u64),
        ),
    ] {
        if let Some(value) = value {
            file.set(key(name), Meta::U32(value as u32));
        }
    }
    for (name, from) in [
        ("rope.freq_base", "rope_theta"),
        ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
    ] {
        if let Some(value) = config.get(from).and_then(Value::as_f64) {
            file.set(key(name), Meta::F32(value as f32));
        }
    }
    let scaling = &config.get("rope_scaling").cloned().unwrap_or_default();
    match scaling.get("rope_type").or(scaling.get("type")).and_then(Value::as_str) {
        Some(kind @ ("linear" | "yarn")) => {
            file.set(key("rope.scaling.type"), Meta::Str(kind.into()));
            file.set(
                key("rope.scaling.factor"),
                Meta::F32(scaling["factor"].as_f64().unwrap() as f32),
            );
            if let Some(original) = scaling.get("original_max_position_embeddings").and_then(Value::as_u64) {
                file.set(key("rope.scaling.original_context_length"), Meta::U32(original as u32));
            }
        }
        Some("longrope") => {
            let original = number("original_max_position_embeddings");
            file.set(key("rope.scaling.original_context_length"), Meta::U32(original as u32));
            for (name, from) in [
                ("rope_factors_short", "short_factor"),
                ("rope_factors_long", "long_factor"),
            ] {
                let factors = scaling[from].as_array().unwrap();
                let factors: Vec<f32> = factors.iter().map(|factor| factor.as_f64().unwrap() as f32).collect();
                file.f32(format!("{name}.weight"), &[factors.len() as u64], &factors);
            }
        }
        _ => {}
    }
    let tensors = source_values(model).into_iter();
    for (name, (shape, mut values)) in tensors.filter(|(name, _)| !name.starts_with("model.mtp.")) {
        let rows = shape[0] as usize;
        let cols = values.len() / rows;
        if arch == "llama" && (name.contains("q_proj") || name.contains("k_proj")) {
            values = interleave(&values, cols, head_dim as usize);
        }
        if arch.starts_with("gemma") && name.ends_with("norm.weight") {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        file.f32(gguf_name(arch, &name), &shape, &values);
    }
    file
}

/// Rows h·d + s·d/2 + j move to h·d + 2j + s.
fn interleave(values: &[f32], cols: usize, head_dim: usize) -> Vec<f32> {
    let rows: Vec<&[f32]> = values.chunks(cols).collect();
    let heads = rows.len() / head_dim;
    let mut out = Vec::new();
    for head in 0..heads {
        for j in 0..head_dim / 2 {
            for half in 0..2 {
                out.extend(rows[head * head_dim + half * (head_dim / 2) + j]);
            }
        }
    }
    out
}

/// A GGUF file converted, like [`converted`].
pub fn convert_gguf(file: &Gguf, quant: Dtype) -> Result<(TempDir, Report, CmfContainer)> {
    let dir = TempDir::new().unwrap();
    let (path, out) = (dir.path().join("model.gguf"), dir.path().join("out.cmf"));
    std::fs::write(&path, file.bytes()).unwrap();
    let report = run(&path, &out, quant)?;
    let container = CmfContainer::open(&out)?;
    Ok((dir, report, container))
}

fn gguf_name(arch: &str, name: &str) -> String {
    let mut name = name.replace("model.layers.", "blk.");
    let after_attention = match arch.starts_with("gemma") {
        true => "post_attention_norm.",
        false => "ffn_norm.",
    };
    for (from, to) in [
        ("model.embed_tokens.", "token_embd."),
        ("model.norm.", "output_norm."),
        ("lm_head.", "output."),
        ("input_layernorm.", "attn_norm."),
        ("post_attention_layernorm.", after_attention),
        ("pre_feedforward_layernorm.", "ffn_norm."),
        ("post_feedforward_layernorm.", "post_ffw_norm."),
        ("self_attn.qkv_proj.", "attn_qkv."),
        ("self_attn.q_proj.", "attn_q."),
        ("self_attn.k_proj.", "attn_k."),
        ("self_attn.v_proj.", "attn_v."),
        ("self_attn.o_proj.", "attn_output."),
        ("self_attn.q_norm.", "attn_q_norm."),
        ("self_attn.k_norm.", "attn_k_norm."),
        ("mlp.gate_up_proj.", "ffn_up."),
        ("mlp.gate_proj.", "ffn_gate."),
        ("mlp.up_proj.", "ffn_up."),
        ("mlp.down_proj.", "ffn_down."),
    ] {
        name = name.replace(from, to);
    }
    name
}
