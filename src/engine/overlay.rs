//! Skills of a model that is loaded: which are active, the change to others, and which one a prompt asks for.

use super::Engine;
use super::task::{task_with, together};
use crate::budget::available_memory;
use crate::container::{BlendView, Container, Selection, Skill, SkillView, TensorId, Tensors};
use crate::error::{Result, bail};
use crate::options::{Overlay, TaskChoice};
use crate::routing;
use crate::session::Cancel;
use std::path::Path;
use std::sync::Arc;

/// What is active, and the tensors in which it differs from the backbone.
pub(super) struct Active {
    pub overlay: Overlay,
    touched: Vec<TensorId>,
}

impl Active {
    /// Errors: `Usage` for skills that there are not, with those that there are; those of blending.
    pub fn new(container: &Arc<Container>, overlay: &Overlay) -> Result<(Active, Arc<dyn Tensors>)> {
        let (touched, tensors): (_, Arc<dyn Tensors>) = match overlay {
            Overlay::Backbone => (Vec::new(), Arc::new(SkillView::new(container.clone(), None)?)),
            Overlay::Skill(id) => {
                let view = SkillView::new(container.clone(), Some(id))?;
                (view.replaced().to_vec(), Arc::new(view))
            }
            Overlay::Blend(weights) => {
                let room = available_memory(Path::new("/")).unwrap_or(u64::MAX);
                let view = BlendView::new(container.clone(), weights, room)?;
                (view.blended(), Arc::new(view))
            }
        };
        let overlay = overlay.clone();
        Ok((Active { overlay, touched }, tensors))
    }
}

/// The tensors of a model with these skills, for those who make plans themselves. Errors: as [`Engine::set_overlay`].
pub fn overlaid(container: &Arc<Container>, overlay: &Overlay) -> Result<Arc<dyn Tensors>> {
    Active::new(container, overlay).map(|(_, tensors)| tensors)
}

/// The skills that say which prompts are for them. Errors: `Usage` when there is none; `UnsupportedFeature` when one of them
/// says it by another metric than [`routing::METRIC`].
pub fn routable(container: &Container) -> Result<Vec<(&Skill, &Selection)>> {
    let skills = container.skills().iter();
    let skills: Vec<_> = skills
        .filter_map(|skill| Some((skill, skill.selection.as_ref()?)))
        .collect();
    if skills.is_empty() {
        bail!(
            Usage,
            "no skill of the file says which prompts are for it; `skill fit` finds that out from examples"
        );
    }
    let other = |(skill, selection): &(&Skill, &Selection)| {
        let metric = selection.metric.clone().filter(|metric| metric != routing::METRIC)?;
        Some((skill.id.clone(), metric))
    };
    if let Some((id, metric)) = skills.iter().find_map(other) {
        bail!(
            UnsupportedFeature,
            "skill '{id}' is to be chosen by the metric '{metric}', and only '{}' is known",
            routing::METRIC
        );
    }
    Ok(skills)
}

/// How well a skill fits a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    /// The skill.
    pub id: String,
    /// How much of the prompt's φ lies outside of the skill's subspace: see [`routing::energy`].
    pub energy: f64,
    /// The layer behind which it was measured.
    pub phi_layer: usize,
}

/// What should be said about energies that were not measured behind the same layer, with the layers: how much of φ a subspace
/// leaves depends on the layer, so that the smallest of them need not be that of the best fit.
pub fn incomparable<'a>(layers: impl IntoIterator<Item = (&'a str, usize)>) -> Option<String> {
    let layers: Vec<(&str, usize)> = layers.into_iter().collect();
    if layers.windows(2).all(|pair| pair[0].1 == pair[1].1) {
        return None;
    }
    let each: Vec<String> = layers
        .iter()
        .map(|(id, layer)| format!("{id} behind {layer}"))
        .collect();
    Some(format!(
        "the skills were fitted behind different layers, so that their E cannot well be compared: {}",
        each.join(", ")
    ))
}

impl Engine {
    /// Makes a skill the active one, or with `None` the bare backbone. See [`Engine::set_overlay`].
    pub fn set_skill(&mut self, skill: Option<&str>) -> Result<Option<String>> {
        self.set_overlay(&match skill {
            None => Overlay::Backbone,
            Some(id) => Overlay::Skill(id.into()),
        })
    }

