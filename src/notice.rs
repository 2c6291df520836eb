//! Facts that a caller should know and that are not errors.

use crate::lm::run::DraftNotice;
use std::fmt;

/// A fact about loading or an answer. Its `Display` is one sentence for users.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Notice {
    /// [`DeviceChoice::Auto`](crate::options::DeviceChoice) found no GPU and uses a software adapter.
    SoftwareAdapter,
    /// [`DeviceChoice::Auto`](crate::options::DeviceChoice) found no adapter and uses the CPU reference.
    CpuReference,
    /// The memory limit does not apply to weights on the CPU reference.
    WeightsNotLimited,
    /// The networks of a pipeline do not use all tensors of its file.
    TensorsUnused {
        /// Number of tensors.
        count: usize,
        /// The name of one of them.
        first: String,
    },
    /// The context is longer than the model was trained for.
    BeyondTraining {
        /// Length of the context in tokens.
        ctx: u32,
        /// Length in training.
        trained: usize,
    },
    /// Not all experts fit on the device.
    ExpertsPaged {
        /// Experts per layer that fit at a time.
        slots: usize,
        /// Experts per layer.
        experts: usize,
    },
    /// Speculation is off because the choices of experts are counted.
    NoDraftsWhileCounting,
    /// Speculation is off because experts are paged.
    NoDraftsWhilePaging,
    /// The draft head cannot be used.
    DraftHeadUnused {
        /// The error of planning with it.
        reason: String,
    },
    /// Drafting changed during the answer.
    Drafting(DraftNotice),
    /// A task's mask switches nothing off.
    MaskOpen {
        /// The task.
        task: String,
    },
    /// A task's mask has no measured quality.
    MaskUnmeasured {
        /// The task.
        task: String,
    },
    /// Skills were made for another task than the chosen one.
    TaskOverridden {
        /// Each skill and its task.
        skills: Vec<(String, String)>,
        /// The chosen task, `none` for the full model.
        chosen: String,
    },
    /// The active skills were made for different tasks, so the file's default task is used.
    TasksDiffer {
        /// Each skill and its task, if it has one.
        skills: Vec<(String, Option<String>)>,
    },
    /// The energies of skills cannot be compared, because they come from different layers.
    EnergiesDiffer {
        /// Each skill and its layer.
        skills: Vec<(String, usize)>,
    },
}

impl From<DraftNotice> for Notice {
    fn from(notice: DraftNotice) -> Notice {
        Notice::Drafting(notice)
    }
}

/// Items separated by commas.
fn list<T>(items: &[T], item: impl Fn(&T) -> String) -> String {
    items.iter().map(item).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text: &str = match self {
            Notice::SoftwareAdapter => "no GPU was found; a software adapter is used, which is slow",
            Notice::CpuReference => {
                "no GPU and no software adapter was found; the CPU reference kernels are used, which are slow"
            }
            Notice::WeightsNotLimited => {
                "the memory limit applies to caches and buffers of the CPU reference, not to its weights, which stay in the file"
            }
            Notice::TensorsUnused { count, first } => {
                &format!("{count} tensors of the file are not used, such as '{first}'")
            }
            Notice::BeyondTraining { ctx, trained } => &format!(
                "the model was trained for {trained} positions, the context has {ctx}; text beyond {trained} may be poor"
            ),
            Notice::ExpertsPaged { slots, experts } => &format!(
                "{slots} of {experts} experts a layer fit on the device; the others are loaded when they are chosen"
            ),
            Notice::NoDraftsWhileCounting => "speculation is off while the choices of experts are counted",
            Notice::NoDraftsWhilePaging => "speculation is off because experts are paged",
            Notice::DraftHeadUnused { reason } => &format!("the draft head is not used: {reason}"),
            Notice::Drafting(notice) => &notice.to_string(),
            Notice::MaskOpen { task } => {
                &format!("task '{task}': its mask switches nothing off; this is the full model")
            }
            Notice::MaskUnmeasured { task } => {
                &format!("task '{task}': the quality of the model with this mask was not measured")
            }
            Notice::TaskOverridden { skills, chosen } => {
                let made = |(skill, task): &_| format!("skill '{skill}' was made for task '{task}'");
                &format!("{}, but task '{chosen}' was chosen", list(skills, made))
            }
            Notice::TasksDiffer { skills } => {
                let skills = list(skills, |(skill, task)| match task {
                    Some(task) => format!("'{skill}' for '{task}'"),
                    None => format!("'{skill}' for none"),
                });
                &format!("the skills were made for different tasks ({skills}); the default task is used")
            }
            Notice::EnergiesDiffer { skills } => {
                let skills = list(skills, |(skill, layer)| format!("{skill} after {layer}"));
                &format!("the energies E of skills from different layers are not comparable: {skills}")
            }
        };
        f.write_str(text)
    }
}
