//! A model with a prescribed answer: an identity embedding, layers of zeros, and an output projection that maps each
//! token to its successor. Greedy decoding follows the successors, on every device and with every weight type.

use cmf_gpu::Result;
use cmf_gpu::dtype::Dtype;
use cmf_gpu::dtype::encode::encode;
use cmf_gpu::engine::Engine;
use cmf_gpu::format::TensorSpec;
use cmf_gpu::format::cmf::{CmfWriter, Sections};
use cmf_gpu::options::{AnswerOptions, DeviceChoice, LoadOptions};
use cmf_gpu::sampling::Sampling;
use serde_json::{Map, Value, json};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Hidden size and vocabulary size.
const HIDDEN: usize = 64;
/// The token that ends an answer.
pub const END: u32 = 0;
/// The first token of prompts. Its successor is [`FIRST`].
pub const PROMPT: u32 = 1;
/// The first token of the answer.
pub const FIRST: u32 = 2;

/// Describes a model; [`write`](Self::write) writes it.
#[derive(Clone)]
pub struct Permutation {
    /// The successor of each token.
    pub next: Vec<u32>,
    /// The text of each token; it need not be UTF-8.
    pub texts: Vec<Vec<u8>>,
    /// Control tokens, which are no text.
    pub special: Vec<u32>,
    pub eos: Vec<u32>,
    pub dtype: Dtype,
    pub context: usize,
    /// Logits of the successor and of all other tokens, before normalisation.
    pub logits: [f32; 2],
    /// A token whose embedding is NaN.
    pub broken: Option<u32>,
    /// Changes the header.
    pub header: fn(&mut Value),
}

impl Permutation {
    /// Answers every prompt with `pieces`, one token each, and the end token.
    pub fn answering(pieces: &[&[u8]]) -> Permutation {
        let mut model = Permutation {
            next: (0..HIDDEN as u32).collect(),
            texts: (0..HIDDEN).map(|id| format!("<{id}>").into_bytes()).collect(),
            special: vec![END],
            eos: vec![END],
            dtype: Dtype::F16,
            context: 512,
            logits: [1.0, 0.0],
            broken: None,
            header: |_| (),
        };
        let last = FIRST + pieces.len() as u32;
        for (id, piece) in (FIRST..).zip(pieces) {
            model.texts[id as usize] = piece.to_vec();
            model.next[id as usize] = if id + 1 == last { END } else { id + 1 };
        }
        model.texts[PROMPT as usize] = b"p".to_vec();
        model.next[PROMPT as usize] = if pieces.is_empty() { END } else { FIRST };
        model
    }

    /// Repeats `pieces` without end.
    pub fn repeating(pieces: &[&[u8]]) -> Permutation {
        let mut model = Permutation::answering(pieces);
        model.next[FIRST as usize + pieces.len() - 1] = FIRST;
        model
    }

    /// Visits every token but the first two in an irregular order: the powers of 7 modulo 71.
    pub fn walking(dtype: Dtype) -> Permutation {
        let mut model = Permutation::answering(&[]);
        let mut order = Vec::new();
        let mut power = 1;
        for _ in 0..70 {
            power = power * 7 % 71;
            if (FIRST as usize..HIDDEN).contains(&power) {
                order.push(power as u32);
            }
        }
        model.next[PROMPT as usize] = order[0];
        for (i, &id) in order.iter().enumerate() {
            model.next[id as usize] = order[(i + 1) % order.len()];
        }
        model.dtype = dtype;
        model
    }

    /// The `count` tokens after `token`.
    pub fn path(&self, token: u32, count: usize) -> Vec<u32> {
        let step = |&id: &u32| Some(self.next[id as usize]);
        std::iter::successors(Some(token), step).skip(1).take(count).collect()
    }

    fn arch(&self) -> Value {
        json!({
            "arch_name": "permutation", "hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_layers": 2,
            "num_attention_heads": 4, "num_kv_heads": 2, "head_dim": 16, "vocab_size": self.next.len(),
            "layer_types": ["FullAttention", "FullAttention"], "rms_norm_eps": 1e-6, "norm_style": "qwen",
            "max_position_embeddings": self.context
        })
    }

