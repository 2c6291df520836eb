//! `run`: one prompt, one answer, streamed; on a terminal without a prompt a chat.

use super::answer::{OnText, rates, streamed, summary};
use super::args::{self, LoadArgs, device_json, whole};
use super::chat::{Chat, Settings, lines};
use super::model;
use super::output::{Output, size};
use super::overlay::Wanted;
use super::prompt::{self, Given, PromptArgs};
use super::{Context, Outcome, Result, usage, verify};
use clap::builder::FalseyValueParser;
use cmf_gpu::Error;
use cmf_gpu::container::{not_the_output, target, temporary_beside};
use cmf_gpu::engine::{Answer, Engine, Placement};
use cmf_gpu::options::{AnswerOptions, LoadOptions, Overlay, Speculation};
use cmf_gpu::program::Counters;
use cmf_gpu::sampling::Sampling;
use cmf_gpu::session::Finish;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Flags of `run`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    load: LoadArgs,
    #[command(flatten)]
    prompt: PromptArgs,
    /// Continues the text as it is, without the chat template
    #[arg(long, env = "CMF_GPU_RAW", value_parser = FalseyValueParser::new(), hide_env = true)]
    raw: bool,
    /// A system message in front of the prompt
    #[arg(
        short,
        long,
        env = "CMF_GPU_SYSTEM",
        value_name = "TEXT",
        allow_hyphen_values = true,
        hide_env = true
    )]
    system: Option<String>,
    /// Tells the template that the model shall not think first
    #[arg(long, env = "CMF_GPU_NO_THINK", value_parser = FalseyValueParser::new(), hide_env = true)]
    no_think: bool,
    /// Most tokens of the answer
    #[arg(
        short = 'n',
        long,
        env = "CMF_GPU_MAX_TOKENS",
        default_value_t = 512,
        value_parser = whole::<usize>,
        allow_negative_numbers = true,
        hide_env = true
    )]
    max_tokens: usize,
    /// A text that ends the answer and is not part of it; may be repeated
    #[arg(
        long,
        env = "CMF_GPU_STOP",
        value_name = "TEXT",
        value_parser = stop,
        allow_hyphen_values = true,
        hide_env = true
    )]
    stop: Vec<String>,
    /// Checks every hash and every weight first, as the command verify does
    #[arg(long, env = "CMF_GPU_VERIFY", value_parser = FalseyValueParser::new(), hide_env = true)]
    verify: bool,
    /// Writes how often each expert was chosen, as moe-mask, moe-defrag and convert --router-stats read it
    #[arg(long, env = "CMF_GPU_ROUTE_STATS", value_name = "FILE", hide_env = true)]
    route_stats: Option<PathBuf>,
    #[command(flatten)]
    sampling: SamplingArgs,
}

/// How tokens are chosen. What is not given is the model's own.
#[derive(clap::Args)]
struct SamplingArgs {
    /// Temperature, 0 = greedy
    #[arg(
        long,
        visible_alias = "temperature",
        env = "CMF_GPU_TEMP",
        allow_negative_numbers = true,
        hide_env = true
    )]
    temp: Option<f32>,
    /// Only so many of the most probable tokens, 0 = all
    #[arg(long, env = "CMF_GPU_TOP_K", value_parser = whole::<u32>, allow_negative_numbers = true, hide_env = true)]
    top_k: Option<u32>,
    /// Only the most probable tokens with this probability together
    #[arg(long, env = "CMF_GPU_TOP_P", allow_negative_numbers = true, hide_env = true)]
    top_p: Option<f32>,
    /// Only tokens this probable relative to the best
    #[arg(long, env = "CMF_GPU_MIN_P", allow_negative_numbers = true, hide_env = true)]
    min_p: Option<f32>,
    /// Key of the random draws [default: another one every time]
    #[arg(long, env = "CMF_GPU_SEED", value_parser = whole::<u64>, allow_negative_numbers = true, hide_env = true)]
    seed: Option<u64>,
    /// Always the most probable token
    #[arg(long, env = "CMF_GPU_GREEDY", value_parser = FalseyValueParser::new(), hide_env = true)]
    greedy: bool,
    /// Makes tokens of the prompt and the answer less probable by this factor; 1 = off
    #[arg(
        long,
        visible_alias = "rep-penalty",
        env = "CMF_GPU_REPEAT_PENALTY",
        allow_negative_numbers = true,
        hide_env = true
    )]
    repeat_penalty: Option<f32>,
    /// Subtracted from the logits of tokens in the answer; 0 = off
    #[arg(
        long,
        env = "CMF_GPU_PRESENCE_PENALTY",
        allow_negative_numbers = true,
        hide_env = true
    )]
    presence_penalty: Option<f32>,
    /// Subtracted from a token's logit as often as it is in the answer; 0 = off
    #[arg(
        long,
        env = "CMF_GPU_FREQUENCY_PENALTY",
        allow_negative_numbers = true,
        hide_env = true
    )]
    frequency_penalty: Option<f32>,
    /// Drafting of tokens, which never changes the answer: auto = with the model's draft head while that is faster, off, or so
    /// many drafts a round, from the head or from the conversation
    #[arg(long, env = "CMF_GPU_SPEC", default_value = "auto", value_parser = spec, hide_env = true)]
    spec: Speculation,
}

