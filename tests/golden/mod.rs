//! The golden models, and the results that Hugging Face transformers computed with them. They are stored packed in
//! `tests/fixtures/models` to keep the repository small. `scripts/pack-goldens` writes the packed files; this module
//! reads them.
//!
//! `model.packed` contains a safetensors model whose weights are all exact in bf16, in 11 or 12 bits per weight:
//!
//! - the length of the header as u64, and the safetensors header in JSON;
//! - for each tensor, in the order of its data offsets:
//!   - the number n of different upper parts (sign and exponent, 9 bits) as u16, and these parts as n u16;
//!   - for each weight a code: the index of its upper part, in as few bits as n needs, above the 7 bits of its
//!     mantissa. Codes follow each other from the lowest bit of a byte on; the last byte is filled with zeros.
//!
//! `golden.packed` contains recorded values, see [`Recorded`]. All numbers are little-endian.
#![allow(dead_code, reason = "each test program uses only some of these functions")]

pub mod fields;
pub mod pipeline;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const SMALL: [&str; 5] = [
    "config.json",
    "config.v5.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
];

/// The directory with the packed files of a model.
pub fn fixture(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/models")
        .join(model)
}

/// A directory with the model in its original files, unpacked on first use.
pub fn dir(model: &str) -> PathBuf {
    let Some(temporary) = option_env!("CARGO_TARGET_TMPDIR") else {
        panic!("only integration tests have a directory for this");
    };
    let all = Path::new(temporary).join("models");
    std::fs::create_dir_all(&all).unwrap();
    let made = tempfile::tempdir_in(&all).unwrap();
    unpack(model, made.path());
    // The name contains a hash of the files, so an existing directory is up to date.
    let files = std::fs::read_dir(made.path()).unwrap().map(|file| file.unwrap().path());
    let sum = files.map(|file| cmf_gpu::format::hash64(&std::fs::read(file).unwrap()));
    let place = all.join(format!("{model}-{:016x}", sum.fold(0, |all, one| all ^ one)));
    if !place.exists() && std::fs::rename(made.path(), &place).is_err() {
        assert!(place.exists(), "{} cannot be created", place.display());
    }
    place
}

/// Writes `model.safetensors` and the small JSON files of a model to a directory.
pub fn unpack(model: &str, to: &Path) {
    let from = fixture(model);
    let packed = from.join("model.packed");
    let base = model.strip_suffix("_hub").map(fixture);
    let tensors = match base {
        None => Weights::read(&packed),
        Some(base) => {
            let text = Weights::read(&base.join("model.packed"));
            // The tensors of the published layout besides those of the text model.
            let more = packed.exists().then(|| Weights::read(&packed));
            for file in ["generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
                std::fs::copy(base.join(file), to.join(file)).unwrap();
            }
            text.published(more)
        }
    };
    std::fs::write(to.join("model.safetensors"), tensors.file()).unwrap();
    for file in SMALL.iter().filter(|file| from.join(file).exists()) {
        std::fs::copy(from.join(file), to.join(file)).unwrap();
    }
}

/// Splits a file into its JSON header and the data after it.
fn split<T: DeserializeOwned>(file: &[u8]) -> (T, &[u8]) {
    let (length, rest) = file.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    (serde_json::from_slice(header).unwrap(), data)
}

struct Weight {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    bytes: Vec<u8>,
}

struct Weights {
    metadata: Option<Value>,
    all: Vec<Weight>,
}

