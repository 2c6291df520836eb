//! Several skills at once: weighted sums of their tensors (section 9 of the format).
//!
//! Knows weights, not where they come from.

use super::cmf::Container;
use super::masks::Masks;
use super::skills::SkillView;
use super::{TensorId, TensorInfo, Tensors, hash64};
use crate::dtype::encode::encode;
use crate::dtype::{Dtype, RowDecoder};
use crate::error::{Error, Kind, Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// How far the sum of all weights may be from 1.
const SUM_TOLERANCE: f32 = 1e-3;

/// A model whose tensors are Σ wᵢ·Tᵢ wherever one of some skills replaces the backbone's; Tᵢ is the skill's tensor, or the
/// backbone's where it has none.
///
/// Sums are formed in f32, row by row, and kept in memory as they are: a sum of rounded weights lies on no grid of a smaller
/// type. All other tensors are read from the file.
pub struct BlendView {
    backbone: SkillView<Arc<Container>>,
    infos: Vec<TensorInfo>,
    blended: BTreeMap<TensorId, Vec<u8>>,
}

impl BlendView {
    /// The model with these skills in these shares, if the sums take at most `room` bytes of memory.
    ///
    /// Errors: `Usage` for a skill that is not there or named twice, for weights that are negative or do not make 1 together;
    /// `OutOfMemory`; `NonFinite` for a sum that is no number; those of [`SkillView::new`].
    pub fn new(container: Arc<Container>, weights: &[(String, f32)], room: u64) -> Result<BlendView> {
        check(weights)?;
        let backbone = SkillView::new(container.clone(), None)?;
        let view = |(id, _): &(String, f32)| SkillView::new(container.clone(), Some(id));
        let views = weights.iter().map(view).collect::<Result<Vec<_>>>()?;
        let ids: BTreeSet<TensorId> = views.iter().flat_map(|view| view.replaced()).copied().collect();
        let mut infos = backbone.infos().to_vec();
        let need = ids.iter().map(|&id| {
            let (rows, cols) = infos[id].rows_cols();
            rows as u64 * cols as u64 * 4
        });
        let need: u64 = need.sum();
        if need > room {
            bail!(
                OutOfMemory,
                "the blended tensors need {need} bytes of this machine's memory, {room} are free"
            );
        }
        let mut blended = BTreeMap::new();
        for id in ids {
            let info = &mut infos[id];
            let (rows, cols) = info.rows_cols();
            let parts = views.iter().zip(weights).map(|(view, &(_, weight))| {
                let dtype = view.infos()[id].dtype;
                Ok((weight, dtype.decoder(view.bytes(id)?, rows, cols)?))
            });
            let parts = parts.collect::<Result<Vec<_>>>();
            let parts = parts.map_err(|err| err.context(format_args!("tensor '{}'", info.name)))?;
            let read = |first: usize, out: &mut [f32]| {
                sum(&parts, first, cols, out);
                Ok(())
            };
            let payload = encode(Dtype::F32, rows, cols, &read);
            let payload = payload.map_err(|err| err.context(format_args!("tensor '{}', blended", info.name)))?;
            drop(parts);
            views.iter().for_each(|view| view.release(id));
            *info = TensorInfo {
                dtype: Dtype::F32,
                nbytes: payload.len() as u64,
                hash: hash64(&payload),
                ..info.clone()
            };
            blended.insert(id, payload);
        }
        Ok(BlendView {
            backbone,
            infos,
            blended,
        })
    }

    /// Tensors that are blended, in order.
    pub fn blended(&self) -> Vec<TensorId> {
        self.blended.keys().copied().collect()
    }
}

fn check(weights: &[(String, f32)]) -> Result<()> {
    for (i, (id, weight)) in weights.iter().enumerate() {
        if !(weight.is_finite() && *weight >= 0.0) {
            bail!(Usage, "skill '{id}' has a weight of {weight}, wanted none below 0");
        }
        if weights[..i].iter().any(|(other, _)| other == id) {
            bail!(Usage, "skill '{id}' is blended twice");
        }
    }
    let sum: f32 = weights.iter().map(|(_, weight)| weight).sum();
    if (sum - 1.0).abs() > SUM_TOLERANCE {
        return Err(Error::new(
            Kind::Usage,
            format!("the weights of a blend make 1 together, these make {sum}"),
        ));
    }
    Ok(())
}

/// Writes weighted sums of rows from `first` on, as many as fit.
fn sum(parts: &[(f32, Box<dyn RowDecoder + '_>)], first: usize, cols: usize, out: &mut [f32]) {
    let mut values = vec![0.0; cols];
    for (i, sums) in out.chunks_exact_mut(cols).enumerate() {
        sums.fill(0.0);
        for (weight, part) in parts {
            part.row(first + i, &mut values);
            sums.iter_mut()
                .zip(&values)
                .for_each(|(sum, value)| *sum += weight * value);
        }
    }
}

impl Tensors for BlendView {
    fn infos(&self) -> &[TensorInfo] {
        &self.infos
    }

    fn find(&self, name: &str) -> Option<TensorId> {
        self.backbone.find(name)
    }

    fn bytes(&self, id: TensorId) -> Result<&[u8]> {
        match self.blended.get(&id) {
            Some(payload) => Ok(payload),
            None => self.backbone.bytes(id),
        }
    }

    fn masks(&self) -> Option<&Masks> {
        self.backbone.masks()
    }

    fn release(&self, id: TensorId) {
        if !self.blended.contains_key(&id) {
            self.backbone.release(id);
        }
    }
}
