//! Changes of the active skills and the active task.

use super::load::Engine;
use super::skills::{ActiveOverlay, Route, routable};
use super::task::{named, resolve_task};
use crate::error::Result;
use crate::lm::run::Cancel;
use crate::notice::Notice;
use crate::options::{Overlay, TaskChoice};
use crate::routing;
use crate::source::{Selection, Skill};

impl Engine {
    /// The active skills.
    pub fn overlay(&self) -> &Overlay {
        &self.overlay.overlay
    }

    /// The task whose mask is active.
    pub fn task(&self) -> Option<&str> {
        self.loaded.task()
    }

    /// Activates a skill, or with `None` the backbone. See [`Engine::set_overlay`].
    pub fn set_skill(&mut self, skill: Option<&str>) -> Result<Vec<Notice>> {
        self.set_overlay(&match skill {
            None => Overlay::Backbone,
            Some(id) => Overlay::Skill(id.into()),
        })
    }

    /// Activates other skills. Uploads only the weights with tensors of the skills before or of the new ones: into the same
    /// buffers where the types agree, else into new ones. Clears the cache, unless these skills are already active. If the
    /// choice of a task is [`TaskChoice::Default`], the active task becomes that of the new skills, else that of the file.
    /// Returns notices.
    ///
    /// Errors: `Usage` for an unknown skill, with the ids of all skills; `MissingTensor` and `Parse` for a skill that does
    /// not fit the model, or whose task has no mask; `OutOfMemory`; those of the device. After an error nothing has changed,
    /// as long as the device works.
    pub fn set_overlay(&mut self, overlay: &Overlay) -> Result<Vec<Notice>> {
        let choice = self.task.clone();
        self.choose(overlay, &choice)
    }

    /// Activates a task's mask, or with `None` the full model. See [`Engine::choose_task`].
    pub fn set_task(&mut self, task: Option<&str>) -> Result<Vec<Notice>> {
        self.choose_task(&named(task))
    }

    /// Chooses the task for the active skills and for later ones. Moves no weights and compiles nothing. Clears the cache,
    /// unless the mask is already active. Returns notices.
    ///
    /// Errors: `Usage` for an unknown task, with the names of all tasks; `Parse` if the task of a skill has no mask;
    /// `UnsupportedModel` for a mask that the kernels cannot apply; those of the device. After the first three nothing has
    /// changed.
    pub fn choose_task(&mut self, choice: &TaskChoice) -> Result<Vec<Notice>> {
        let (task, notice) = resolve_task(&self.source, self.overlay(), choice)?;
        let mut notices: Vec<Notice> = notice.into_iter().collect();
        notices.extend(self.loaded.set_task(&task)?);
        self.task = choice.clone();
        Ok(notices)
    }

    /// Changes skills and task in one step, without notices about the combinations in between. See [`Engine::set_overlay`]
    /// and [`Engine::choose_task`].
    pub fn choose(&mut self, overlay: &Overlay, choice: &TaskChoice) -> Result<Vec<Notice>> {
        if *overlay == self.overlay.overlay {
            return match *choice == self.task {
                true => Ok(Vec::new()),
                false => self.choose_task(choice),
            };
        }
        let (task, notice) = resolve_task(&self.source, overlay, choice)?;
        let before = named(self.task());
        let (next, tensors) = ActiveOverlay::new(&self.source, overlay)?;
        let mut changed = [self.overlay.replaced.as_slice(), &next.replaced].concat();
        changed.sort_unstable();
        changed.dedup();
        let arch = &self.source.arch;
        match self.loaded.replace(arch, tensors, &changed, &task) {
            Ok(of_task) => {
                self.overlay = next;
                self.task = choice.clone();
                Ok(notice.into_iter().chain(of_task).collect())
            }
            Err(err) => {
                // Restores the weights. If that fails too, the executor refuses to run with a mixture of both.
                let _ = ActiveOverlay::new(&self.source, &self.overlay.overlay)
                    .and_then(|(_, tensors)| self.loaded.replace(arch, tensors, &changed, &before));
                Err(err)
            }
        }
    }

    /// How well each fitted skill fits a prompt, the best first. The prompt gets no template. It runs through the backbone
    /// without a mask, up to the last layer that a skill compares. Activates the backbone and clears the cache.
    ///
    /// Errors: those of [`routable`]; `Interrupted`, `ContextFull`, `NonFinite`, those of the device.
    pub fn route(&mut self, prompt: &[u32], cancel: &Cancel) -> Result<Vec<Route>> {
        let source = self.source.clone();
        let skills = routable(&source)?;
        let mut layers: Vec<usize> = skills.iter().map(|(_, selection)| selection.phi_layer).collect();
        layers.sort_unstable();
        layers.dedup();
        let means = self.mean_hidden(prompt, &layers, cancel)?;
        let route = |(skill, selection): (&Skill, &Selection)| {
            let phi_layer = selection.phi_layer;
            let at = layers.partition_point(|&layer| layer < phi_layer);
            let energy = routing::energy(selection, &means[at]).map_err(|err| err.context(&skill.id))?;
            let id = skill.id.clone();
            Ok(Route { id, energy, phi_layer })
        };
        let mut routes = skills.into_iter().map(route).collect::<Result<Vec<_>>>()?;
        // A stable sort: skills with the same energy stay in the order of the file.
        routes.sort_by(|a, b| a.energy.total_cmp(&b.energy));
        Ok(routes)
    }

    /// φ of a prompt for each of `layers`, in ascending order: the mean over the tokens of the layer's output, in the
    /// backbone without a mask, so that φ does not depend on the task. Side effects and errors: as [`Engine::route`].
    pub fn mean_hidden(&mut self, prompt: &[u32], layers: &[usize], cancel: &Cancel) -> Result<Vec<Vec<f64>>> {
        let notices = self.set_overlay(&Overlay::Backbone)?;
        self.pending_notices.extend(notices);
        self.loaded
            .unmasked(|session| session.mean_hidden(prompt, layers, cancel))
    }
}
