//! The engine: a model file on a device.

use super::loaded::{DeviceReport, LoadProgress, LoadedModel};
use super::skills::ActiveOverlay;
use super::task::resolve_task;
use crate::error::{Result, bail};
use crate::gpu::Device;
use crate::graph::Counters;
use crate::lm::ProgramKind;
use crate::lm::run::Session;
use crate::model::Model;
use crate::notice::Notice;
use crate::options::{LoadOptions, Sampling, TaskChoice};
use crate::source::{self, ModelSource, SamplingDefaults};
use crate::text::{self, ChatTemplate, Tokenizer};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Special tokens that end an answer, also if the file does not list them.
const KNOWN_STOPS: [&str; 4] = ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"];

/// A model on a device, with one conversation.
pub struct Engine {
    pub(super) source: ModelSource,
    pub(super) loaded: LoadedModel,
    pub(super) overlay: ActiveOverlay,
    /// The caller's choice, before [`resolve_task`].
    pub(super) task: TaskChoice,
    /// Notices to report with the next answer.
    pub(super) pending_notices: Vec<Notice>,
    pub(super) tokenizer: Option<Tokenizer>,
    /// An error is reported when the template is used.
    template: Result<ChatTemplate>,
    pub(super) special_tokens: Map<String, Value>,
    pub(super) stops: Vec<u32>,
    pub(super) defaults: Sampling,
    load_s: f64,
}

impl Engine {
    /// Opens a model file and loads it on a device of this machine.
    ///
    /// Errors: those of the file format, `SkillFile`, `UnsupportedModel`, `MissingTensor`, `NoAdapter`, `OutOfMemory` with
    /// the needed and the available size, `DeviceError`, `Tokenizer`, and `Interrupted` when `progress` cancels it.
    pub fn load(path: impl AsRef<Path>, options: &LoadOptions, progress: LoadProgress) -> Result<Engine> {
        Engine::open(source::open(path.as_ref())?, options, progress)
    }

    /// Opens a model file and loads it on the device of the host application. Errors: as [`Engine::load`].
    pub fn load_on(
        path: impl AsRef<Path>,
        device: Arc<Device>,
        options: &LoadOptions,
        progress: LoadProgress,
    ) -> Result<Engine> {
        Engine::open_on(source::open(path.as_ref())?, Some(device), options, progress)
    }

    /// Loads an open model on a device of this machine. Errors: as [`Engine::load`].
    #[doc(hidden)]
    pub fn open(source: ModelSource, options: &LoadOptions, progress: LoadProgress) -> Result<Engine> {
        Engine::open_on(source, None, options, progress)
    }

    /// Loads an open model, on the device of the host application if there is one. Errors: as [`Engine::load`].
    #[doc(hidden)]
    pub fn open_on(
        source: ModelSource,
        device: Option<Arc<Device>>,
        options: &LoadOptions,
        progress: LoadProgress,
    ) -> Result<Engine> {
        let start = Instant::now();
        source.require_language()?;
        let assets = &source.text;
        let tokenizer = assets.tokenizer_json().map(Tokenizer::from_json).transpose()?;
        let template = match &assets.chat_template {
            Some(source) => ChatTemplate::new(source),
            None => ChatTemplate::chatml(),
        };
        let eos = assets.eos_token_ids.first().copied();
        let special_tokens = match &tokenizer {
            Some(tokenizer) => text::special_tokens_map(tokenizer, assets.bos_token_id, eos, assets.pad_token_id)?,
            None => Map::new(),
        };
        let (overlay, tensors) = ActiveOverlay::new(&source, &options.overlay)?;
        let (task, notice) = resolve_task(&source, &options.overlay, &options.task)?;
        let resolved = options.clone().task(task);
        let mut loaded = match device {
            Some(device) => LoadedModel::new(&source.arch, tensors, Some(device), &resolved, progress)?,
            None => LoadedModel::open(&source.arch, tensors, &resolved, progress)?,
        };
        loaded.report.notices.extend(notice);
        Ok(Engine {
            loaded,
            overlay,
            task: options.task.clone(),
            pending_notices: Vec::new(),
            stops: stop_tokens(&assets.eos_token_ids, source.arch.vocab_size, tokenizer.as_ref()),
            defaults: sampling_defaults(&assets.sampling),
            tokenizer,
            template,
            special_tokens,
            load_s: start.elapsed().as_secs_f64(),
            source,
        })
    }

