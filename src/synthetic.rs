//! Networks of real shapes with random weights: for measuring speed without a model file.

use crate::container::{Arch, Header, TensorId, TensorInfo, Tensors};
use crate::dtype::encode::storage_dtype;
use crate::dtype::{Dtype, Size};
use crate::error::{Error, Kind, Result, bail};
use half::f16;
use rayon::prelude::*;
use serde_json::json;
use std::collections::HashMap;
use std::sync::OnceLock;

/// A shape that [`synthetic`] knows.
struct Shape {
    name: &'static str,
    hidden: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    width: usize,
    vocab: usize,
    tied: bool,
    qk_norm: bool,
}

const SHAPES: [Shape; 3] = [
    Shape {
        name: "smollm2-135m",
        hidden: 576,
        layers: 30,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        width: 1536,
        vocab: 49152,
        tied: true,
        qk_norm: false,
    },
    Shape {
        name: "llama-8b",
        hidden: 4096,
        layers: 32,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        width: 14336,
        vocab: 128256,
        tied: false,
        qk_norm: false,
    },
    Shape {
        name: "qwen3-8b",
        hidden: 4096,
        layers: 36,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        width: 12288,
        vocab: 151936,
        tied: false,
        qk_norm: true,
    },
];

/// The names that [`synthetic`] knows.
pub fn names() -> impl Iterator<Item = &'static str> {
    SHAPES.iter().map(|shape| shape.name)
}

/// Random weights of a known shape: matrices in `quant`, embedding and head in 8 bits under the 4-bit types, norms f16.
///
/// Errors: `Usage` for an unknown name, `UnsupportedTensorType` for a type that is not made.
pub fn synthetic(name: &str, quant: Dtype) -> Result<(Arch, Synthetic)> {
    let Some(shape) = SHAPES.iter().find(|shape| shape.name == name) else {
        bail!(
            Usage,
            "no synthetic model '{name}'; there are {}",
            names().collect::<Vec<_>>().join(", ")
        );
    };
    let header = json!({"arch": {
        "arch_name": name,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.width,
        "num_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "layer_types": vec!["FullAttention"; shape.layers],
        "rms_norm_eps": 1e-5,
        "norm_style": "qwen",
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 32768,
    }});
    let arch = match header.as_object() {
        Some(header) => Header::from_json(header)?.arch,
        None => bail!(Parse, "the header is not an object"),
    };
    let table = match quant {
        Dtype::Q4Block | Dtype::Q4Tiled | Dtype::Q4tp => Dtype::Q82f,
        other => other,
    };
    let mut infos = Vec::new();
    let mut add = |name: String, dtype: Dtype, shape: &[usize]| -> Result<()> {
        let shape: Vec<u64> = shape.iter().map(|&d| d as u64).collect();
        let dtype = storage_dtype(dtype, &shape);
        let Size::Exact(nbytes) = dtype.size(&shape)? else {
            bail!(
                UnsupportedTensorType,
                "synthetic {} weights are not made yet",
                dtype.name()
            );
        };
        infos.push(TensorInfo {
            name,
            dtype,
            shape,
            offset: 0,
            nbytes,
            hash: 0,
            shard: 0,
        });
        Ok(())
    };
    let (q, kv) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    add("model.embed_tokens.weight".into(), table, &[shape.vocab, shape.hidden])?;
    for layer in 0..shape.layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        add(name("input_layernorm"), quant, &[shape.hidden])?;
        add(name("self_attn.q_proj"), quant, &[q, shape.hidden])?;
        add(name("self_attn.k_proj"), quant, &[kv, shape.hidden])?;
        add(name("self_attn.v_proj"), quant, &[kv, shape.hidden])?;
        add(name("self_attn.o_proj"), quant, &[shape.hidden, q])?;
        if shape.qk_norm {
            add(name("self_attn.q_norm"), quant, &[shape.head_dim])?;
            add(name("self_attn.k_norm"), quant, &[shape.head_dim])?;
        }
        add(name("post_attention_layernorm"), quant, &[shape.hidden])?;
        add(name("mlp.gate_proj"), quant, &[shape.width, shape.hidden])?;
        add(name("mlp.up_proj"), quant, &[shape.width, shape.hidden])?;
        add(name("mlp.down_proj"), quant, &[shape.hidden, shape.width])?;
    }
    add("model.norm.weight".into(), quant, &[shape.hidden])?;
    if !shape.tied {
        add("lm_head.weight".into(), table, &[shape.vocab, shape.hidden])?;
    }
    // Tensors of one type and shape share one payload, so that a model of many gigabytes needs few.
    let mut classes = HashMap::new();
    let class_of = infos
        .iter()
        .map(|info| {
            let next = classes.len();
            *classes.entry((info.dtype, info.shape.clone())).or_insert(next)
        })
        .collect();
    let payloads = (0..classes.len()).map(|_| OnceLock::new()).collect();
    Ok((
        arch,
        Synthetic {
            infos,
            class_of,
            payloads,
        },
    ))
}

/// Tensors with random payloads, made when they are first asked for.
pub struct Synthetic {
    infos: Vec<TensorInfo>,
    class_of: Vec<usize>,
    payloads: Vec<OnceLock<Vec<u8>>>,
}

