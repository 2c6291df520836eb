//! Options of loading a model and of answering, with defaults and units.

use crate::error::{Error, Result, bail};
use crate::op::MAX_WIDTH;
use std::str::FromStr;

pub use crate::model::HeadInput;
pub use crate::op::Kv;
pub use crate::sampling::Sampling;

/// The default length of the context in tokens, unless the model was trained for a shorter one.
pub const DEFAULT_CTX: u32 = 4096;
/// The default of [`AnswerOptions::max_tokens`].
pub const DEFAULT_MAX_TOKENS: usize = 512;

/// Defines a struct of options with a setter for each field.
macro_rules! options {
    ($(#[doc = $doc:literal])* $options:ident { $($(#[doc = $about:literal])* $field:ident: $type:ty,)+ }) => {
        $(#[doc = $doc])*
        #[derive(Clone, Debug, Default)]
        #[non_exhaustive]
        pub struct $options {
            $($(#[doc = $about])* pub $field: $type,)+
        }

        impl $options {
            $(
                #[doc = concat!("Sets [`", stringify!($options), "::", stringify!($field), "`].")]
                pub fn $field(mut self, $field: impl Into<$type>) -> Self {
                    self.$field = $field.into();
                    self
                }
            )+
        }
    };
}

/// Which device runs the model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceChoice {
    /// A hardware GPU, else a software adapter, else the CPU reference kernels. A [`Notice`](crate::Notice) reports a
    /// choice other than hardware.
    #[default]
    Auto,
    /// A hardware GPU.
    Gpu,
    /// A software adapter.
    Software,
    /// The CPU reference kernels.
    Cpu,
    /// The adapter with this index in the list of devices.
    Index(usize),
    /// The first adapter whose name contains this text, ignoring case.
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
            "" => bail!(Usage, "the device name is empty"),
            other => other
                .parse()
                .map_or_else(|_| DeviceChoice::Name(other.into()), DeviceChoice::Index),
        })
    }
}

/// Speculative decoding. It changes the speed of an answer and never the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Speculation {
    /// With the model's draft head, if it has one, while that is faster than plain decoding.
    #[default]
    Auto,
    /// No speculation.
    Off,
    /// This number of drafts per step, 1 to 7: from the model's draft head, else from the tokens that followed the same
    /// tokens earlier in the conversation.
    Drafts(u32),
}

impl FromStr for Speculation {
    type Err = Error;

    fn from_str(text: &str) -> Result<Speculation> {
        match (text, text.parse()) {
            ("auto", _) => Ok(Speculation::Auto),
            ("off", _) => Ok(Speculation::Off),
            (_, Ok(drafts)) if (1..MAX_WIDTH).contains(&drafts) => Ok(Speculation::Drafts(drafts)),
            _ => bail!(
                Usage,
                "expected auto, off, or 1 to {} drafts, found '{text}'",
                MAX_WIDTH - 1
            ),
        }
    }
}

/// Which task's mask is active.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum TaskChoice {
    /// The task of the active skill; else the file's default task, if it has a mask; else none.
    #[default]
    Default,
    /// No mask: the full model.
    Full,
    /// The task with this name.
    Named(String),
}

impl FromStr for TaskChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<TaskChoice> {
        Ok(match text {
            "none" => TaskChoice::Full,
            "" => bail!(Usage, "the name of the task is empty; none runs the full model"),
            name => TaskChoice::Named(name.into()),
        })
    }
}

/// Which skills are active: their tensors replace those of the backbone, the model without skills.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Overlay {
    /// No skill.
    #[default]
    Backbone,
    /// The skill with this id.
    Skill(String),
    /// Σ wᵢ·Tᵢ over these skills and weights. Tᵢ is the skill's tensor, or the backbone's if the skill does not replace it.
    /// The weights are not negative, and their sum is 1 within a thousandth.
    Blend(Vec<(String, f32)>),
}

impl Overlay {
    /// Parses a blend like `a:0.25,b:0.75`. Errors: `Usage`.
    pub fn blend(text: &str) -> Result<Overlay> {
        let weighted = |item: &str| -> Result<(String, f32)> {
            let (id, weight) = item.trim().rsplit_once(':').unwrap_or((item, ""));
            match weight.parse() {
                Ok(weight) => Ok((id.to_owned(), weight)),
                Err(_) => bail!(Usage, "expected skills and weights like a:0.25,b:0.75, found '{item}'"),
            }
        };
        text.split(',').map(weighted).collect::<Result<_>>().map(Overlay::Blend)
    }
}

options! {
    /// Options of loading a model.
    LoadOptions {
        /// Which device runs the model.
        device: DeviceChoice,
        /// Length of the context in tokens. 0 = the length the model was trained for; `None` = that, but at most 4096.
        ctx: Option<u32>,
        /// Type of cached keys and values.
        kv: Kv,
        /// Most device memory to use, in MiB; `None` = no limit.
        vram_mb: Option<u64>,
        /// Compile shaders with bounds checks, for debugging.
        checked_shaders: bool,
        /// Prepare for reading the logits of every prompt position.
        all_logits: bool,
        /// Speculative decoding.
        speculation: Speculation,
        /// Which hidden state a draft head reads, if the file does not specify it. Answers do not depend on it, but how many
        /// drafts are accepted does.
        draft_input: HeadInput,
        /// The task whose mask is active.
        task: TaskChoice,
        /// Count how often each expert of a mixture is chosen.
        count_routes: bool,
        /// The active skills.
        overlay: Overlay,
    }
}

impl LoadOptions {
    /// Length of the context in tokens. `trained` is the length the model was trained for, if its file has it.
    ///
    /// Errors: `Usage` if [`LoadOptions::ctx`] is 0 and the file has no length.
    pub fn positions(&self, trained: Option<usize>) -> Result<u32> {
        let trained = trained.map(|positions| u32::try_from(positions).unwrap_or(u32::MAX));
        match (self.ctx, trained) {
            (Some(0), Some(trained)) => Ok(trained),
            (Some(0), None) => bail!(
                Usage,
                "the file does not contain the context length it was trained for; expected a context above 0"
            ),
            (Some(ctx), _) => Ok(ctx),
            (None, trained) => Ok(trained.unwrap_or(DEFAULT_CTX).min(DEFAULT_CTX)),
        }
    }
}

options! {
    /// Options of an answer.
    AnswerOptions {
        /// How tokens are chosen; `None` = the model's own defaults.
        sampling: Option<Sampling>,
        /// Most tokens of the answer; `None` = 512.
        max_tokens: Option<usize>,
        /// Texts that end the answer and are not part of it.
        stop: Vec<String>,
        /// Further variables for the chat template, such as `{"enable_thinking": false}`.
        template_kwargs: serde_json::Map<String, serde_json::Value>,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

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