    /// The device, its memory, and the notices of loading.
    pub fn device_report(&self) -> &DeviceReport {
        &self.loaded.report
    }

    /// Seconds that loading took.
    pub fn load_s(&self) -> f64 {
        self.load_s
    }

    /// The sampling settings of the model.
    pub fn sampling_defaults(&self) -> &Sampling {
        &self.defaults
    }

    /// Tokens that end an answer.
    pub fn stops(&self) -> &[u32] {
        &self.stops
    }

    /// The open model.
    #[doc(hidden)]
    pub fn source(&self) -> &ModelSource {
        &self.source
    }

    /// The network.
    #[doc(hidden)]
    pub fn model(&self) -> &Model {
        &self.loaded.model
    }

    /// The conversation on the device.
    #[doc(hidden)]
    pub fn session(&mut self) -> &mut Session {
        &mut self.loaded.session
    }

    /// Totals of the executor.
    #[doc(hidden)]
    pub fn counters(&self) -> Counters {
        self.loaded.session.counters()
    }

    /// The tokenizer. Errors: `Tokenizer` if the file has none.
    #[doc(hidden)]
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        match &self.tokenizer {
            Some(tokenizer) => Ok(tokenizer),
            None => bail!(Tokenizer, "the file has no tokenizer; prompts must be token ids"),
        }
    }

    /// The chat template. Errors: `Template` if it is invalid.
    #[doc(hidden)]
    pub fn template(&self) -> Result<&ChatTemplate> {
        self.template.as_ref().map_err(Clone::clone)
    }

    /// How often each expert was chosen since loading, by layer; empty unless [`LoadOptions::count_routes`] is set.
    ///
    /// Errors: those of the device.
    pub fn route_counts(&mut self) -> Result<BTreeMap<usize, Vec<u32>>> {
        self.loaded.session.route_counts()
    }

    /// Number of dispatches of a decode step.
    #[doc(hidden)]
    pub fn decode_dispatches(&self) -> usize {
        let plan = self.loaded.session.plan();
        plan.program(ProgramKind::Decode).resolve(&plan.selection).len()
    }
}

/// Tokens that end an answer, ascending: `eos`, and known special tokens of the tokenizer.
pub fn stop_tokens(eos: &[u32], vocab_size: usize, tokenizer: Option<&Tokenizer>) -> Vec<u32> {
    let mut stops = eos.to_vec();
    if let Some(tokenizer) = tokenizer {
        let known = KNOWN_STOPS.iter().filter_map(|token| tokenizer.id(token));
        stops.extend(known.filter(|&id| tokenizer.is_special(id) && (id as usize) < vocab_size));
    }
    stops.sort_unstable();
    stops.dedup();
    stops
}

/// The sampling settings of a model; missing ones are those of this program.
pub fn sampling_defaults(model: &SamplingDefaults) -> Sampling {
    let ours = Sampling::default();
    let sampling = Sampling {
        temperature: model.temperature.unwrap_or(ours.temperature),
        top_k: model.top_k.unwrap_or(ours.top_k),
        top_p: model.top_p.unwrap_or(ours.top_p),
        min_p: model.min_p.unwrap_or(ours.min_p),
        repeat_penalty: model.repetition_penalty.unwrap_or(ours.repeat_penalty),
        ..ours.clone()
    };
    // Invalid settings do not make a model unusable.
    match sampling.validate() {
        Ok(()) => sampling,
        Err(_) => ours,
    }
}