impl Tensors for Synthetic {
    fn infos(&self) -> &[TensorInfo] {
        &self.infos
    }

    fn find(&self, name: &str) -> Option<TensorId> {
        self.infos.iter().position(|info| info.name == name)
    }

    fn bytes(&self, id: TensorId) -> Result<&[u8]> {
        let (Some(info), Some(&class)) = (self.infos.get(id), self.class_of.get(id)) else {
            return Err(Error::new(Kind::Usage, format!("there is no tensor {id}")));
        };
        Ok(self.payloads[class].get_or_init(|| payload(info, class as u64)))
    }

    fn release(&self, _: TensorId) {}
}

/// Codes are random, scales are such that activations neither vanish nor explode.
fn payload(info: &TensorInfo, seed: u64) -> Vec<u8> {
    let (rows, cols) = info.rows_cols();
    let mut bytes = vec![0u8; info.nbytes as usize];
    let random = |bytes: &mut [u8]| {
        bytes.par_chunks_mut(1 << 16).enumerate().for_each(|(i, chunk)| {
            // SplitMix64 (Steele et al. 2014), one stream a chunk.
            let mut state = (seed << 40) + ((i as u64) << 20);
            for word in chunk.chunks_mut(8) {
                state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
                let mut z = state;
                z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
                z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
                word.copy_from_slice(&(z ^ (z >> 31)).to_le_bytes()[..word.len()]);
            }
        });
    };
    let halves = |bytes: &mut [u8], value: f64| {
        let half = f16::from_f64(value).to_le_bytes();
        bytes.chunks_exact_mut(2).for_each(|out| out.copy_from_slice(&half));
    };
    // The standard deviation that keeps a sum over the columns at the size of its terms.
    let sd = 1.0 / (cols as f64).sqrt();
    match info.dtype {
        // Vectors are norms.
        Dtype::F16 if rows == 1 => halves(&mut bytes, 1.0),
        Dtype::F32 => {
            random(&mut bytes);
            for value in bytes.chunks_exact_mut(4) {
                let unit = f64::from(u16::from_le_bytes([value[0], value[1]])) / 65536.0 - 0.5;
                value.copy_from_slice(&((unit * 3.4 * sd) as f32).to_le_bytes());
            }
        }
        Dtype::F16 | Dtype::Bf16 => {
            random(&mut bytes);
            for value in bytes.chunks_exact_mut(2) {
                let unit = f64::from(u16::from_le_bytes([value[0], value[1]])) / 65536.0 - 0.5;
                let scaled = unit * 3.4 * sd;
                value.copy_from_slice(&match info.dtype {
                    Dtype::F16 => f16::from_f64(scaled).to_le_bytes(),
                    _ => half::bf16::from_f64(scaled).to_le_bytes(),
                });
            }
        }
        Dtype::Q8Row => {
            let (codes, scales) = bytes.split_at_mut(rows * cols);
            random(codes);
            halves(scales, sd / 73.0);
        }
        Dtype::Q82f => {
            let (codes, scales) = bytes.split_at_mut(rows * cols);
            random(codes);
            halves(scales, (sd / 73.0).sqrt());
        }
        Dtype::Q4Block => {
            let (codes, scales) = bytes.split_at_mut(rows * cols / 2);
            random(codes);
            halves(scales, sd / 4.6);
        }
        Dtype::Q4Tiled => {
            random(&mut bytes);
            bytes
                .chunks_exact_mut(18)
                .for_each(|tile| halves(&mut tile[..2], sd / 4.6));
        }
        Dtype::Q4tp => {
            let (codes, rest) = bytes.split_at_mut(rows * cols / 2);
            let (ladders, rungs) = rest.split_at_mut(rows * 4);
            random(codes);
            random(rungs);
            for ladder in ladders.chunks_exact_mut(4) {
                halves(&mut ladder[..2], (sd / 4.6).log2() - 1.0);
                halves(&mut ladder[2..], 1.0 / 16.0);
            }
        }
        // `synthetic` refuses these: their size depends on what they hold.
        Dtype::Vbit | Dtype::VbitRo | Dtype::Q1 | Dtype::Q1s | Dtype::Q1t => random(&mut bytes),
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_are_finite_weights_of_the_right_size() {
        for dtype in [
            Dtype::F32,
            Dtype::F16,
            Dtype::Bf16,
            Dtype::Q8Row,
            Dtype::Q82f,
            Dtype::Q4Block,
            Dtype::Q4Tiled,
            Dtype::Q4tp,
        ] {
            let (_, model) = synthetic("smollm2-135m", dtype).unwrap();
            let id = model.find("model.layers.3.mlp.down_proj.weight").unwrap();
            let info = &model.infos()[id];
            assert_eq!(info.dtype, dtype);
            let (rows, cols) = info.rows_cols();
            let decoder = dtype.decoder(model.bytes(id).unwrap(), rows, cols).unwrap();
            let mut row = vec![0.0; cols];
            decoder.row(rows / 2, &mut row);
            let squares: f64 = row.iter().map(|&v| f64::from(v).powi(2)).sum();
            assert!((0.5..2.0).contains(&squares), "{}: {squares}", dtype.name());
        }
    }
}
