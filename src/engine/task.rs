//! Task masks of a model that is loaded: which one is in force, and what should be said about it.

use super::Engine;
use super::place::Placed;
use crate::container::{Container, Mask, Masks, NO_TASK, Skill};
use crate::error::Result;
use crate::options::{Overlay, TaskChoice};
use crate::session::Session;

/// The mask that a choice means. Errors: `Usage` with the names that there are.
pub(super) fn chosen<'m>(masks: &'m Masks, choice: &TaskChoice) -> Result<Option<&'m Mask>> {
    match choice {
        TaskChoice::Default => Ok(masks.default_mask()),
        TaskChoice::Full => Ok(None),
        TaskChoice::Named(name) => masks.find(name).map(Some),
    }
}

/// What a choice of a task means while these skills are active, and what should be said about it.
///
/// Whoever named a task, or none, gets that. An open choice is that of the skill (section 9 of the format): of several, where
/// all of them go with the same task; where they do not, or where no skill is active, it stays open, and the file decides.
///
/// Errors: `Parse` when the choice is open and an active skill goes with a task that has no mask.
pub fn task_with(
    container: &Container,
    overlay: &Overlay,
    choice: &TaskChoice,
) -> Result<(TaskChoice, Option<String>)> {
    let is_active = |skill: &&Skill| match overlay {
        Overlay::Backbone => false,
        Overlay::Skill(id) => *id == skill.id,
        Overlay::Blend(weights) => weights.iter().any(|(id, weight)| *id == skill.id && *weight > 0.0),
    };
    let active: Vec<&Skill> = container.skills().iter().filter(is_active).collect();
    let chosen = match choice {
        TaskChoice::Default => None,
        TaskChoice::Full => Some(NO_TASK),
        TaskChoice::Named(name) => Some(name.as_str()),
    };
    if let Some(chosen) = chosen {
        let overruled = active.iter().filter_map(|skill| {
            let own = skill.input_mask_task.as_deref().filter(|own| *own != chosen)?;
            Some(format!("skill '{}' goes with the task '{own}'", skill.id))
        });
        let overruled: Vec<String> = overruled.collect();
        let notice = format!("{}, but '{chosen}' was asked for", overruled.join(", "));
        return Ok((choice.clone(), Some(notice).filter(|_| !overruled.is_empty())));
    }
    let masks = container.masks();
    let tasks = active.iter().map(|skill| skill.mask_task(masks));
    let tasks = tasks.collect::<Result<Vec<_>>>()?;
    if tasks.windows(2).any(|pair| pair[0] != pair[1]) {
        let each = active.iter().zip(&tasks).map(|(skill, task)| match task {
            Some(task) => format!("'{}' with '{task}'", skill.id),
            None => format!("'{}' with no certain one", skill.id),
        });
        let each: Vec<String> = each.collect();
        let notice = format!("the skills go with different tasks, {}: none decides", each.join(", "));
        return Ok((TaskChoice::Default, Some(notice)));
    }
    let task = match tasks.first().copied().flatten() {
        None => TaskChoice::Default,
        Some(NO_TASK) => TaskChoice::Full,
        Some(name) => TaskChoice::Named(name.into()),
    };
    Ok((task, None))
}

/// Two things that should be said, as one.
pub(super) fn together(first: Option<String>, second: Option<String>) -> Option<String> {
    first.into_iter().chain(second).reduce(|a, b| format!("{a}; {b}"))
}

/// The task in force and those that something was said about.
#[derive(Clone, Debug, Default)]
pub(super) struct Task {
    pub active: Option<String>,
    told: Vec<String>,
}

impl Task {
    /// Notes that a mask, or none, comes into force. What should be said about it, once for each task.
    pub fn enter(&mut self, mask: Option<&Mask>) -> Option<String> {
        self.active = mask.map(|mask| mask.name.clone());
        let mask = mask?;
        if self.told.contains(&mask.name) {
            return None;
        }
        self.told.push(mask.name.clone());
        let mut said = Vec::new();
        if mask.is_open() {
            said.push("its mask is open everywhere, so this is the full model");
        }
        if mask.quality.is_none() {
            said.push("how good the model is with its mask was not measured");
        }
        match said.is_empty() {
            true => None,
            false => Some(format!("task '{}': {}", mask.name, said.join(", and "))),
        }
    }
}

impl Placed {
    /// The task whose mask is in force.
    pub fn task(&self) -> Option<&str> {
        self.task.active.as_deref()
    }

    /// Puts another task's mask in force. No weights move, nothing is compiled; what is cached is forgotten, unless the
    /// choice is the one in force. Returns what should be said about the task, once.
    ///
    /// Errors: `Usage` for a task that there is not, with those that there are; `UnsupportedModel` for a mask that restricts
    /// what no kernel can leave out; the device's. After `Usage` and `UnsupportedModel` all is as it was.
    pub fn set_task(&mut self, choice: &TaskChoice) -> Result<Option<String>> {
        let mask = chosen(&self.model.masks, choice)?;
        if mask.map(|mask| mask.name.as_str()) == self.task.active.as_deref() {
            return Ok(None);
        }
        let plan = self.session.plan().with_mask(mask)?;
        let notice = self.task.enter(mask);
        self.session.select(plan)?;
        Ok(notice)
    }

    /// Does `work` while no mask is in force. What is cached is forgotten. Errors: those of `work`, the device's.
    pub(super) fn unmasked<T>(&mut self, work: impl FnOnce(&mut Session) -> Result<T>) -> Result<T> {
        let masked = self.session.plan().clone();
        if self.task.active.is_none() {
            return work(&mut self.session);
        }
        self.session.select(masked.with_mask(None)?)?;
        let done = work(&mut self.session);
        self.session.select(masked)?;
        done
    }
}

impl Engine {
    /// The task whose mask is in force.
    pub fn task(&self) -> Option<&str> {
        self.placed.task()
    }

    /// Puts a task's mask in force, or with `None` the full model, whatever skill is active. See [`Engine::choose_task`].
    pub fn set_task(&mut self, task: Option<&str>) -> Result<Option<String>> {
        self.choose_task(&match task {
            None => TaskChoice::Full,
            Some(name) => TaskChoice::Named(name.into()),
        })
    }

    /// Chooses the mask that is in force, from now on: also with other skills, unless the choice is open, which leaves it to
    /// them and to the file. No weights move, nothing is compiled; the conversation's cache is forgotten, unless that mask is in
    /// force already. Returns what should be said about it; about a task, once.
    ///
    /// Errors: `Usage` for a task that there is not, with those that there are; `Parse` for one that a skill names and there is
    /// not; `UnsupportedModel` for a mask that restricts what no kernel can leave out; the device's. After the first three all
    /// is as it was.
    pub fn choose_task(&mut self, choice: &TaskChoice) -> Result<Option<String>> {
        let (task, notice) = task_with(&self.container, &self.overlay.overlay, choice)?;
        let of_mask = self.placed.set_task(&task)?;
        self.task = choice.clone();
        Ok(together(notice, of_mask))
    }
}
