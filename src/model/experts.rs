//! Binds a mixture of experts: how many there are is what the directory lists, and has to be what the router says.

use super::bind::Binder;
use super::{Ffn, Linear, Moe};
use crate::container::Arch;
use crate::error::{Result, bail};

impl Binder<'_> {
    /// The mixture of a layer that has a router. Its tensors are named `at`.
    ///
    /// Errors: `Parse` for a header without `arch.moe` and for numbers that contradict each other, `MissingTensor` for an
    /// expert that the router knows and the directory lacks, `UnsupportedModel` for experts of several widths or with biases.
    pub(super) fn moe(&mut self, arch: &Arch, layer: usize, at: &str) -> Result<Moe> {
        let name = |part: &str| format!("{at}.mlp.{part}");
        let hidden = arch.hidden_size;
        let router_name = name("gate.weight");
        let Some(constants) = &arch.moe else {
            bail!(
                Parse,
                "tensor '{router_name}' is a router, but the header has no arch.moe"
            );
        };
        let rows = self.tensors.find(&router_name);
        let rows = rows.map_or(0, |id| self.tensors.infos()[id].rows_cols().0);
        if rows == 0 || rows > constants.num_experts {
            bail!(
                Parse,
                "tensor '{router_name}' has {rows} rows, wanted 1 to arch.moe.num_experts, which is {}",
                constants.num_experts
            );
        }
        let router = self.linear(&name("gate"), rows, hidden)?;
        let mut experts: Vec<Ffn> = Vec::new();
        for expert in 0..rows {
            let prefix = name(&format!("experts.{expert}"));
            let ffn = self.ffn(&prefix, hidden)?;
            refuse_odd(&ffn, &prefix)?;
            if let Some(first) = experts.first()
                && first.down.cols != ffn.down.cols
            {
                bail!(
                    UnsupportedModel,
                    "layer {layer}: expert {expert} is {} wide, expert 0 is {}",
                    ffn.down.cols,
                    first.down.cols
                );
            }
            experts.push(ffn);
        }
        let beyond = ["gate_proj.weight", "gate_up_proj.weight"].map(|part| name(&format!("experts.{rows}.{part}")));
        if let Some(extra) = beyond.iter().find(|extra| self.tensors.find(extra).is_some()) {
            bail!(
                Parse,
                "tensor '{extra}' belongs to an expert that the router does not know: '{router_name}' has {rows} rows"
            );
        }
        let shared_prefix = name("shared_expert");
        // A part of it is enough: what is missing is then asked for by name.
        let has_shared = [
            ".gate_proj.weight",
            ".up_proj.weight",
            ".gate_up_proj.weight",
            ".down_proj.weight",
            "_gate.weight",
        ]
        .iter()
        .any(|part| self.tensors.find(&format!("{shared_prefix}{part}")).is_some());
        let shared = match has_shared {
            true => Some(self.ffn(&shared_prefix, hidden)?),
            false => None,
        };
        let mut shared_gate: Option<Linear> = None;
        if let Some(ffn) = &shared {
            refuse_odd(ffn, &shared_prefix)?;
            let gate = name("shared_expert_gate");
            if self.tensors.find(&format!("{gate}.weight")).is_some() {
                shared_gate = Some(self.linear(&gate, 1, hidden)?);
            }
        }
        for linear in [Some(&router), shared_gate.as_ref()].into_iter().flatten() {
            if linear.bias.is_some() {
                bail!(UnsupportedModel, "layer {layer}: a bias of the router");
            }
        }
        Ok(Moe {
            expert_bias: self.shaped(&name("expert_bias"), &[rows as u64])?,
            top_k: constants.top_k.min(rows),
            renormalise: constants.norm_topk_prob,
            sigmoid: constants.router_sigmoid,
            scale: constants.routed_scaling_factor as f32,
            router,
            experts,
            shared,
            shared_gate,
        })
    }
}

/// Errors: `UnsupportedModel` for biases, `Parse` for a network of no width.
fn refuse_odd(ffn: &Ffn, prefix: &str) -> Result<()> {
    if ffn.down.cols == 0 {
        bail!(Parse, "'{prefix}' is 0 wide");
    }
    let gate_up = match &ffn.gate_up {
        super::GateUp::Split(gate, up) => [gate.bias, up.bias],
        super::GateUp::Fused(both) => [both.bias, None],
    };
    if gate_up.iter().any(Option::is_some) || ffn.down.bias.is_some() {
        bail!(UnsupportedModel, "'{prefix}' has biases; those of experts are unknown");
    }
    Ok(())
}
