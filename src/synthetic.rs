//! Networks of real shapes with random weights, to measure speed without a model file.

mod shapes;

use crate::dtype::encode::storage_dtype;
use crate::dtype::{Dtype, Size};
use crate::error::{Result, bail};
use crate::source::{Arch, Stored, TensorId, TensorInfo, Tensors};
use half::f16;
use rayon::prelude::*;
use shapes::Role;
use std::collections::HashMap;
use std::sync::OnceLock;

pub use shapes::{DeltaShape, ExpertShape, Shape};

/// Random weights of a shape: matrices in `quant`, the embedding and the output projection in q8_2f if `quant` has fewer than
/// 8 bits and no rotation, the matrices of routers and gates in f16, as in converted files, norms in f16. A payload is made when it is first
/// asked for.
///
/// Errors: `Parse` for a shape that no network has, `UnsupportedTensorType` for a type whose payloads depend on the weights.
pub fn synthetic(shape: &Shape, quant: Dtype) -> Result<(Arch, Synthetic)> {
    let arch = shape.arch()?;
    let mut made = Synthetic::default();
    // Tensors of one type and shape share one payload, so that a model of many gigabytes takes little memory.
    let mut classes = HashMap::new();
    for (name, role, dims) in shape.tensors() {
        let requested = match role {
            _ if quant.code_bits() >= 16 => quant,
            Role::Table if quant.code_bits() < 8 && shape.hadamard.is_none() => Dtype::Q82f,
            Role::Gate => Dtype::F16,
            Role::Table | Role::Matrix => quant,
        };
        let shape: Vec<u64> = dims.iter().map(|&d| d as u64).collect();
        let dtype = storage_dtype(requested, &shape);
        let Size::Exact(nbytes) = dtype.size(&shape)? else {
            bail!(
                UnsupportedTensorType,
                "{} weights cannot be synthetic: the size of their payload depends on their values",
                dtype.name()
            );
        };
        let next = classes.len();
        made.class_of
            .push(*classes.entry((dtype, shape.clone())).or_insert(next));
        made.by_name.insert(name.clone(), made.infos.len());
        made.infos.push(TensorInfo {
            name,
            dtype,
            shape,
            nbytes,
        });
    }
    made.payloads.resize_with(classes.len(), OnceLock::new);
    Ok((arch, made))
}

/// Tensors with random payloads, made when they are first asked for.
#[derive(Default)]
pub struct Synthetic {
    infos: Vec<TensorInfo>,
    by_name: HashMap<String, TensorId>,
    class_of: Vec<usize>,
    payloads: Vec<OnceLock<Vec<u8>>>,
}

impl Tensors for Synthetic {
    fn infos(&self) -> &[TensorInfo] {
        &self.infos
    }

    fn find(&self, name: &str) -> Option<TensorId> {
        self.by_name.get(name).copied()
    }

    fn stored(&self, id: TensorId) -> Result<Stored<'_>> {
        let (Some(info), Some(&class)) = (self.infos.get(id), self.class_of.get(id)) else {
            bail!(Usage, "there is no tensor {id}");
        };
        let bytes = self.payloads[class].get_or_init(|| payload(info, class as u64));
        Ok(Stored::new(info, bytes))
    }

    fn release(&self, _: TensorId) {}
}

/// A payload of random weights, scaled so that activations neither vanish nor explode.
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
    // With this standard deviation a sum over the columns is about as large as its terms.
    let deviation = 1.0 / (cols as f64).sqrt();
    if info.dtype == Dtype::F16 && rows == 1 {
        // Vectors are norms.
        bytes.as_chunks_mut().0.fill(f16::ONE.to_le_bytes());
    } else {
        info.dtype.fill_random(&mut bytes, [rows, cols], deviation, &random);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_made_before_it_is_asked_for() {
        let (_, model) = synthetic(&Shape::named("qwen3.5-35b-a3b").unwrap(), Dtype::Q4tp).unwrap();
        assert!(model.payloads.iter().all(|payload| payload.get().is_none()));
        let experts = model.find("model.layers.39.mlp.experts.255.down_proj.weight").unwrap();
        assert_eq!(model.infos()[experts].shape, [2048, 512]);
        assert_eq!(model.find("model.layers.40.input_layernorm.weight"), None);
    }

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
            Dtype::Q1,
        ] {
            let (_, model) = synthetic(&Shape::named("smollm2-135m").unwrap(), dtype).unwrap();
            let id = model.find("model.layers.3.mlp.down_proj.weight").unwrap();
            let info = &model.infos()[id];
            assert_eq!(info.dtype, dtype);
            let (rows, cols) = info.rows_cols();
            let stored = model.stored(id).unwrap();
            let decoder = stored.decoder().unwrap();
            let mut row = vec![0.0; cols];
            decoder.row(rows / 2, &mut row);
            let squares: f64 = row.iter().map(|&v| f64::from(v).powi(2)).sum();
            assert!((0.5..2.0).contains(&squares), "{}: {squares}", dtype.name());
        }
    }
}
