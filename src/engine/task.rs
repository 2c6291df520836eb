//! Task masks of a model that is loaded: which one is in force, and what should be said about it.

use super::place::Placed;
use crate::container::{Mask, Masks};
use crate::error::Result;
use crate::options::TaskChoice;

/// The mask that a choice means. Errors: `Usage` with the names that there are.
pub(super) fn chosen<'m>(masks: &'m Masks, choice: &TaskChoice) -> Result<Option<&'m Mask>> {
    match choice {
        TaskChoice::Default => Ok(masks.default_mask()),
        TaskChoice::Full => Ok(None),
        TaskChoice::Named(name) => masks.find(name).map(Some),
    }
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
}
