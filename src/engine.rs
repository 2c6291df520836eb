//! The façade: load a model, talk to it, stream the answer, stop when asked.
//!
//! Several engines can live in one process; nothing here prints, reads the environment or exits.

use crate::budget::available_memory;
use crate::container::Container;
use crate::error::{Result, bail};
use crate::gpu::{self, Device, DeviceKind, DeviceOptions, GpuExecutor};
use crate::model::{self, Model};
use crate::options::{AnswerOptions, DEFAULT_CTX, DEFAULT_MAX_TOKENS, DeviceChoice, LoadOptions};
use crate::program::{self, Counters, Executor, Plan, PlanOptions, Which};
use crate::sampling::{MAX_STOPS, Sampling};
use crate::session::{Cancel, Finish, Generation, Session};
use crate::text::{self, ChatTemplate, RenderOptions, Tokenizer};
use serde_json::{Map, Value};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Columns of a prefill chunk on hardware, and on a software adapter or the CPU reference.
const CHUNK_HARDWARE: u32 = 256;
const CHUNK_SOFTWARE: u32 = 64;
/// Tokens that end an answer in models whose file forgot to say so, when the tokenizer calls them special.
const KNOWN_STOPS: [&str; 4] = ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"];

/// What runs where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Name of the device.
    pub name: String,
    /// vulkan, metal, dx12, or cpu.
    pub backend: String,
    /// discrete, integrated, other, software, or cpu.
    pub kind: String,
    /// Why it is not what might have been expected.
    pub notice: Option<String>,
    /// Layers that run there: all of them.
    pub layers: usize,
    /// Bytes of weights there.
    pub weight_bytes: u64,
    /// Bytes of caches, activations and state there.
    pub buffer_bytes: u64,
    /// Positions of the context.
    pub ctx: u32,
}

/// Bytes uploaded so far, and in all.
pub type LoadProgress<'a> = &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>;

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
    /// Runs of the decode program: one for every token but the first, and one that was under way when the answer ended.
    pub decode_runs: u64,
    /// What those runs cost together.
    pub decode_counters: Counters,
}

/// A model on a device, with one conversation.
pub struct Engine {
    container: Arc<Container>,
    model: Model,
    session: Session,
    tokenizer: Option<Tokenizer>,
    template: ChatTemplate,
    special_tokens: Map<String, Value>,
    stops: Vec<u32>,
    defaults: Sampling,
    placement: Placement,
    load_s: f64,
}

impl Engine {
    /// Opens the model and puts it on a device of this machine.
    ///
    /// Errors: the container's, `SkillFile`, `UnsupportedModel`, `MissingTensor`, `NoAdapter`, `OutOfMemory` with what is
    /// needed and what there is, `DeviceError`, `Tokenizer`, `Template`.
    pub fn load(path: &Path, options: &LoadOptions, progress: LoadProgress) -> Result<Engine> {
        let start = Instant::now();
        let container = Container::open(path)?;
        let (device, notice) = open_device(options)?;
        Engine::finish_load(container, device, notice, options, progress, start)
    }

    /// Opens the model and puts it on the host application's device.
    pub fn load_on(path: &Path, device: Arc<Device>, options: &LoadOptions, progress: LoadProgress) -> Result<Engine> {
        Engine::finish_load(
            Container::open(path)?,
            Some(device),
            None,
            options,
            progress,
            Instant::now(),
        )
    }

