//! Binds the tensors of a Gated DeltaNet layer.

use super::binder::Binder;
use super::network::{DeltaGates, DeltaInputs, DeltaNet};
use crate::error::{Result, bail};
use crate::source::LayerType;

/// Largest key or value head, and longest convolution, that the kernels support.
const MAX_HEAD: usize = 256;
const MAX_TAPS: usize = 16;

impl Binder<'_> {
    /// The Gated DeltaNet of layer number `layer`, whose tensors have the prefix `at`; `None` for a layer without such tensors.
    ///
    /// Errors: `MissingTensor` for tensors, and for a layer of linear attention by the header that has neither these tensors
    /// nor softmax attention; `Parse` for dimensions that the header lacks and shapes that contradict it; `UnsupportedModel`
    /// for sizes that the kernels do not support.
    pub(super) fn delta_net(&mut self, layer: usize, at: &str) -> Result<Option<DeltaNet>> {
        let name = |part: &str| format!("{at}.linear_attn.{part}");
        let arch = self.arch;
        let fused = self.has(&name("in_proj_qkvz.weight"));
        if !fused && !self.has(&name("in_proj_qkv.weight")) {
            let linear = arch.layer_types.get(layer) == Some(&LayerType::LinearAttention);
            let attends = |part: &str| self.has(&format!("{at}.self_attn.{part}.weight"));
            if linear && !attends("q_proj") && !attends("qkv_proj") {
                bail!(
                    MissingTensor,
                    "the network needs tensor '{}': layer {layer} is linear attention",
                    name("in_proj_qkv.weight")
                );
            }
            return Ok(None);
        }
        let dim = |key: &str, value: Option<usize>| match value {
            Some(value) => Ok(value),
            None => bail!(Parse, "arch.{key} is missing, and layer {layer} is linear attention"),
        };
        let hidden = arch.hidden_size;
        let key_heads = dim("linear_num_key_heads", arch.linear_num_key_heads)?;
        let value_heads = dim("linear_num_value_heads", arch.linear_num_value_heads)?;
        let key_dim = dim("linear_key_head_dim", arch.linear_key_head_dim)?;
        let value_dim = dim("linear_value_head_dim", arch.linear_value_head_dim)?;
        let taps = dim("linear_conv_kernel_dim", arch.linear_conv_kernel_dim)?;
        for (kind, dim) in [("key", key_dim), ("value", value_dim)] {
            if !dim.is_multiple_of(4) || dim > MAX_HEAD {
                bail!(
                    UnsupportedModel,
                    "linear {kind} heads of {dim} elements, expected a multiple of 4 up to {MAX_HEAD}"
                );
            }
        }
        if taps > MAX_TAPS {
            bail!(
                UnsupportedModel,
                "a convolution over {taps} positions, expected at most {MAX_TAPS}"
            );
        }
        let rows = |parts: [(usize, usize); 2]| {
            let [keys, values] = parts.map(|(count, each)| count.checked_mul(each));
            match keys.zip(values).and_then(|(keys, values)| keys.checked_add(values)) {
                Some(rows) => Ok(rows),
                None => bail!(
                    Parse,
                    "arch.linear_num_value_heads is {value_heads}: the rows of its tensors overflow"
                ),
            }
        };
        let values = rows([(0, 0), (value_heads, value_dim)])?;
        let channels = rows([(key_heads, 2 * key_dim), (value_heads, value_dim)])?;
        let inputs = match fused {
            true => {
                let all = rows([(key_heads, 2 * key_dim), (value_heads, 2 * value_dim)])?;
                DeltaInputs::Fused(self.linear(&name("in_proj_qkvz"), all, hidden)?)
            }
            false => DeltaInputs::Split {
                qkv: self.linear(&name("in_proj_qkv"), channels, hidden)?,
                z: self.linear(&name("in_proj_z"), values, hidden)?,
            },
        };
        let gates = match fused || self.has(&name("in_proj_ba.weight")) {
            true => {
                let both = rows([(0, 0), (value_heads, 2)])?;
                DeltaGates::Fused(self.linear(&name("in_proj_ba"), both, hidden)?)
            }
            false => DeltaGates::Split([
                self.linear(&name("in_proj_b"), value_heads, hidden)?,
                self.linear(&name("in_proj_a"), value_heads, hidden)?,
            ]),
        };
        Ok(Some(DeltaNet {
            inputs,
            gates,
            conv: self.required(&name("conv1d.weight"), &[channels as u64, 1, taps as u64])?,
            a_log: self.vector(&name("A_log"), value_heads)?,
            dt_bias: self.vector(&name("dt_bias"), value_heads)?,
            norm: self.vector(&name("norm.weight"), value_dim)?,
            o_tiled: self.has_tiled_columns(&name("out_proj.weight")),
            o: self.linear(&name("out_proj"), hidden, values)?,
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            taps,
        }))
    }
}