fn stop(text: &str) -> std::result::Result<String, String> {
    match text {
        "" => Err("an empty text would end every answer before it begins".into()),
        _ => Ok(text.into()),
    }
}

fn spec(text: &str) -> std::result::Result<Speculation, String> {
    text.parse().map_err(|err: Error| err.message)
}

impl SamplingArgs {
    /// The settings: flags, then the model's own, then this program's.
    fn settings(&self, context: &Context, defaults: &Sampling) -> Result<Sampling> {
        let chosen = args::chosen(&context.matches, &["greedy", "temp"])?;
        let greedy = self.greedy && chosen != Some("temp");
        let sampling = Sampling {
            temperature: match (greedy, self.temp) {
                (true, _) => 0.0,
                (false, Some(temp)) => temp,
                (false, None) => defaults.temperature,
            },
            top_k: self.top_k.unwrap_or(defaults.top_k),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repeat_penalty: self.repeat_penalty.unwrap_or(defaults.repeat_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(defaults.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            seed: self.seed.unwrap_or_else(random),
        };
        sampling.validate()?;
        Ok(sampling)
    }
}

/// A number from the system's source of randomness, which also keys hash tables.
pub fn random() -> u64 {
    std::hash::RandomState::new().build_hasher().finish()
}

enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

enum Request {
    Answer(Prompt),
    /// There is no prompt, and someone who can be asked for one.
    Chat,
    /// There is no prompt.
    Nothing,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let path = args.load.model.path(context)?;
    // Before anyone types a prompt.
    let container = model::open(&path)?;
    let prompt = match request(&args, context)? {
        Request::Answer(prompt) => Some(prompt),
        Request::Chat if context.out.json => {
            return Err(usage("--json needs a prompt: a chat is not one object"));
        }
        Request::Chat => None,
        Request::Nothing if context.out.json => return Err(usage("stdin holds no prompt")),
        Request::Nothing => {
            context.out.note("note: no prompt, no answer");
            return Ok(Outcome::Done);
        }
    };
    let untemplated = args.raw || matches!(prompt, Some(Prompt::Tokens(_)));
    if untemplated && (args.system.is_some() || args.no_think) {
        return Err(usage(
            "--system and --no-think need the chat template, which --raw and --prompt-tokens leave out",
        ));
    }
    let overlay = args.load.overlay.wanted(&container, context)?;
    if prompt.is_none() && !matches!(overlay, Wanted::Now(_)) {
        return Err(usage(
            "auto needs a prompt that decides; a chat changes skills with /set skill ID",
        ));
    }
    // Wrong settings are found before the model is loaded.
    args.sampling.settings(context, &Sampling::default())?;
    if let Some(Prompt::Tokens(tokens)) = &prompt {
        model::known_tokens(tokens, &container)?;
    }
    if args.verify {
        verify::sound(&container, &context.out)?;
    }
    // Before minutes of work, not after.
    let routes = args
        .route_stats
        .as_deref()
        .map(|path| RouteFile::create(path, container.shard_paths(), args.prompt.file()))
        .transpose()?;
    let chosen = args.load.options();
    let task = chosen.task.clone();
    let load = overlay.first(LoadOptions {
        speculation: args.sampling.spec,
        count_routes: args.route_stats.is_some(),
        ..chosen
    });
    let mut engine = args::load(container, &load, context)?;
    if args.route_stats.is_some() && !engine.model().has_experts() {
        return Err(usage("--route-stats: the model has no experts to choose from"));
    }
    let sampling = args.sampling.settings(context, engine.sampling_defaults())?;
    if sampling.temperature > 0.0 && prompt.is_some() {
        context.out.detail(format!("seed {}", sampling.seed));
    }
    let mut options = AnswerOptions {
        sampling: Some(sampling.clone()),
        max_tokens: Some(args.max_tokens),
        stop: args.stop.clone(),
        template_kwargs: Map::new(),
    };
    if engine.container().header().tokenizer_config.chat_template.is_none() && !untemplated {
        context
            .out
            .note("note: the file has no chat template; ChatML is used, and --raw goes without");
    }
    if engine.stops().is_empty() {
        context
            .out
            .note("note: the file names no token that ends an answer; one goes on until -n or the context ends it");
    }
    if args.no_think {
        let template = &engine.container().header().tokenizer_config.chat_template;
        if !template
            .as_ref()
            .is_some_and(|source| source.contains("enable_thinking"))
        {
            context
                .out
                .note("note: the model's template knows no thinking; --no-think changes nothing");
        }
        options.template_kwargs.insert("enable_thinking".into(), false.into());
    }

    let Some(prompt) = prompt else {
        let settings = Settings {
            sampling,
            seed: args.sampling.seed,
            max_tokens: args.max_tokens,
        };
        let mut chat = Chat::new(&mut engine, args.system, settings, options)?;
        let mut lines = lines::source(&context.interrupt)?;
        context.out.note("a chat: /help lists what it knows, Ctrl-D leaves");
        let outcome = chat.run(lines.as_mut(), &mut || context.interrupt.renewed(), &mut context.out)?;
        if let Some(file) = routes {
            file.write(&engine.route_counts()?)?;
        }
        return Ok(outcome);
    };
    let cancel = context.interrupt.graceful();
    if !matches!(overlay, Wanted::Now(_)) {
        let tokens = match &prompt {
            Prompt::Tokens(tokens) => tokens.clone(),
            Prompt::Text(text) => engine.tokenizer()?.encode(text, true)?,
        };
        overlay.settle(&mut engine, &task, &tokens, &cancel, &context.out)?;
    }
    let out = &mut context.out;
    let json = out.json;
    let mut write = |text: &str| match json {
        true => Ok(()),
        false => out.text(text).and_then(|()| out.flush()),
    };
    let answer = streamed(&mut write, |on_text: OnText| match prompt {
        Prompt::Tokens(tokens) => engine.continue_tokens(&tokens, &options, &cancel, on_text),
        Prompt::Text(text) if args.raw => engine.complete(&text, &options, &cancel, on_text),
        Prompt::Text(text) => {
            let system = args
                .system
                .iter()
                .map(|text| json!({"role": "system", "content": text}));
            let messages: Vec<Value> = system.chain([json!({"role": "user", "content": text})]).collect();
            engine.chat(&messages, &options, &cancel, on_text)
        }
    })?;
    if let Some(file) = routes {
        file.write(&engine.route_counts()?)?;
    }
    report(&engine, &answer, &sampling, &mut context.out)?;
    Ok(match answer.finish {
        Finish::Interrupted => Outcome::Interrupted,
        _ => Outcome::Done,
    })
}

/// Where it will be written how often experts were chosen: `{"layers": {"3": [counts]}}`.
struct RouteFile {
    path: PathBuf,
    to: NamedTempFile,
}

impl RouteFile {
    /// Errors: `Usage` when it would replace a file of the model or the prompt, `Io` where no file can be.
    fn create(path: &Path, model: &[PathBuf], prompt: Option<&Path>) -> Result<RouteFile> {
        let mut inputs = model.iter().map(PathBuf::as_path).chain(prompt);
        inputs.try_for_each(|input| not_the_output(input, path))?;
        let path = target(path)?;
        let to = temporary_beside(&path)?;
        Ok(RouteFile { path, to })
    }

    fn write(mut self, counts: &BTreeMap<usize, Vec<u32>>) -> Result<()> {
        let layers: Map<String, Value> = counts
            .iter()
            .map(|(layer, counts)| (layer.to_string(), json!(counts)))
            .collect();
        let text = json!({ "layers": layers }).to_string();
        self.to
            .write_all(text.as_bytes())
            .map_err(|err| Error::io(&self.path, &err))?;
        let persisted = self.to.persist(&self.path);
        persisted.map(drop).map_err(|err| Error::io(&self.path, &err.error))
    }
}

/// What is wanted, by flags and by what stdin is.
fn request(args: &Args, context: &Context) -> Result<Request> {
    let file = match args.prompt.given(&context.matches)? {
        Some(Given::Text(text)) => return Ok(Request::Answer(Prompt::Text(text.into()))),
        Some(Given::Tokens(tokens)) => return Ok(Request::Answer(Prompt::Tokens(tokens.into()))),
        Some(Given::File(file)) => file,
        // A text to be continued is no conversation.
        None if std::io::stdin().is_terminal() && !args.raw => return Ok(Request::Chat),
        None => Path::new("-"),
    };
    let from_stdin = file == Path::new("-");
    if from_stdin && std::io::stdin().is_terminal() {
        context.out.note("The prompt, ended by Ctrl-D:");
    }
    let text = prompt::read(file)?;
    if from_stdin && text.is_empty() {
        return Ok(Request::Nothing);
    }
    Ok(Request::Answer(Prompt::Text(text)))
}

fn report(engine: &Engine, answer: &Answer, sampling: &Sampling, out: &mut Output) -> Result<()> {
    answer
        .notices
        .iter()
        .for_each(|notice| out.note(format!("note: {notice}")));
    out.note(summary(answer));
    let totals = engine.counters();
    if let Some(slots) = engine.placement().expert_slots {
        out.note(format!(
            "experts, {slots} slots a layer: {} hits, {} misses, {} fetched",
            totals.expert_hits,
            totals.expert_misses,
            size(totals.paged_bytes)
        ));
    }
    if !out.json {
        return Ok(());
    }
    let (prefill_rate, decode_rate) = rates(answer);
    let skill = match engine.overlay() {
        Overlay::Skill(id) => Some(id.as_str()),
        Overlay::Backbone | Overlay::Blend(_) => None,
    };
    out.json(&json!({
        "text": answer.text,
        "tokens": answer.tokens,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "finish": answer.finish.name(),
        "prefill_s": answer.prefill_s,
        "decode_s": answer.decode_s,
        "load_s": engine.load_s(),
        "prefill_tok_s": prefill_rate,
        "decode_tok_s": decode_rate,
        "ctx": engine.placement().ctx,
        "seed": sampling.seed,
        "task": engine.task(),
        "skill": skill,
        "device": device_json(engine.placement()),
        "counters": counters_json(&answer.decode_counters, answer.decode_runs, &totals, engine.placement()),
        "speculation": {
            "mode": answer.speculated.mode.name(),
            "drafted": answer.speculated.drafted,
            "accepted": answer.speculated.accepted,
            "rounds": answer.speculated.rounds,
        },
    }))
}

/// What a steady token costs, and totals. Costs of no run are null.
pub fn counters_json(decode: &Counters, runs: u64, totals: &Counters, placement: &Placement) -> Value {
    let each = |total: u64| match runs {
        0 => Value::Null,
        _ if total.is_multiple_of(runs) => (total / runs).into(),
        _ => (total as f64 / runs as f64).into(),
    };
    json!({
        "submits": each(decode.submits),
        "passes": each(decode.passes),
        "dispatches": each(decode.dispatches),
        "readback_bytes": each(decode.readback_bytes),
        "weight_bytes": each(decode.weight_bytes),
        "kv_bytes": each(decode.kv_bytes),
        "bind_groups_created": each(decode.bind_groups_created),
        "buffers_created": each(decode.buffers_created),
        "write_buffer_calls": each(decode.write_buffer_calls),
        "pipelines_compiled": totals.pipelines_compiled,
        "pipeline_ms": totals.pipeline_us as f64 / 1000.0,
        "upload_bytes": totals.upload_bytes,
        "peak_host_bytes": peak_host_bytes(totals, placement),
        "gpu_bytes": totals.gpu_bytes,
        "expert_slots": placement.expert_slots,
        "expert_hits": totals.expert_hits,
        "expert_misses": totals.expert_misses,
        "paged_bytes": totals.paged_bytes,
    })
}

/// The most memory this process ever had, where the system says so, without what a software adapter keeps in it as device
/// memory.
fn peak_host_bytes(totals: &Counters, placement: &Placement) -> Option<u64> {
    let device = if placement.kind == "software" {
        totals.gpu_bytes
    } else {
        0
    };
    Some(peak_bytes()?.saturating_sub(device))
}

/// The most memory this process ever had, where the system says so.
pub fn peak_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}