impl Weights {
    fn read(path: &Path) -> Weights {
        let file = std::fs::read(path).unwrap_or_else(|err| panic!("{}: {err}", path.display()));
        let (mut header, mut data) = split::<Map<String, Value>>(&file);
        let metadata = header.remove("__metadata__");
        let mut named: Vec<_> = header.into_iter().collect();
        named.sort_by_key(|(_, info)| info["data_offsets"][0].as_u64());
        let read = |(name, info): (String, Value)| {
            let shape: Vec<u64> = info["shape"]
                .as_array()
                .unwrap()
                .iter()
                .filter_map(Value::as_u64)
                .collect();
            let dtype = info["dtype"].as_str().unwrap().to_owned();
            let upper: Vec<u16> = unpack_bf16(&mut data, shape.iter().product::<u64>() as usize);
            let value = |bits: &u16| f32::from_bits(u32::from(*bits) << 16);
            let bytes = match dtype.as_str() {
                "BF16" => upper.iter().flat_map(|bits| bits.to_le_bytes()).collect(),
                "F16" => upper
                    .iter()
                    .flat_map(|bits| half::f16::from_f32(value(bits)).to_le_bytes())
                    .collect(),
                "F32" => upper.iter().flat_map(|bits| value(bits).to_le_bytes()).collect(),
                other => panic!("{other}"),
            };
            Weight {
                name,
                dtype,
                shape,
                bytes,
            }
        };
        let all = named.into_iter().map(read).collect();
        assert!(data.is_empty(), "{} has {} bytes too many", path.display(), data.len());
        Weights { metadata, all }
    }

    /// Converts to the layout of published multimodal models: another prefix, and all experts of a layer in two
    /// tensors.
    fn published(self, more: Option<Weights>) -> Weights {
        let mut all: Vec<Weight> = Vec::new();
        let mut experts: BTreeMap<(String, u64), Vec<Weight>> = BTreeMap::new();
        for mut weight in self.all {
            if let Some(rest) = weight.name.strip_prefix("model.") {
                weight.name = format!("model.language_model.{rest}");
            }
            match weight.name.split_once(".mlp.experts.") {
                Some((layer, rest)) => {
                    let number = rest.split_once('.').unwrap().0.parse().unwrap();
                    experts.entry((layer.to_owned(), number)).or_default().push(weight);
                }
                None => all.push(weight),
            }
        }
        let mut fused: BTreeMap<String, Weight> = BTreeMap::new();
        for ((layer, _), expert) in experts {
            // Gate rows first, then up rows.
            for part in ["gate_proj", "up_proj", "down_proj"] {
                let mut of = expert.iter().filter(|weight| weight.name.contains(part));
                let weight = of.next().unwrap();
                let whole = if part == "down_proj" { part } else { "gate_up_proj" };
                let name = format!("{layer}.mlp.experts.{whole}");
                let [rows, cols] = weight.shape[..] else {
                    panic!("{}", weight.name)
                };
                let into = fused.entry(name.clone()).or_insert(Weight {
                    shape: vec![0, if part == "down_proj" { rows } else { 2 * rows }, cols],
                    name,
                    dtype: weight.dtype.clone(),
                    bytes: Vec::new(),
                });
                into.shape[0] += u64::from(part != "up_proj");
                into.bytes.extend(&weight.bytes);
            }
        }
        all.extend(fused.into_values());
        all.extend(more.into_iter().flat_map(|more| more.all));
        Weights {
            metadata: self.metadata,
            all,
        }
    }

    /// The tensors as a safetensors file.
    fn file(&self) -> Vec<u8> {
        let mut header = Map::new();
        if let Some(metadata) = &self.metadata {
            header.insert("__metadata__".into(), metadata.clone());
        }
        let mut data = Vec::new();
        for Weight {
            name,
            dtype,
            shape,
            bytes,
        } in &self.all
        {
            let begin = data.len();
            data.extend(bytes);
            let offsets = [begin, data.len()];
            header.insert(
                name.clone(),
                json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}),
            );
        }
        let mut text = serde_json::to_vec(&header).unwrap();
        text.resize(text.len().next_multiple_of(8), b' ');
        let length = text.len() as u64;
        [&length.to_le_bytes()[..], &text, &data].concat()
    }
}

/// Removes the weights of the next tensor from the front of `data` and returns them as bf16.
fn unpack_bf16(data: &mut &[u8], count: usize) -> Vec<u16> {
    let mut u16s = |n: usize| -> Vec<u16> {
        let (these, rest) = data.split_at(2 * n);
        *data = rest;
        these
            .as_chunks::<2>()
            .0
            .iter()
            .map(|pair| u16::from_le_bytes(*pair))
            .collect()
    };
    let n = u16s(1)[0];
    let highs = u16s(usize::from(n));
    let width = 7 + (n - 1).checked_ilog2().map_or(0, |log| log + 1);
    let (these, rest) = data.split_at((count * width as usize).div_ceil(8));
    *data = rest;
    let (mut bits, mut filled, mut bytes) = (0u32, 0, these.iter());
    let mut next = || {
        while filled < width {
            bits |= u32::from(*bytes.next().unwrap()) << filled;
            filled += 8;
        }
        let value = bits & ((1 << width) - 1);
        bits >>= width;
        filled -= width;
        highs[(value >> 7) as usize] << 7 | (value & 127) as u16
    };
    (0..count).map(|_| next()).collect()
}

