//! The façade: load a model, talk to it, stream the answer, stop when asked.
//!
//! Several engines can live in one process; nothing here prints, reads the environment or exits.

mod overlay;
mod paging;
mod place;
mod task;

pub use overlay::{Route, incomparable, overlaid, routable};
pub use place::{AUTO_DRAFTS, LoadProgress, Placed, Placement, Planned, check_budget, open_device, planned};
pub use task::task_with;

use crate::container::{Container, Header};
use crate::error::{Result, bail};
use crate::gpu::Device;
use crate::model::Model;
use crate::options::{AnswerOptions, DEFAULT_MAX_TOKENS, LoadOptions, Overlay, TaskChoice};
use crate::program::{Counters, Which};
use crate::sampling::{MAX_STOPS, Sampling};
use crate::session::{Cancel, Finish, Generation, Session, Speculated};
use crate::text::{self, ChatTemplate, RenderOptions, Tokenizer};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Tokens that end an answer in models whose file forgot to say so, when the tokenizer calls them special.
const KNOWN_STOPS: [&str; 4] = ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"];

/// A finished answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The text, without stop texts and special tokens.
    pub text: String,
    /// The tokens, a stop token included.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of those, tokens that were still cached.
    pub cached_tokens: usize,
    /// Of those, tokens that were run: the others, unless it was cancelled first.
    pub prefilled_tokens: usize,
    /// Why it ended.
    pub finish: Finish,
    /// Seconds from the start to the first token.
    pub prefill_s: f64,
    /// Seconds from the first token to the last.
    pub decode_s: f64,
    /// Decoding runs: one for every token but the first, or for every speculative round, and one that was under way when the
    /// answer ended.
    pub decode_runs: u64,
    /// What those runs cost together.
    pub decode_counters: Counters,
    /// What drafting did.
    pub speculated: Speculated,
    /// What should be said about it, each thing once.
    pub notices: Vec<String>,
}

/// A model on a device, with one conversation.
pub struct Engine {
    container: Arc<Container>,
    placed: Placed,
    overlay: overlay::Active,
    /// What the caller chose, whatever the skills say.
    task: TaskChoice,
    /// What is to be said with the next answer.
    unsaid: Vec<String>,
    tokenizer: Option<Tokenizer>,
    /// What is wrong with it matters to conversations only.
    template: Result<ChatTemplate>,
    special_tokens: Map<String, Value>,
    stops: Vec<u32>,
    defaults: Sampling,
    load_s: f64,
}

impl Engine {
    /// Opens the model and puts it on a device of this machine.
    ///
    /// Errors: the container's, `SkillFile`, `UnsupportedModel`, `MissingTensor`, `NoAdapter`, `OutOfMemory` with what is
    /// needed and what there is, `DeviceError`, `Tokenizer`, `Template`.
    pub fn load(path: &Path, options: &LoadOptions, progress: LoadProgress) -> Result<Engine> {
        Engine::open(Container::open(path)?, options, progress)
    }

    /// Puts a model whose file is open on a device of this machine. Errors: as [`Engine::load`].
    pub fn open(container: Container, options: &LoadOptions, progress: LoadProgress) -> Result<Engine> {
        Engine::finish_load(container, None, options, progress)
    }

    /// Opens the model and puts it on the host application's device.
    pub fn load_on(path: &Path, device: Arc<Device>, options: &LoadOptions, progress: LoadProgress) -> Result<Engine> {
        Engine::finish_load(Container::open(path)?, Some(device), options, progress)
    }

    fn finish_load(
        container: Container,
        device: Option<Arc<Device>>,
        options: &LoadOptions,
        progress: LoadProgress,
    ) -> Result<Engine> {
        let start = Instant::now();
        let mut options = options.clone();
        if container.is_skill_file() {
            bail!(
                SkillFile,
                "this file is a skill: it is applied to a model and never run by itself"
            );
        }
        let container = Arc::new(container);
        let header = container.header();
        let tokenizer = container.tokenizer_json().map(Tokenizer::from_json).transpose()?;
        let config = &header.tokenizer_config;
        let template = match &config.chat_template {
            Some(source) => ChatTemplate::new(source),
            None => ChatTemplate::chatml(),
        };
        let eos = config.eos_token_ids.first().copied();
        let special_tokens = match &tokenizer {
            Some(tokenizer) => text::special_tokens_map(tokenizer, config.bos_token_id, eos, config.pad_token_id)?,
            None => Map::new(),
        };
        let stops = stop_tokens(header, tokenizer.as_ref());
        let defaults = sampling_defaults(&header.provenance);

        let (overlay, tensors) = overlay::Active::new(&container, &options.overlay)?;
        let (task, notice) = task_with(&container, &options.overlay, &options.task)?;
        let task = std::mem::replace(&mut options.task, task);
        let mut placed = match device {
            Some(device) => Placed::new(&header.arch, tensors, Some(device), None, &options, progress)?,
            None => Placed::open(&header.arch, tensors, &options, progress)?,
        };
        placed.placement.notice = task::together(placed.placement.notice.take(), notice);
        let load_s = start.elapsed().as_secs_f64();
        Ok(Engine {
            container,
            placed,
            overlay,
            task,
            unsaid: Vec::new(),
            tokenizer,
            template,
            special_tokens,
            stops,
            defaults,
            load_s,
        })
    }

