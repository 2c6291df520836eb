//! Every block type of GGUF in networks of every kind: a mixture of experts, and a network with recurrences. Dense networks are in
//! `sources`.

use crate::build::{Block, Gguf, Meta};
use crate::recurrent::hybrid;
use crate::sources::{as_f32, logits};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::source;

/// Logits of the same values in another type differ by another order of summation only.
const TOLERANCE: f32 = 1e-3;
/// The number of the type f32.
const F32: u32 = 0;

/// Adds tensors to a file: matrices with random blocks of a type, and small f32 ones.
struct Filler<'a> {
    file: &'a mut Gguf,
    dtype: Dtype,
    seed: u32,
}

impl Filler<'_> {
    fn blocks(&mut self, name: &str, shape: &[u64]) {
        let cols = *shape.last().unwrap() as usize;
        let rows = shape.iter().product::<u64>() as usize / cols;
        let mut data = vec![0; rows * self.dtype.row_bytes(cols).unwrap()];
        self.seed = self.seed.wrapping_mul(0x9E37_79B9) | 1;
        let seed = self.seed;
        let random = |bytes: &mut [u8]| {
            let mut state = seed;
            for byte in bytes {
                state ^= state << 13;
                state ^= state >> 17;
                state ^= state << 5;
                *byte = (state >> 11) as u8;
            }
        };
        assert!(self.dtype.fill_random(&mut data, [rows, cols], 1.0 / 16.0, &random));
        let kind = self.dtype.gguf().unwrap();
        self.add(name, shape, kind, data);
    }

    /// Numbers around `middle`.
    fn plain(&mut self, name: &str, shape: &[u64], middle: f32) {
        let count = shape.iter().product::<u64>();
        self.seed = self.seed.wrapping_mul(0x9E37_79B9) | 1;
        let value = |i: u64| middle + (((i * 7919 + u64::from(self.seed)) % 1009) as f32 / 504.5 - 1.0) / 8.0;
        let data = (0..count).flat_map(|i| value(i).to_le_bytes()).collect();
        self.add(name, shape, F32, data);
    }

    fn add(&mut self, name: &str, shape: &[u64], kind: u32, data: Vec<u8>) {
        self.file.tensors.push(Block {
            name: name.to_owned(),
            dims: shape.iter().rev().copied().collect(),
            kind,
            data,
            offset: None,
        });
    }

    /// Attention with 4 heads of 64 columns, half as many keys. `queries`: rows of the queries, gates included.
    fn attention(&mut self, layer: usize, queries: u64) {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        for (part, shape) in [
            ("attn_q", [queries, 256]),
            ("attn_k", [128, 256]),
            ("attn_v", [128, 256]),
            ("attn_output", [256, 256]),
        ] {
            self.blocks(&name(part), &shape);
        }
        self.plain(&name("attn_q_norm"), &[64], 1.0);
        self.plain(&name("attn_k_norm"), &[64], 1.0);
    }

    fn ends(&mut self) {
        self.blocks("token_embd.weight", &[64, 256]);
        self.blocks("output.weight", &[64, 256]);
        self.plain("output_norm.weight", &[256], 1.0);
    }
}

fn mixture(dtype: Dtype) -> Gguf {
    let numbers = [
        ("block_count", 1),
        ("context_length", 64),
        ("embedding_length", 256),
        ("feed_forward_length", 512),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 64),
        ("expert_count", 4),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", 256),
    ];
    let mut file = Gguf::network("qwen3moe", &numbers, 1e-6);
    let mut fill = Filler {
        file: &mut file,
        dtype,
        seed: 1,
    };
    fill.ends();
    fill.attention(0, 256);
    for part in ["attn_norm", "ffn_norm"] {
        fill.plain(&format!("blk.0.{part}.weight"), &[256], 1.0);
    }
    fill.plain("blk.0.ffn_gate_inp.weight", &[4, 256], 0.0);
    for part in ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"] {
        fill.blocks(&format!("blk.0.{part}.weight"), &[4, 256, 256]);
    }
    file
}

/// Value heads are as wide as the largest block, so all blocks can move with them.
fn recurrent(dtype: Dtype) -> Gguf {
    let mut file = hybrid("qwen35", [32, 2, 4, 1024]);
    file.set("qwen35.embedding_length", Meta::U32(256));
    file.set("qwen35.feed_forward_length", Meta::U32(256));
    let mut fill = Filler {
        file: &mut file,
        dtype,
        seed: 7,
    };
    fill.ends();
    for layer in 0..4 {
        let name = |part: &str| format!("blk.{layer}.{part}");
        if layer == 3 {
            fill.attention(layer, 512);
        } else {
            fill.blocks(&name("attn_qkv.weight"), &[1152, 256]);
            fill.blocks(&name("attn_gate.weight"), &[1024, 256]);
            fill.blocks(&name("ssm_out.weight"), &[256, 1024]);
            fill.plain(&name("ssm_alpha.weight"), &[4, 256], 0.0);
            fill.plain(&name("ssm_beta.weight"), &[4, 256], 0.0);
            fill.plain(&name("ssm_conv1d.weight"), &[1152, 4], 0.25);
            fill.plain(&name("ssm_a"), &[4], -1.0);
            fill.plain(&name("ssm_dt.bias"), &[4], 0.0);
            fill.plain(&name("ssm_norm.weight"), &[256], 1.0);
        }
        for part in ["attn_norm", "post_attention_norm"] {
            fill.plain(&name(&format!("{part}.weight")), &[256], 1.0);
        }
        for part in ["ffn_gate", "ffn_up", "ffn_down"] {
            fill.blocks(&name(&format!("{part}.weight")), &[256, 256]);
        }
    }
    file
}

/// The same values as f32 give the same logits: every type on the host, three on the device.
#[test]
fn every_type_runs_in_mixtures_and_recurrences() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let tokens = [1, 2, 3, 5, 8, 13, 21];
    let mut types = 0;
    for dtype in Dtype::all().filter(|dtype| dtype.gguf().is_some() && dtype.id().is_none()) {
        types += 1;
        for (kind, file) in [("mixture", mixture(dtype)), ("recurrent", recurrent(dtype))] {
            std::fs::write(&path, file.bytes()).unwrap();
            let source = source::open(&path).unwrap();
            let used = source.tensors.infos().iter().filter(|info| info.dtype == dtype).count();
            assert!(used > 10, "{kind} of {}: {used} tensors", dtype.name());
            let wanted = logits(as_f32(&source), &tokens, false);
            assert!(
                wanted.iter().flatten().any(|logit| logit.abs() > 0.1),
                "{kind} of {}",
                dtype.name()
            );
            let on_device = [Dtype::Q4_1, Dtype::Q5_K, Dtype::TQ1_0].contains(&dtype);
            for place in [false, true].into_iter().take(1 + usize::from(on_device)) {
                let found = logits(source.clone(), &tokens, place);
                let pairs = found.iter().flatten().zip(wanted.iter().flatten());
                let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
                assert!(worst < TOLERANCE, "{kind} of {}: {worst}", dtype.name());
            }
        }
    }
    assert_eq!(types, 17);
}
