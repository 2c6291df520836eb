//! Binds a mixture of experts. The number of experts is the number of the router's rows, and the tensors must agree with it.

use super::binder::Binder;
use super::network::{Ffn, GateUp, Moe};
use crate::error::{Result, bail};

impl Binder<'_> {
    /// The mixture of layer number `layer`, which has a router and whose tensors have the prefix `at`.
    ///
    /// Errors: `Parse` for a header without `arch.moe` and for contradicting numbers, `MissingTensor` for missing experts,
    /// `UnsupportedModel` for experts of several widths or with biases.
    pub(super) fn moe(&mut self, layer: usize, at: &str) -> Result<Moe> {
        let name = |part: &str| format!("{at}.mlp.{part}");
        let hidden = self.arch.hidden_size;
        let router_name = name("gate.weight");
        let Some(constants) = &self.arch.moe else {
            bail!(
                Parse,
                "tensor '{router_name}' is a router, but the header has no arch.moe"
            );
        };
        let rows = self.rows(&router_name).unwrap_or(0);
        if rows == 0 || rows > constants.num_experts {
            bail!(
                Parse,
                "tensor '{router_name}' has {rows} rows, expected 1 to arch.moe.num_experts, which is {}",
                constants.num_experts
            );
        }
        let router = self.linear(&name("gate"), rows, hidden)?;
        let mut experts: Vec<Ffn> = Vec::new();
        for expert in 0..rows {
            let prefix = name(&format!("experts.{expert}"));
            let ffn = self.ffn(&prefix)?;
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
        if let Some(extra) = beyond.iter().find(|extra| self.has(extra)) {
            bail!(
                Parse,
                "tensor '{extra}' belongs to an expert without a row in '{router_name}', which has {rows} rows"
            );
        }
        let shared_prefix = name("shared_expert");
        // One of its tensors is enough, so that an error names the missing ones.
        let has_shared = [
            ".gate_proj.weight",
            ".up_proj.weight",
            ".gate_up_proj.weight",
            ".down_proj.weight",
            "_gate.weight",
        ]
        .iter()
        .any(|part| self.has(&format!("{shared_prefix}{part}")));
        let (mut shared, mut shared_gate) = (None, None);
        if has_shared {
            let ffn = self.ffn(&shared_prefix)?;
            refuse_odd(&ffn, &shared_prefix)?;
            shared = Some(ffn);
            let gate = name("shared_expert_gate");
            if self.has(&format!("{gate}.weight")) {
                shared_gate = Some(self.linear(&gate, 1, hidden)?);
            }
        }
        if [Some(router), shared_gate]
            .iter()
            .flatten()
            .any(|linear| linear.bias.is_some())
        {
            bail!(UnsupportedModel, "layer {layer}: routers with a bias are not supported");
        }
        Ok(Moe {
            expert_bias: self.optional(&name("expert_bias"), &[rows as u64])?,
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

/// Refuses experts that the kernels do not support. Errors: `UnsupportedModel` for biases, `Parse` for a width of 0.
fn refuse_odd(ffn: &Ffn, prefix: &str) -> Result<()> {
    if ffn.down.cols == 0 {
        bail!(Parse, "the width of '{prefix}' is 0");
    }
    let gate_up = match &ffn.gate_up {
        GateUp::Split(gate, up) => [gate.bias, up.bias],
        GateUp::Fused(both) => [both.bias, None],
    };
    if gate_up.iter().any(Option::is_some) || ffn.down.bias.is_some() {
        bail!(
            UnsupportedModel,
            "'{prefix}' has biases, which are not supported in experts"
        );
    }
    Ok(())
}
