//! Skills of a model that is loaded: which are active, the change to others, and which one a prompt asks for.

use super::Engine;
use crate::budget::available_memory;
use crate::container::{BlendView, Container, Selection, Skill, SkillView, TensorId, Tensors};
use crate::error::{Result, bail};
use crate::options::Overlay;
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

/// The skills that say which prompts are for them. Errors: `Usage` when there is none.
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
    Ok(skills)
}

/// How well a skill fits a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    /// The skill.
    pub id: String,
    /// How much of the prompt's φ lies outside of the skill's subspace: see [`routing::energy`].
    pub energy: f64,
}

impl Engine {
    /// Makes a skill the active one, or with `None` the bare backbone. See [`Engine::set_overlay`].
    pub fn set_skill(&mut self, skill: Option<&str>) -> Result<()> {
        self.set_overlay(&match skill {
            None => Overlay::Backbone,
            Some(id) => Overlay::Skill(id.into()),
        })
    }

    /// Changes which skills are active. Only weights that hold a tensor of the skill before or of the new one move: into the
    /// buffers that are there where types and so layouts agree, else into new ones. The conversation's cache is forgotten,
    /// unless that is the choice already.
    ///
    /// Errors: `Usage` for a skill that there is not, with those that there are; `MissingTensor` and `Parse` for one that does
    /// not fit; `OutOfMemory`, the device's. After one all is as it was, as far as the device still works.
    pub fn set_overlay(&mut self, overlay: &Overlay) -> Result<()> {
        if *overlay == self.overlay.overlay {
            return Ok(());
        }
        let (next, tensors) = Active::new(&self.container, overlay)?;
        let mut changed = [self.overlay.touched.as_slice(), &next.touched].concat();
        changed.sort_unstable();
        changed.dedup();
        let arch = &self.container.header().arch;
        if let Err(err) = self.placed.replace(arch, tensors, &changed) {
            // Where that fails too, the executor runs nothing that is half one and half the other.
            let _ = Active::new(&self.container, &self.overlay.overlay)
                .and_then(|(_, before)| self.placed.replace(arch, before, &changed));
            return Err(err);
        }
        self.overlay = next;
        Ok(())
    }

    /// How well each skill that says what its prompts are like fits a prompt, the best first: the prompt's tokens as they are,
    /// run through the backbone as far as the last layer that a skill looks at. If another skill is active, the backbone is
    /// from now on. The cache is forgotten.
    ///
    /// Errors: `Usage` when no skill says it, or when it is cancelled; `ContextFull`, `NonFinite`, the device's.
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
            });
        }
        // Of equals the first of the file.
        routes.sort_by(|a, b| a.energy.total_cmp(&b.energy));
        Ok(routes)
    }

    /// φ of a prompt, for each of `layers` in ascending order: the mean over its tokens of the backbone's hidden state behind the
    /// layer. Of state and errors what [`Engine::route`] says is true.
    pub fn mean_hidden(&mut self, prompt: &[u32], layers: &[usize], cancel: &Cancel) -> Result<Vec<Vec<f64>>> {
        self.set_overlay(&Overlay::Backbone)?;
        self.placed.session.mean_hidden(prompt, layers, cancel)
    }
}
