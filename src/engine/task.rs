//! The choice of a task's mask.

use crate::error::Result;
use crate::notice::Notice;
use crate::options::{Overlay, TaskChoice};
use crate::source::{Mask, Masks, ModelSource, NO_TASK, Skill};

/// The mask that a choice names; `None` is the full model. Errors: `Usage` with the names of all masks.
pub fn find_mask<'m>(masks: &'m Masks, choice: &TaskChoice) -> Result<Option<&'m Mask>> {
    match choice {
        TaskChoice::Default => Ok(masks.default_mask()),
        TaskChoice::Full => Ok(None),
        TaskChoice::Named(name) => masks.find(name).map(Some),
    }
}

/// The choice of the task with this name, or with `None` of the full model.
pub(super) fn named(task: Option<&str>) -> TaskChoice {
    task.map_or(TaskChoice::Full, |name| TaskChoice::Named(name.into()))
}

/// The task of a choice while `overlay` is active.
///
/// A named task, or the full model, stays as it is. [`TaskChoice::Default`] becomes the task of the active skill (section 9
/// of the format). With several skills it does so only if all of them have the same task, else it stays.
///
/// Also returns a notice if skills were made for another task. Errors: `Parse` when the task of a skill has no mask.
pub fn resolve_task(
    source: &ModelSource,
    overlay: &Overlay,
    choice: &TaskChoice,
) -> Result<(TaskChoice, Option<Notice>)> {
    let is_active = |skill: &&Skill| match overlay {
        Overlay::Backbone => false,
        Overlay::Skill(id) => *id == skill.id,
        Overlay::Blend(weights) => weights.iter().any(|(id, weight)| *id == skill.id && *weight > 0.0),
    };
    let active: Vec<&Skill> = source.skills.iter().filter(is_active).collect();
    match choice {
        TaskChoice::Default => default_task(source, &active),
        TaskChoice::Full => Ok((choice.clone(), overridden(&active, NO_TASK))),
        TaskChoice::Named(name) => Ok((choice.clone(), overridden(&active, name))),
    }
}

/// The notice about skills that were made for another task.
fn overridden(active: &[&Skill], chosen: &str) -> Option<Notice> {
    let skills = active.iter().filter_map(|skill| {
        let task = skill.input_mask_task.as_ref().filter(|task| *task != chosen)?;
        Some((skill.id.clone(), task.clone()))
    });
    let skills: Vec<(String, String)> = skills.collect();
    let chosen = chosen.to_owned();
    (!skills.is_empty()).then_some(Notice::TaskOverridden { skills, chosen })
}

/// The task of the active skills.
fn default_task(source: &ModelSource, active: &[&Skill]) -> Result<(TaskChoice, Option<Notice>)> {
    let masks = source.masks();
    let tasks = active.iter().map(|skill| skill.mask_task(masks));
    let tasks = tasks.collect::<Result<Vec<_>>>()?;
    if tasks.windows(2).any(|pair| pair[0] != pair[1]) {
        let skills = active.iter().zip(&tasks);
        let skills = skills.map(|(skill, task)| (skill.id.clone(), task.map(str::to_owned)));
        let skills = skills.collect();
        return Ok((TaskChoice::Default, Some(Notice::TasksDiffer { skills })));
    }
    let task = tasks.first().copied().flatten();
    let task = task.map(|task| named(Some(task).filter(|&task| task != NO_TASK)));
    Ok((task.unwrap_or_default(), None))
}

/// The active task, and the tasks whose notices were reported.
#[derive(Clone, Debug, Default)]
pub(super) struct ActiveTask {
    pub name: Option<String>,
    reported: Vec<String>,
}

impl ActiveTask {
    /// Activates the task of a mask. Returns its notices, the first time only.
    pub fn activate(&mut self, mask: Option<&Mask>) -> Vec<Notice> {
        self.name = mask.map(|mask| mask.name.clone());
        let Some(mask) = mask.filter(|mask| !self.reported.contains(&mask.name)) else {
            return Vec::new();
        };
        let task = mask.name.clone();
        self.reported.push(task.clone());
        let open = mask.is_open().then(|| Notice::MaskOpen { task: task.clone() });
        let unmeasured = mask.quality.is_none().then_some(Notice::MaskUnmeasured { task });
        open.into_iter().chain(unmeasured).collect()
    }
}
