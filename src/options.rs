//! What a caller may choose when loading a model and asking for an answer, with defaults and units.

use crate::error::{Error, Kind, Result, bail};
use crate::kernel::{Kv, MAX_COLUMNS};
use crate::sampling::Sampling;
use std::str::FromStr;

/// Positions planned when the caller does not say, unless the model was trained for fewer.
pub const DEFAULT_CTX: u32 = 4096;
/// Most tokens of an answer when the caller does not say.
pub const DEFAULT_MAX_TOKENS: usize = 512;

/// Which device runs the model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// Hardware if there is any, else a software adapter, else the CPU reference; the placement says which and why.
    #[default]
    Auto,
    /// Hardware, or nothing.
    Gpu,
    /// A software adapter, or nothing.
    Software,
    /// The CPU reference kernels.
    Cpu,
    /// The adapter with this number in the list of devices.
    Index(usize),
    /// The first adapter whose name contains this, whatever the case.
    Name(String),
}

impl FromStr for DeviceChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<DeviceChoice> {
        Ok(match text {
            "auto" => DeviceChoice::Auto,
            "gpu" => DeviceChoice::Gpu,
            "software" => DeviceChoice::Software,
            "cpu" => DeviceChoice::Cpu,
            "" => return Err(Error::new(Kind::Usage, "an empty device name")),
            other => match other.parse() {
                Ok(index) => DeviceChoice::Index(index),
                Err(_) => DeviceChoice::Name(other.to_string()),
            },
        })
    }
}

/// Drafting of tokens, which changes how fast an answer comes and never the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Speculation {
    /// With the model's draft head, where it has one, as long as that is faster than without.
    #[default]
    Auto,
    /// None.
    Off,
    /// So many drafts a round, 1 to 7: from the model's draft head, else from what followed the same tokens earlier in the
    /// conversation.
    Drafts(u32),
}

impl FromStr for Speculation {
    type Err = Error;

    fn from_str(text: &str) -> Result<Speculation> {
        match (text, text.parse()) {
            ("auto", _) => Ok(Speculation::Auto),
            ("off", _) => Ok(Speculation::Off),
            (_, Ok(drafts)) if (1..MAX_COLUMNS).contains(&drafts) => Ok(Speculation::Drafts(drafts)),
            _ => Err(Error::new(
                Kind::Usage,
                format!("wanted auto, off, or 1 to {} drafts, found '{text}'", MAX_COLUMNS - 1),
            )),
        }
    }
}

/// Which task's mask is in force.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TaskChoice {
    /// Open: that of the task which the active skill goes with; where there is no such skill, that of the file's default
    /// task, if there is a mask of that name; else none.
    #[default]
    Default,
    /// None: the full model.
    Full,
    /// The mask of this name.
    Named(String),
}

impl FromStr for TaskChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<TaskChoice> {
        Ok(match text {
            "none" => TaskChoice::Full,
            "" => bail!(Usage, "an empty name of a task; none runs the full model"),
            name => TaskChoice::Named(name.into()),
        })
    }
}

/// Which tensors take the place of the backbone's.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Overlay {
    /// None.
    #[default]
    Backbone,
    /// Those of the skill with this id.
    Skill(String),
    /// Σ wᵢ·Tᵢ over these skills, where Tᵢ is the skill's tensor, or the backbone's that it does not replace. The weights are
    /// not negative and make 1 together, to a thousandth.
    Blend(Vec<(String, f32)>),
}

impl Overlay {
    /// The blend that `a:0.25,b:0.75` means. Errors: `Usage`.
    pub fn blend(text: &str) -> Result<Overlay> {
        let part = |part: &str| -> Result<(String, f32)> {
            let (id, weight) = part.trim().rsplit_once(':').unwrap_or((part, ""));
            match weight.parse() {
                Ok(weight) => Ok((id.to_owned(), weight)),
                Err(_) => bail!(Usage, "wanted skills and weights like a:0.25,b:0.75, found '{part}'"),
            }
        };
        text.split(',').map(part).collect::<Result<_>>().map(Overlay::Blend)
    }
}

/// How a model is loaded.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Which device runs it.
    pub device: DeviceChoice,
    /// Positions of the context; `None` = 4096 or what the model was trained for, if that is less; 0 = the latter.
    pub ctx: Option<u32>,
    /// Type of cached keys and values.
    pub kv: Kv,
    /// Most device memory to use, in MiB; `None` = what the device has.
    pub vram_mb: Option<u64>,
    /// Compile shaders with bounds checks.
    pub checked_shaders: bool,
    /// Whether logits of every prompt position will be asked for.
    pub all_logits: bool,
    /// Drafting of tokens.
    pub speculation: Speculation,
    /// The task whose mask is in force.
    pub task: TaskChoice,
    /// Whether to count how often each expert of a mixture is chosen.
    pub count_routes: bool,
    /// The skill that is active, or several of them.
    pub overlay: Overlay,
}

impl LoadOptions {
    /// Positions of the context, for a model that was trained for so many, if its file says so.
    ///
    /// Errors: `Usage` for 0 when the file does not say it.
    pub fn positions(&self, trained: Option<usize>) -> Result<u32> {
        let trained = trained.map(|positions| u32::try_from(positions).unwrap_or(u32::MAX));
        match (self.ctx, trained) {
            (Some(0), Some(trained)) => Ok(trained),
            (Some(0), None) => bail!(
                Usage,
                "the file does not say how long its context is; give a --ctx above 0"
            ),
            (Some(ctx), _) => Ok(ctx),
            (None, trained) => Ok(trained.unwrap_or(DEFAULT_CTX).min(DEFAULT_CTX)),
        }
    }
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            device: DeviceChoice::Auto,
            ctx: None,
            kv: Kv::F16,
            vram_mb: None,
            checked_shaders: false,
            all_logits: false,
            speculation: Speculation::Auto,
            task: TaskChoice::Default,
            count_routes: false,
            overlay: Overlay::Backbone,
        }
    }
}

/// How an answer is made.
#[derive(Clone, Debug, Default)]
pub struct AnswerOptions {
    /// How tokens are chosen; `None` = the model's own defaults.
    pub sampling: Option<Sampling>,
    /// Most tokens; `None` = 512.
    pub max_tokens: Option<usize>,
    /// Texts that end the answer and are not part of it.
    pub stop: Vec<String>,
    /// Further variables for the chat template, as in `{"enable_thinking": false}`.
    pub template_kwargs: serde_json::Map<String, serde_json::Value>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blends_are_ids_with_weights() {
        let blend = |text: &str| Overlay::blend(text);
        let wanted = Overlay::Blend(vec![("a".into(), 0.25), ("b-2".into(), 0.75)]);
        assert_eq!(blend("a:0.25, b-2:0.75"), Ok(wanted));
        for bad in ["", "a", "a:", "a:x", "a:1,", "0.5"] {
            assert_eq!(blend(bad).unwrap_err().kind, Kind::Usage, "{bad}");
        }
    }
}