    /// A `tokenizer.json` whose tokens have the given bytes. Only single bytes and special tokens can be encoded.
    pub fn tokenizer(&self) -> Value {
        let vocab: Map<String, Value> = self
            .texts
            .iter()
            .zip(0..)
            .map(|(text, id)| (spelled(text), json!(id)))
            .collect();
        assert_eq!(vocab.len(), self.texts.len(), "two tokens have one text");
        let added = self.special.iter().map(|&id| {
            let text = std::str::from_utf8(&self.texts[id as usize]).unwrap();
            json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        });
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
            "normalizer": null, "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []}
        })
    }

    /// Writes the model.
    pub fn write(&self, path: &Path) {
        let vocab = self.next.len();
        let matrix = |name: &str, rows: usize| (name.to_owned(), vec![rows as u64, HIDDEN as u64]);
        let mut shapes = vec![matrix("model.embed_tokens.weight", vocab)];
        for layer in 0..2 {
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            shapes.push((name("input_layernorm"), vec![HIDDEN as u64]));
            for (part, rows) in [("q", 64), ("k", 32), ("v", 32), ("o", 64)] {
                shapes.push(matrix(&name(&format!("self_attn.{part}_proj")), rows));
            }
            shapes.push((name("post_attention_layernorm"), vec![HIDDEN as u64]));
            for part in ["gate", "up", "down"] {
                shapes.push(matrix(&name(&format!("mlp.{part}_proj")), HIDDEN));
            }
        }
        shapes.push(("model.norm.weight".into(), vec![HIDDEN as u64]));
        shapes.push(matrix("lm_head.weight", vocab));
        let spec = |(name, shape): &(String, Vec<u64>)| TensorSpec {
            name: name.clone(),
            dtype: if shape.len() == 1 { Dtype::F32 } else { self.dtype },
            shape: shape.clone(),
        };
        let specs: Vec<TensorSpec> = shapes.iter().map(spec).collect();
        let mut header = json!({"arch": self.arch(), "tokenizer_config": {
            "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}", "eos_token_ids": self.eos}});
        (self.header)(&mut header);
        let Value::Object(header) = header else { unreachable!() };
        let tokenizer = self.tokenizer().to_string();
        let sections = Sections {
            vocab: Some(tokenizer.as_bytes()),
            ..Sections::default()
        };
        let mut writer = CmfWriter::create(path, header, specs.clone(), sections).unwrap();
        for spec in &specs {
            let value = |row: usize, col: usize| match spec.name.as_str() {
                "lm_head.weight" if self.next[col.min(vocab - 1)] as usize == row => self.logits[0],
                "lm_head.weight" => self.logits[1],
                "model.embed_tokens.weight" => f32::from(u8::from(row == col)),
                name if name.contains("norm") => 1.0,
                _ => 0.0,
            };
            writer.write(&self.payload(spec, &value)).unwrap();
        }
        writer.finish().unwrap();
    }

    fn payload(&self, spec: &TensorSpec, value: &(dyn Fn(usize, usize) -> f32 + Sync)) -> Vec<u8> {
        let (rows, cols) = match spec.shape[..] {
            [cols] => (1, cols as usize),
            [rows, cols] => (rows as usize, cols as usize),
            _ => unreachable!(),
        };
        let read = |first: usize, out: &mut [f32]| -> Result<()> {
            for (i, out) in out.iter_mut().enumerate() {
                *out = value(first + i / cols, i % cols);
            }
            Ok(())
        };
        let mut payload = encode(spec.dtype, rows, cols, &read).unwrap();
        if let (Some(row), "model.embed_tokens.weight") = (self.broken, spec.name.as_str()) {
            assert_eq!(spec.dtype, Dtype::F16);
            payload[row as usize * cols * 2..][..cols * 2].copy_from_slice(&[0x00, 0x7E].repeat(cols));
        }
        payload
    }

    /// Writes the model to a temporary directory. The file exists as long as the directory.
    pub fn file(&self) -> (TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.cmf");
        self.write(&path);
        (dir, path)
    }

    /// Loads the model on a device. Then removes its file, if the system permits that.
    pub fn on(&self, device: DeviceChoice) -> Engine {
        let (_dir, path) = self.file();
        load(&path, device, 64)
    }
}

/// Two models with equal shapes and tensor names. The second one visits the tokens in reverse order.
pub fn two_ways() -> (Permutation, Permutation) {
    let there = Permutation::walking(Dtype::Q8Row);
    let mut back = there.clone();
    for id in FIRST as usize..HIDDEN {
        back.next[there.next[id] as usize] = id as u32;
    }
    back.next[PROMPT as usize] = 40;
    (there, back)
}

/// The CPU and the first adapter. The tests fail on a machine without an adapter.
pub fn devices() -> [DeviceChoice; 2] {
    [DeviceChoice::Cpu, DeviceChoice::Index(0)]
}

/// Loads a model with a context of `ctx` tokens.
pub fn load(path: &Path, device: DeviceChoice, ctx: u32) -> Engine {
    let options = LoadOptions::default().device(device).ctx(ctx);
    Engine::load(path, &options, &mut |_, _| ControlFlow::Continue(())).unwrap()
}

/// Greedy decoding of at most `max` tokens, with stop texts.
pub fn greedy(max: usize, stop: &[&str]) -> AnswerOptions {
    AnswerOptions::default()
        .sampling(Sampling::greedy())
        .max_tokens(max)
        .stop(stop.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>())
}

/// Bytes in the printable alphabet of byte-level tokenizers: printable bytes stand for themselves, the others are
/// U+0100 and up.
fn spelled(bytes: &[u8]) -> String {
    let printable = |byte: u32| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let letter = |&byte: &u8| {
        let byte = u32::from(byte);
        let code = if printable(byte) {
            byte
        } else {
            256 + (0..byte).filter(|&b| !printable(b)).count() as u32
        };
        char::from_u32(code).unwrap()
    };
    bytes.iter().map(letter).collect()
}
