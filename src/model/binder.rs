//! The tensors of a file on their way to the network of a language model.

use super::finder::Finder;
use super::network::{Ffn, GateUp};
use crate::error::{Result, bail};
use crate::source::{Arch, Tensors};
use std::ops::{Deref, DerefMut};

/// The tensors of a file while they are bound to the network that `arch` describes.
pub(super) struct Binder<'a> {
    pub arch: &'a Arch,
    finder: Finder<'a>,
}

impl<'a> Deref for Binder<'a> {
    type Target = Finder<'a>;

    fn deref(&self) -> &Finder<'a> {
        &self.finder
    }
}

impl DerefMut for Binder<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.finder
    }
}

impl<'a> Binder<'a> {
    pub fn new(arch: &'a Arch, tensors: &'a dyn Tensors) -> Self {
        Binder {
            arch,
            finder: Finder::new(tensors, "the header"),
        }
    }

    /// The gated feed-forward network whose tensors have this prefix. Its width is that of its tensors, because the layers of a
    /// pruned model differ in width.
    ///
    /// Errors: as [`Finder::required`].
    pub fn ffn(&mut self, prefix: &str) -> Result<Ffn> {
        let name = |part: &str| format!("{prefix}.{part}");
        let hidden = self.arch.hidden_size;
        let fused_rows = self.rows(&name("gate_up_proj.weight"));
        let (gate_up, width) = match (fused_rows, self.rows(&name("gate_proj.weight"))) {
            (Some(rows), _) if rows.is_multiple_of(2) => {
                let both = self.linear(&name("gate_up_proj"), rows, hidden)?;
                (GateUp::Fused(both), rows / 2)
            }
            (Some(rows), _) => bail!(
                Parse,
                "tensor '{}' has {rows} rows, expected an even number",
                name("gate_up_proj.weight")
            ),
            (None, Some(width)) => {
                let gate = self.linear(&name("gate_proj"), width, hidden)?;
                let up = self.linear(&name("up_proj"), width, hidden)?;
                (GateUp::Split(gate, up), width)
            }
            (None, None) => bail!(MissingTensor, "the network needs tensor '{}'", name("gate_proj.weight")),
        };
        Ok(Ffn {
            gate_up,
            down: self.linear(&name("down_proj"), hidden, width)?,
        })
    }
}