    /// What runs where.
    pub fn placement(&self) -> &Placement {
        &self.placed.placement
    }

    /// The file.
    pub fn container(&self) -> &Container {
        &self.container
    }

    /// The network.
    pub fn model(&self) -> &Model {
        &self.placed.model
    }

    /// The conversation's caches and positions.
    pub fn session(&mut self) -> &mut Session {
        &mut self.placed.session
    }

    /// Which skills are active.
    pub fn overlay(&self) -> &Overlay {
        &self.overlay.overlay
    }

    /// What the executor did so far.
    pub fn counters(&self) -> Counters {
        self.placed.session.counters()
    }

    /// Seconds that loading took.
    pub fn load_s(&self) -> f64 {
        self.load_s
    }

    /// Tokens that end an answer.
    pub fn stops(&self) -> &[u32] {
        &self.stops
    }

    /// The model's own way to choose tokens.
    pub fn sampling_defaults(&self) -> &Sampling {
        &self.defaults
    }

    /// The tokenizer. Errors: `Tokenizer` when the file has none.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        match &self.tokenizer {
            Some(tokenizer) => Ok(tokenizer),
            None => bail!(Tokenizer, "the file has no tokenizer; give token ids instead of text"),
        }
    }

    /// The template of conversations. Errors: `Template` when there is something wrong with the file's.
    pub fn template(&self) -> Result<&ChatTemplate> {
        self.template.as_ref().map_err(Clone::clone)
    }

    /// The prompt that the model's template makes of a conversation: text and tokens. Special tokens in what users wrote
    /// stay ordinary text.
    pub fn render(&self, messages: &[Value], kwargs: &Map<String, Value>) -> Result<(String, Vec<u32>)> {
        let (tokenizer, template) = (self.tokenizer()?, self.template()?);
        let options = RenderOptions {
            add_generation_prompt: true,
            special_tokens: self.special_tokens.clone(),
            kwargs: kwargs.clone(),
            ..RenderOptions::default()
        };
        let guarded = text::guard_messages(tokenizer, messages)?;
        let tokens = tokenizer.encode_guarded(&template.render(&guarded, &options)?)?;
        Ok((template.render(messages, &options)?, tokens))
    }

    /// Answers a conversation, each message an object with `role` and `content`. What it shares with the conversation before
    /// is not run again. `on_text` gets the text as it becomes certain, and may end the answer.
    pub fn chat(
        &mut self,
        messages: &[Value],
        options: &AnswerOptions,
        cancel: &Cancel,
        on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Answer> {
        let (_, tokens) = self.render(messages, &options.template_kwargs)?;
        self.continue_tokens(&tokens, options, cancel, on_text)
    }

    /// Continues a text as it is, without a template.
    pub fn complete(
        &mut self,
        prompt: &str,
        options: &AnswerOptions,
        cancel: &Cancel,
        on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Answer> {
        let tokens = self.tokenizer()?.encode(prompt, true)?;
        self.continue_tokens(&tokens, options, cancel, on_text)
    }

    /// Continues a list of tokens. Without a tokenizer the text stays empty.
    ///
    /// Errors: `ContextFull`, `NonFinite`, `Usage`, the device's. `on_text` got the text so far then, and the engine can
    /// be used again.
    pub fn continue_tokens(
        &mut self,
        prompt: &[u32],
        options: &AnswerOptions,
        cancel: &Cancel,
        on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Answer> {
        let start = Instant::now();
        let generation = Generation {
            sampling: options.sampling.clone().unwrap_or_else(|| self.defaults.clone()),
            // The device watches for so many; the others are found below.
            stops: self.stops.iter().copied().take(MAX_STOPS).collect(),
            max_tokens: options.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS),
        };
        generation.sampling.validate()?;
        let mut answer = Answer {
            text: String::new(),
            tokens: Vec::new(),
            prompt_tokens: prompt.len(),
            cached_tokens: 0,
            prefilled_tokens: 0,
            finish: Finish::Interrupted,
            prefill_s: 0.0,
            decode_s: 0.0,
            decode_runs: 0,
            decode_counters: Counters::default(),
            speculated: Speculated::default(),
            notices: Vec::new(),
        };
        let mut stream = match &self.tokenizer {
            Some(tokenizer) => Some(tokenizer.stream(true, &options.stop)?),
            None => None,
        };
        let (run, flow) = self.placed.session.prefill(prompt, cancel)?;
        answer.prefilled_tokens = run;
        answer.cached_tokens = self.placed.session.cached().len() - run;
        if flow.is_break() {
            answer.prefill_s = start.elapsed().as_secs_f64();
            return Ok(answer);
        }
        let mut first = None;
        let mut failed = None;
        let stops = &self.stops;
        let finish = self.placed.session.generate(&generation, cancel, &mut |token| {
            first.get_or_insert_with(|| start.elapsed().as_secs_f64());
            answer.tokens.push(token);
            if stops.contains(&token) {
                return ControlFlow::Break(());
            }
            let Some(stream) = stream.as_mut() else {
                return ControlFlow::Continue(());
            };
            match stream.push(token) {
                Ok(text) => {
                    answer.text.push_str(&text);
                    let flow = if text.is_empty() {
                        ControlFlow::Continue(())
                    } else {
                        on_text(&text)
                    };
                    if stream.stopped().is_some() {
                        ControlFlow::Break(())
                    } else {
                        flow
                    }
                }
                Err(err) => {
                    failed = Some(err);
                    ControlFlow::Break(())
                }
            }
        });
        if let Some(err) = failed {
            return Err(err);
        }
        // After an error, too: the text so far is the caller's.
        if let Some(stream) = stream.as_mut() {
            let rest = stream.finish()?;
            if !rest.is_empty() {
                answer.text.push_str(&rest);
                let _ = on_text(&rest);
            }
        }
        answer.finish = finish?;
        answer.prefill_s = first.unwrap_or_else(|| start.elapsed().as_secs_f64());
        answer.decode_s = start.elapsed().as_secs_f64() - answer.prefill_s;
        (answer.decode_runs, answer.decode_counters) = self.placed.session.decode_cost();
        answer.speculated = self.placed.session.speculated();
        answer.notices = std::mem::take(&mut self.unsaid);
        answer.notices.extend(self.placed.session.take_notices());
        Ok(answer)
    }

    /// How often each expert was chosen since loading, by layer that is a mixture; empty unless
    /// [`LoadOptions::count_routes`] asked for it.
    ///
    /// Errors: the device's.
    pub fn route_counts(&mut self) -> Result<BTreeMap<usize, Vec<u32>>> {
        self.placed.session.route_counts()
    }

    /// What one steady token costs, by plan.
    pub fn decode_dispatches(&self) -> usize {
        self.placed.session.plan().program(Which::Decode).steps.len()
    }
}

/// Tokens that end an answer, ascending: the header's, and special tokens of the tokenizer that are known to.
pub fn stop_tokens(header: &Header, tokenizer: Option<&Tokenizer>) -> Vec<u32> {
    let mut stops = header.tokenizer_config.eos_token_ids.clone();
    if let Some(tokenizer) = tokenizer {
        let known = KNOWN_STOPS.iter().filter_map(|token| tokenizer.id(token));
        stops.extend(known.filter(|&id| tokenizer.is_special(id) && (id as usize) < header.arch.vocab_size));
    }
    stops.sort_unstable();
    stops.dedup();
    stops
}

/// The sampling settings that came with the source model, by a header's `provenance`, else this program's.
pub fn sampling_defaults(provenance: &Value) -> Sampling {
    let mut sampling = Sampling::default();
    let Some(config) = provenance.get("generation_config") else {
        return sampling;
    };
    let number = |key: &str| config.get(key).and_then(Value::as_f64).map(|value| value as f32);
    if let Some(temperature) = number("temperature") {
        sampling.temperature = temperature;
    }
    if let Some(top_p) = number("top_p") {
        sampling.top_p = top_p;
    }
    if let Some(penalty) = number("repetition_penalty") {
        sampling.repeat_penalty = penalty;
    }
    if let Some(min_p) = number("min_p") {
        sampling.min_p = min_p;
    }
    if let Some(top_k) = config.get("top_k").and_then(Value::as_u64) {
        sampling.top_k = top_k.min(u64::from(u32::MAX)) as u32;
    }
    // What cannot be used is not a reason to refuse the model.
    if sampling.validate().is_err() {
        Sampling::default()
    } else {
        sampling
    }
}