    fn finish_load(
        container: Container,
        device: Option<Arc<Device>>,
        notice: Option<String>,
        options: &LoadOptions,
        progress: LoadProgress,
        start: Instant,
    ) -> Result<Engine> {
        if container.is_skill_file() {
            bail!(
                SkillFile,
                "this file is a skill: it is applied to a model and never run by itself"
            );
        }
        let container = Arc::new(container);
        let header = container.header();
        let model = model::bind(&header.arch, container.as_ref())?;
        let tokenizer = container.tokenizer_json().map(Tokenizer::from_json).transpose()?;
        let config = &header.tokenizer_config;
        let template = match &config.chat_template {
            Some(source) => ChatTemplate::new(source)?,
            None => ChatTemplate::chatml()?,
        };
        let eos = config.eos_token_ids.first().copied();
        let special_tokens = match &tokenizer {
            Some(tokenizer) => text::special_tokens_map(tokenizer, config.bos_token_id, eos, config.pad_token_id)?,
            None => Map::new(),
        };
        let stops = stop_tokens(&config.eos_token_ids, tokenizer.as_ref(), header.arch.vocab_size);
        let defaults = sampling_defaults(&header.provenance);

        let ctx = context(options, &model)?;
        let plan = Arc::new(program::plan(
            &model,
            container.as_ref(),
            &plan_options(options, device.as_deref(), ctx),
        )?);
        check_budget(options, device.as_deref(), &plan)?;
        let mut upload = |done, total| match progress(done, total) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => bail!(Usage, "loading was cancelled"),
        };
        let executor: Box<dyn Executor> = match &device {
            Some(device) => Box::new(GpuExecutor::new(
                device.clone(),
                plan.clone(),
                container.as_ref(),
                &mut upload,
            )?),
            None => Box::new(crate::host::HostExecutor::new(plan.clone(), container.clone())?),
        };
        let placement = Placement {
            name: device
                .as_ref()
                .map_or("CPU reference".into(), |device| device.name.clone()),
            backend: device.as_ref().map_or("cpu".into(), |device| device.backend.clone()),
            kind: device.as_ref().map_or("cpu".into(), |device| device.kind.name().into()),
            notice,
            layers: model.layers.len(),
            weight_bytes: plan.weight_bytes(),
            buffer_bytes: plan.buffer_bytes(),
            ctx,
        };
        let session = Session::new(plan, executor);
        let load_s = start.elapsed().as_secs_f64();
        Ok(Engine {
            container,
            model,
            session,
            tokenizer,
            template,
            special_tokens,
            stops,
            defaults,
            placement,
            load_s,
        })
    }

    /// What runs where.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The file.
    pub fn container(&self) -> &Container {
        &self.container
    }

    /// The network.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The conversation's caches and positions.
    pub fn session(&mut self) -> &mut Session {
        &mut self.session
    }

    /// What the executor did so far.
    pub fn counters(&self) -> Counters {
        self.session.counters()
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

    /// The prompt that the model's template makes of a conversation: text and tokens. Special tokens in what users wrote
    /// stay ordinary text.
    pub fn render(&self, messages: &[Value], kwargs: &Map<String, Value>) -> Result<(String, Vec<u32>)> {
        let tokenizer = self.tokenizer()?;
        let options = RenderOptions {
            add_generation_prompt: true,
            special_tokens: self.special_tokens.clone(),
            kwargs: kwargs.clone(),
            ..RenderOptions::default()
        };
        let guarded = text::guard_messages(tokenizer, messages)?;
        let tokens = tokenizer.encode_guarded(&self.template.render(&guarded, &options)?)?;
        Ok((self.template.render(messages, &options)?, tokens))
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
        };
        let mut stream = match &self.tokenizer {
            Some(tokenizer) => Some(tokenizer.stream(true, &options.stop)?),
            None => None,
        };
        let (run, flow) = self.session.prefill(prompt, cancel)?;
        answer.prefilled_tokens = run;
        answer.cached_tokens = self.session.cached().len() - run;
        if flow.is_break() {
            answer.prefill_s = start.elapsed().as_secs_f64();
            return Ok(answer);
        }
        let mut first = None;
        let mut failed = None;
        let stops = &self.stops;
        let finish = self.session.generate(&generation, cancel, &mut |token| {
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
        (answer.decode_runs, answer.decode_counters) = self.session.decode_cost();
        Ok(answer)
    }

    /// What one steady token costs, by plan.
    pub fn decode_dispatches(&self) -> usize {
        self.session.plan().program(Which::Decode).steps.len()
    }
}

/// The device that the options ask for, `None` for the CPU reference, and what should be said about it.
///
/// Errors: `NoAdapter` when there is none such, with those there are; `DeviceError` when it cannot be opened.
pub fn open_device(options: &LoadOptions) -> Result<(Option<Arc<Device>>, Option<String>)> {
    let device_options = DeviceOptions {
        checked_shaders: options.checked_shaders,
        ..DeviceOptions::default()
    };
    if options.device == DeviceChoice::Cpu {
        return Ok((None, None));
    }
    let adapters = gpu::adapters();
    let hardware = || adapters.iter().find(|adapter| adapter.kind != DeviceKind::Software);
    let software = || adapters.iter().find(|adapter| adapter.kind == DeviceKind::Software);
    let names = || {
        adapters
            .iter()
            .map(|adapter| adapter.name.as_str())
            .collect::<Vec<_>>()
            .join(", ")
    };
    let mut notice = None;
    let adapter = match &options.device {
        DeviceChoice::Cpu => None,
        DeviceChoice::Auto => match (hardware(), software()) {
            (Some(adapter), _) => Some(adapter),
            (None, Some(adapter)) => {
                notice = Some("no GPU was found; using a software adapter, which is slow".to_string());
                Some(adapter)
            }
            (None, None) => {
                notice = Some(
                    "no GPU and no software adapter was found; using the CPU reference kernels, which are slow"
                        .to_string(),
                );
                None
            }
        },
        DeviceChoice::Gpu => match hardware() {
            Some(adapter) => Some(adapter),
            None => bail!(NoAdapter, "no hardware GPU was found; adapters: [{}]", names()),
        },
        DeviceChoice::Software => match software() {
            Some(adapter) => Some(adapter),
            None => bail!(NoAdapter, "no software adapter was found; adapters: [{}]", names()),
        },
        DeviceChoice::Index(index) => match adapters.get(*index) {
            Some(adapter) => Some(adapter),
            None => bail!(NoAdapter, "there is no adapter number {index}; adapters: [{}]", names()),
        },
        DeviceChoice::Name(part) => {
            let matches = |name: &str| name.to_lowercase().contains(&part.to_lowercase());
            match adapters.iter().find(|adapter| matches(&adapter.name)) {
                Some(adapter) => Some(adapter),
                None => bail!(
                    NoAdapter,
                    "no adapter's name contains '{part}'; adapters: [{}]",
                    names()
                ),
            }
        }
    };
    match adapter {
        Some(adapter) => Ok((Some(Arc::new(Device::open(adapter, device_options)?)), notice)),
        None => Ok((None, notice)),
    }
}

fn plan_options(options: &LoadOptions, device: Option<&Device>, ctx: u32) -> PlanOptions {
    let hardware = device.is_some_and(|device| device.kind != DeviceKind::Software);
    PlanOptions {
        ctx,
        chunk: if hardware { CHUNK_HARDWARE } else { CHUNK_SOFTWARE },
        kv: options.kv,
        max_binding: device.map_or(u64::MAX / 2, Device::max_binding),
        all_logits: options.all_logits,
    }
}

fn context(options: &LoadOptions, model: &Model) -> Result<u32> {
    let trained = model
        .max_positions
        .map(|positions| positions.min(u32::MAX as usize) as u32);
    match (options.ctx, trained) {
        (Some(0), Some(trained)) => Ok(trained),
        (Some(0), None) => bail!(
            Usage,
            "the file does not say how long its context is; give a --ctx above 0"
        ),
        (Some(ctx), _) => Ok(ctx),
        (None, trained) => Ok(trained.unwrap_or(DEFAULT_CTX).min(DEFAULT_CTX)),
    }
}

/// Compares a plan with the memory there is, before anything is allocated. Errors: `OutOfMemory`, with both sizes.
pub fn check_budget(options: &LoadOptions, device: Option<&Device>, plan: &Plan) -> Result<()> {
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let weights = if device.is_some() { plan.weight_bytes() } else { 0 };
    let need = weights + plan.buffer_bytes();
    if let Some(limit) = options.vram_mb
        && need > limit.saturating_mul(1 << 20)
    {
        bail!(
            OutOfMemory,
            "the plan needs {} MiB, --vram-mb allows {limit}; a smaller --ctx would help",
            mib(need)
        );
    }
    let shares_host_memory =
        device.is_none_or(|device| matches!(device.kind, DeviceKind::Software | DeviceKind::Integrated));
    if shares_host_memory
        && let Some(free) = available_memory(Path::new("/"))
        && need > free
    {
        bail!(
            OutOfMemory,
            "the plan needs {} MiB, {} MiB are free; a smaller --ctx would help",
            mib(need),
            mib(free)
        );
    }
    Ok(())
}

fn stop_tokens(from_file: &[u32], tokenizer: Option<&Tokenizer>, vocab: usize) -> Vec<u32> {
    let mut stops: Vec<u32> = from_file.to_vec();
    if let Some(tokenizer) = tokenizer {
        let known = KNOWN_STOPS.iter().filter_map(|token| tokenizer.id(token));
        stops.extend(known.filter(|&id| tokenizer.is_special(id) && (id as usize) < vocab));
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