    /// Changes which skills are active. Only weights that hold a tensor of the skill before or of the new one move: into the
    /// buffers that are there where types and so layouts agree, else into new ones. The conversation's cache is forgotten,
    /// unless that is the choice already. The mask in force becomes that of the skill's task, unless one was chosen; without
    /// such a skill it is again that of the file. Returns what should be said about the task.
    ///
    /// Errors: `Usage` for a skill that there is not, with those that there are; `MissingTensor` and `Parse` for one that does
    /// not fit, or goes with a mask that there is not; `OutOfMemory`, the device's. After one all is as it was, as far as the device still works.
    pub fn set_overlay(&mut self, overlay: &Overlay) -> Result<Option<String>> {
        let choice = self.task.clone();
        self.choose(overlay, &choice)
    }

    /// Changes which skills are active and chooses the mask, both at once, so that nothing is said of what lies between. See
    /// [`Engine::set_overlay`] and [`Engine::choose_task`].
    pub fn choose(&mut self, overlay: &Overlay, choice: &TaskChoice) -> Result<Option<String>> {
        if *overlay == self.overlay.overlay {
            return match *choice == self.task {
                true => Ok(None),
                false => self.choose_task(choice),
            };
        }
        let (task, notice) = task_with(&self.container, overlay, choice)?;
        let before = match self.task() {
            None => TaskChoice::Full,
            Some(name) => TaskChoice::Named(name.into()),
        };
        let (next, tensors) = Active::new(&self.container, overlay)?;
        let mut changed = [self.overlay.touched.as_slice(), &next.touched].concat();
        changed.sort_unstable();
        changed.dedup();
        let arch = &self.container.header().arch;
        match self.placed.replace(arch, tensors, &changed, &task) {
            Ok(of_mask) => {
                self.overlay = next;
                self.task = choice.clone();
                Ok(together(notice, of_mask))
            }
            Err(err) => {
                // Where that fails too, the executor runs nothing that is half one and half the other.
                let _ = Active::new(&self.container, &self.overlay.overlay)
                    .and_then(|(_, tensors)| self.placed.replace(arch, tensors, &changed, &before));
                Err(err)
            }
        }
    }

    /// How well each skill that says what its prompts are like fits a prompt, the best first: the prompt's tokens as they are,
    /// run through the backbone, without a mask, as far as the last layer that a skill looks at. If another skill is active,
    /// the backbone is from now on. The cache is forgotten.
    ///
    /// Errors: those of [`routable`]; `Interrupted`, `ContextFull`, `NonFinite`, the device's.
    pub fn route(&mut self, prompt: &[u32], cancel: &Cancel) -> Result<Vec<Route>> {
        let container = self.container.clone();
        let skills = routable(&container)?;
        let mut layers: Vec<usize> = skills.iter().map(|(_, selection)| selection.phi_layer).collect();
        layers.sort_unstable();
        layers.dedup();
        let means = self.mean_hidden(prompt, &layers, cancel)?;
        let mut routes = Vec::new();
        for (skill, selection) in skills {
            let at = layers.partition_point(|&layer| layer < selection.phi_layer);
            let energy = routing::energy(selection, &means[at]).map_err(|err| err.context(&skill.id))?;
            routes.push(Route {
                id: skill.id.clone(),
                energy,
                phi_layer: selection.phi_layer,
            });
        }
        // Of equals the first of the file.
        routes.sort_by(|a, b| a.energy.total_cmp(&b.energy));
        Ok(routes)
    }

    /// φ of a prompt, for each of `layers` in ascending order: the mean over its tokens of the backbone's hidden state behind the
    /// layer, without a mask, so that no choice of a task changes what a prompt is like. Of state and errors what [`Engine::route`] says is true.
    pub fn mean_hidden(&mut self, prompt: &[u32], layers: &[usize], cancel: &Cancel) -> Result<Vec<Vec<f64>>> {
        let notice = self.set_overlay(&Overlay::Backbone)?;
        self.unsaid.extend(notice);
        self.placed
            .unmasked(|session| session.mean_hidden(prompt, layers, cancel))
    }
}
