//! The skills of a model: the tensors of an overlay, and the skills that prompts can choose among.

use crate::budget::available_memory;
use crate::error::{Result, bail};
use crate::notice::Notice;
use crate::options::Overlay;
use crate::routing;
use crate::source::{ModelSource, Selection, Skill, TensorId, Tensors};
use std::path::Path;
use std::sync::Arc;

/// The active skills.
pub(super) struct ActiveOverlay {
    pub overlay: Overlay,
    /// The tensors that differ from the backbone.
    pub replaced: Vec<TensorId>,
}

impl ActiveOverlay {
    /// Also returns the tensors of the model with these skills.
    ///
    /// Errors: `Usage` for unknown skills, with the ids of all skills; those of blending.
    pub fn new(source: &ModelSource, overlay: &Overlay) -> Result<(ActiveOverlay, Arc<dyn Tensors>)> {
        let (replaced, tensors): (_, Arc<dyn Tensors>) = match overlay {
            Overlay::Backbone => (Vec::new(), Arc::new(source.with_skill(None)?)),
            Overlay::Skill(id) => {
                let view = source.with_skill(Some(id))?;
                (view.replaced().to_vec(), Arc::new(view))
            }
            Overlay::Blend(weights) => {
                let available = available_memory(Path::new("/")).unwrap_or(u64::MAX);
                let view = source.with_blend(weights, available)?;
                (view.blended(), Arc::new(view))
            }
        };
        let overlay = overlay.clone();
        Ok((ActiveOverlay { overlay, replaced }, tensors))
    }
}

/// The tensors of a model with these skills. Errors: as [`Engine::set_overlay`](super::load::Engine::set_overlay).
pub fn overlaid(source: &ModelSource, overlay: &Overlay) -> Result<Arc<dyn Tensors>> {
    ActiveOverlay::new(source, overlay).map(|(_, tensors)| tensors)
}

/// The skills that were fitted to example prompts.
///
/// Errors: `Usage` when there is none; `UnsupportedFeature` when one uses another metric than [`routing::METRIC`].
pub fn routable(source: &ModelSource) -> Result<Vec<(&Skill, &Selection)>> {
    let skills = source.skills.iter();
    let skills: Vec<_> = skills
        .filter_map(|skill| Some((skill, skill.selection.as_ref()?)))
        .collect();
    if skills.is_empty() {
        bail!(
            Usage,
            "no skill of the file was fitted to example prompts (`skill fit`)"
        );
    }
    for (skill, selection) in &skills {
        if let Some(metric) = selection.metric.as_ref().filter(|metric| *metric != routing::METRIC) {
            bail!(
                UnsupportedFeature,
                "skill '{}' uses the metric '{metric}', expected '{}'",
                skill.id,
                routing::METRIC
            );
        }
    }
    Ok(skills)
}

/// How well a skill fits a prompt.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct Route {
    /// The id of the skill.
    pub id: String,
    /// The share of the prompt's φ outside of the skill's subspace, see [`routing::energy`].
    pub energy: f64,
    /// The layer whose output is φ.
    pub phi_layer: usize,
}

/// A notice if the skills, given with their layers, have energies from different layers. The share of φ outside of a subspace
/// depends on the layer, so the smallest energy need not be the best fit.
pub fn incomparable<'a>(layers: impl IntoIterator<Item = (&'a str, usize)>) -> Option<Notice> {
    let skills: Vec<(String, usize)> = layers.into_iter().map(|(id, layer)| (id.to_owned(), layer)).collect();
    let differ = skills.windows(2).any(|pair| pair[0].1 != pair[1].1);
    differ.then_some(Notice::EnergiesDiffer { skills })
}
