//! The tensors of a model with several skills active: weighted sums of their tensors (section 9 of the CMF format).

use super::skill_view::SkillView;
use super::tensors::{Stored, Tensors};
use crate::dtype::encode::encode;
use crate::dtype::{Dtype, RowDecoder};
use crate::error::{Error, Kind, Result, bail};
use crate::format::cmf::{Masks, Skill};
use crate::format::{TensorId, TensorInfo};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The largest difference of the sum of all weights from 1.
const SUM_TOLERANCE: f32 = 1e-3;

/// A model with blended skills. A tensor that any of the skills replaces is Σ wᵢ·Tᵢ, where Tᵢ is the tensor of skill i, or
/// of the backbone if the skill does not replace it. All other tensors are those of the backbone.
///
/// Sums are computed in f32, row by row, and kept in memory as f32, because quantising them again would lose precision.
pub struct BlendView {
    backbone: SkillView<Arc<dyn Tensors>>,
    infos: Vec<TensorInfo>,
    blended: BTreeMap<TensorId, Vec<u8>>,
}

impl BlendView {
    /// The model with these skills, as pairs of id and weight. `capacity`: the most bytes of memory for the sums.
    ///
    /// Errors: `Usage` for an unknown or repeated skill, and for weights that are negative or do not sum to 1; `OutOfMemory`;
    /// `NonFinite` for a sum that is not finite; those of [`SkillView::new`].
    pub fn new(
        tensors: Arc<dyn Tensors>,
        skills: &[Skill],
        weights: &[(String, f32)],
        capacity: u64,
    ) -> Result<BlendView> {
        check(weights)?;
        let backbone = SkillView::new(tensors.clone(), skills, None)?;
        let view = |(id, _): &(String, f32)| SkillView::new(tensors.clone(), skills, Some(id));
        let views = weights.iter().map(view).collect::<Result<Vec<_>>>()?;
        let ids: BTreeSet<TensorId> = views.iter().flat_map(|view| view.replaced()).copied().collect();
        let mut infos = backbone.infos().to_vec();
        let need = ids.iter().map(|&id| {
            let (rows, cols) = infos[id].rows_cols();
            rows as u64 * cols as u64 * 4
        });
        let need: u64 = need.sum();
        if need > capacity {
            bail!(
                OutOfMemory,
                "blended tensors need {need} bytes of host memory, available are {capacity}"
            );
        }
        let mut blended = BTreeMap::new();
        for id in ids {
            let info = &mut infos[id];
            let (rows, cols) = info.rows_cols();
            let stored = views.iter().map(|view| view.stored(id)).collect::<Result<Vec<_>>>()?;
            let terms = stored.iter().zip(weights);
            let terms = terms.map(|(stored, &(_, weight))| Ok((weight, stored.decoder()?)));
            let terms = terms.collect::<Result<Vec<_>>>();
            let terms = terms.map_err(|err| err.context(format_args!("tensor '{}'", info.name)))?;
            let read = |first: usize, out: &mut [f32]| {
                sum(&terms, first, cols, out);
                Ok(())
            };
            let payload = encode(Dtype::F32, rows, cols, &read);
            let payload = payload.map_err(|err| err.context(format_args!("tensor '{}', blended", info.name)))?;
            drop(terms);
            drop(stored);
            views.iter().for_each(|view| view.release(id));
            *info = TensorInfo {
                dtype: Dtype::F32,
                nbytes: payload.len() as u64,
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

    /// The blended tensors, ascending.
    pub fn blended(&self) -> Vec<TensorId> {
        self.blended.keys().copied().collect()
    }
}

fn check(weights: &[(String, f32)]) -> Result<()> {
    for (i, (id, weight)) in weights.iter().enumerate() {
        if !(weight.is_finite() && *weight >= 0.0) {
            bail!(
                Usage,
                "skill '{id}' has weight {weight}, expected a finite number of at least 0"
            );
        }
        if weights[..i].iter().any(|(other, _)| other == id) {
            bail!(Usage, "skill '{id}' occurs twice in the blend");
        }
    }
    let sum: f32 = weights.iter().map(|(_, weight)| weight).sum();
    if (sum - 1.0).abs() > SUM_TOLERANCE {
        return Err(Error::new(
            Kind::Usage,
            format!("the weights of a blend sum to {sum}, expected 1"),
        ));
    }
    Ok(())
}

/// Fills `out` with the weighted sums of whole rows from `first` on.
fn sum(terms: &[(f32, Box<dyn RowDecoder + '_>)], first: usize, cols: usize, out: &mut [f32]) {
    let mut values = vec![0.0; cols];
    for (i, sums) in out.chunks_exact_mut(cols).enumerate() {
        sums.fill(0.0);
        for (weight, term) in terms {
            term.row(first + i, &mut values);
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

    fn stored(&self, id: TensorId) -> Result<Stored<'_>> {
        match self.blended.get(&id) {
            Some(payload) => Ok(Stored::new(&self.infos[id], payload)),
            None => self.backbone.stored(id),
        }
    }

    fn has_tiled_columns(&self, id: TensorId) -> bool {
        !self.blended.contains_key(&id) && self.backbone.has_tiled_columns(id)
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