/// `golden.json` of a model: prompts, greedy tokens and more. A published layout uses the file of the plain one.
pub fn described(model: &str) -> Value {
    let path = fixture(model.strip_suffix("_hub").unwrap_or(model)).join("golden.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// `golden_mtp.json` of a model: tokens, and for each hidden state that the draft head may read, the drafted token of
/// each position and whether it is accepted.
pub fn drafted(model: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixture(model).join("golden_mtp.json")).unwrap()).unwrap()
}

/// Recorded values: one row of a tensor.
#[derive(Clone, Debug)]
pub struct Row {
    pub values: Vec<f32>,
    /// Largest rounding error of the packed values: half a step.
    pub slack: f32,
}

/// Recorded values of a model.
///
/// The file has the length of the header as u64, a JSON header, and the data of the tensors in the order of the
/// header. The header maps names to `dtype`, `shape`, `bytes` and `kind`: `raw` for unchanged data, or `steps` for
/// rows of an f32 step and one i16 per column, the multiple of the step.
pub struct Recorded {
    header: Map<String, Value>,
    data: Vec<u8>,
}

impl Recorded {
    /// The recorded values of a model. A published layout uses those of the plain one.
    pub fn of(model: &str) -> Recorded {
        let model = model.strip_suffix("_hub").unwrap_or(model);
        let file = std::fs::read(fixture(model).join("golden.packed")).unwrap();
        let (header, data) = split(&file);
        Recorded {
            header,
            data: data.to_vec(),
        }
    }

    /// The recorded values of the draft head of a model.
    pub fn of_head(model: &str) -> Recorded {
        let file = std::fs::read(fixture(model).join("golden_mtp.packed")).unwrap();
        let (header, data) = split(&file);
        Recorded {
            header,
            data: data.to_vec(),
        }
    }

    /// The rows of an f32 tensor, with all dimensions but the last flattened.
    pub fn rows(&self, name: &str) -> Vec<Row> {
        let (info, data) = self.find(name);
        assert_eq!(info["dtype"], "F32", "{name}");
        let cols = info["shape"].as_array().unwrap().last().unwrap().as_u64().unwrap() as usize;
        let float = |bytes: &[u8; 4]| f32::from_le_bytes(*bytes);
        let raw = |row: &[u8]| Row {
            values: row.as_chunks().0.iter().map(float).collect(),
            slack: 0.0,
        };
        let steps = |row: &[u8]| {
            let (step, codes) = row.split_first_chunk().unwrap();
            let step = float(step);
            let value = |code: &[u8; 2]| f32::from(i16::from_le_bytes(*code)) * step;
            Row {
                values: codes.as_chunks().0.iter().map(value).collect(),
                slack: step / 2.0 * 1.001,
            }
        };
        match info["kind"].as_str().unwrap() {
            "raw" => data.chunks_exact(4 * cols).map(raw).collect(),
            "steps" => data.chunks_exact(4 + 2 * cols).map(steps).collect(),
            other => panic!("{name}: {other}"),
        }
    }

    /// The elements of an i32 tensor.
    pub fn integers(&self, name: &str) -> Vec<i32> {
        let (info, data) = self.find(name);
        assert_eq!(
            (&info["dtype"], &info["kind"]),
            (&json!("I32"), &json!("raw")),
            "{name}"
        );
        data.as_chunks()
            .0
            .iter()
            .map(|bytes| i32::from_le_bytes(*bytes))
            .collect()
    }

    fn find(&self, wanted: &str) -> (&Value, &[u8]) {
        let mut at = 0;
        for (name, info) in &self.header {
            let bytes = info["bytes"].as_u64().unwrap() as usize;
            if name == wanted {
                return (info, &self.data[at..at + bytes]);
            }
            at += bytes;
        }
        panic!("no record has the name {wanted}");
    }
}
