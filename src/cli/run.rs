//! `run`: answers one prompt; on a terminal without a prompt, a chat.

use super::answer::{report, streamed};
use super::args::{self, LoadArgs, whole};
use super::chat::{self, Chat};
use super::context::{Context, Outcome, Result, usage};
use super::file::OutFile;
use super::output::Output;
use super::overlay::SkillChoice;
use super::prompt::{self, Prompt, PromptArgs};
use super::sampling::SamplingArgs;
use super::{model, verify};
use cmf_gpu::engine::OnText;
use cmf_gpu::options::Sampling;
use cmf_gpu::source::ModelSource;
use cmf_gpu::{Answer, AnswerOptions, Cancel, Engine, Finish, Message};
use serde_json::json;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  cmf-gpu run model.gguf                          a chat, if this is a terminal
  cmf-gpu run model.gguf 'Why is the sky blue?'   one answer
  cmf-gpu run model.gguf -f question.txt --greedy --json
  echo 'Say hello.' | cmf-gpu run model.gguf";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    load: LoadArgs,
    /// The prompt, as with -p
    #[arg(value_name = "PROMPT", conflicts_with_all = ["prompt", "file", "prompt_tokens"])]
    text: Option<String>,
    #[command(flatten)]
    prompt: PromptArgs,
    /// Continues the prompt as it is, without the chat template
    #[arg(long)]
    raw: bool,
    /// A system message before the prompt
    #[arg(
        short,
        long,
        alias = "system-prompt",
        value_name = "TEXT",
        allow_hyphen_values = true
    )]
    system: Option<String>,
    /// Asks the template for an answer without thinking first
    #[arg(long)]
    no_think: bool,
    /// Most tokens of the answer; -1 = as many as the context has
    #[arg(short = 'n', long, aliases = ["n-predict", "predict"], default_value = "512", value_parser = most, allow_negative_numbers = true)]
    max_tokens: usize,
    /// A text that ends the answer and is not part of it; may be repeated
    #[arg(long, value_name = "TEXT", value_parser = stop, allow_hyphen_values = true)]
    stop: Vec<String>,
    /// First checks every hash and every weight, as the command verify does
    #[arg(long)]
    verify: bool,
    /// Writes how often each expert was chosen, for moe-mask, moe-defrag and convert --router-stats
    #[arg(long, value_name = "FILE")]
    route_stats: Option<PathBuf>,
    #[command(flatten)]
    sampling: SamplingArgs,
}

/// A number of tokens; -1 is no limit.
fn most(text: &str) -> Result<usize, String> {
    match text {
        "-1" => Ok(usize::MAX),
        _ => whole(text).map_err(|err| format!("{err}, or -1 for no limit")),
    }
}

fn stop(text: &str) -> Result<String, String> {
    match text {
        "" => Err("an empty text would end every answer before it begins".into()),
        _ => Ok(text.into()),
    }
}

enum Request {
    Answer(Prompt),
    /// No prompt, and a terminal.
    Chat,
    /// No prompt, and an empty stdin.
    Nothing,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let args = args.with_prompt()?;
    // Before the user types a prompt.
    let source = args.load.open()?;
    let prompt = match request(&args, context)? {
        Request::Answer(prompt) => Some(prompt),
        Request::Chat if context.out.json => return Err(usage("--json needs a prompt; a chat is not one object")),
        Request::Chat => None,
        Request::Nothing if context.out.json => return Err(usage("stdin has no prompt")),
        Request::Nothing => {
            context.out.note("note: the prompt is empty, nothing to answer");
            return Ok(Outcome::Done);
        }
    };
    let skills = args.check(prompt.as_ref(), &source)?;
    if args.verify {
        verify::sound(&source, &context.out)?;
    }
    let inputs = source.files.iter().map(PathBuf::as_path).chain(args.prompt.file());
    let routes = args.route_stats.as_deref().map(|path| OutFile::create(path, inputs));
    let routes = routes.transpose()?;
    let mut engine = args.load(source, &skills, context)?;
    let sampling = args.sampling.settings(engine.sampling_defaults())?;
    if sampling.temperature > 0.0 && prompt.is_some() {
        context.out.detail(format!("seed {}", sampling.seed));
    }
    let bare = args.untemplated(prompt.as_ref());
    let options = args.answer_options(&engine, sampling.clone(), bare, &context.out);

    let Some(prompt) = prompt else {
        let outcome = args.chat(&mut engine, sampling, options, context)?;
        write_routes(routes, &mut engine)?;
        return Ok(outcome);
    };
    let cancel = context.interrupt.graceful();
    if skills.needs_prompt() {
        let tokens = prompt.tokens(&engine)?;
        skills.settle(&mut engine, &args.load.task.choice(), &tokens, &cancel, &context.out)?;
    }
    let answer = args.answer(&mut engine, prompt, &options, &cancel, context)?;
    write_routes(routes, &mut engine)?;
    report(&engine, &answer, &sampling, &mut context.out)?;
    Ok(match answer.finish {
        Finish::Interrupted => Outcome::Interrupted,
        _ => Outcome::Done,
    })
}

/// The prompt by the flags, else by stdin.
fn request(args: &Args, context: &Context) -> Result<Request> {
    if let Some(prompt) = args.prompt.given() {
        return Ok(Request::Answer(prompt));
    }
    let file = match args.prompt.file() {
        Some(file) => file,
        None if std::io::stdin().is_terminal() && !args.raw => return Ok(Request::Chat),
        None => Path::new("-"),
    };
    let from_stdin = file == Path::new("-");
    if from_stdin && std::io::stdin().is_terminal() {
        context.out.note("Type the prompt, then Ctrl-D:");
    }
    let text = prompt::read(file)?;
    if from_stdin && text.is_empty() {
        return Ok(Request::Nothing);
    }
    Ok(Request::Answer(Prompt::Text(text)))
}

/// Writes `{"layers": {"3": [counts]}}`.
fn write_routes(routes: Option<OutFile>, engine: &mut Engine) -> Result<()> {
    let Some(file) = routes else { return Ok(()) };
    let object = json!({"layers": engine.route_counts()?});
    file.write(|path| std::fs::write(path, object.to_string()))
}

impl Args {
    /// The same with the prompt that is given by position. Errors: `Usage` for two prompts.
    fn with_prompt(mut self) -> Result<Args> {
        if let Some(text) = self.load.model.text_beside_flag(&mut self.text)? {
            self.prompt.set(text)?;
        }
        Ok(self)
    }

    /// Whether the prompt bypasses the chat template.
    fn untemplated(&self, prompt: Option<&Prompt>) -> bool {
        self.raw || matches!(prompt, Some(Prompt::Tokens(_)))
    }

    /// The skills, once all flags are checked: errors come before the model is loaded. Errors: `Usage`.
    fn check(&self, prompt: Option<&Prompt>, source: &ModelSource) -> Result<SkillChoice> {
        if self.untemplated(prompt) && (self.system.is_some() || self.no_think) {
            return Err(usage(
                "--system and --no-think need the chat template, which --raw and --prompt-tokens bypass",
            ));
        }
        let skills = self.load.overlay.choice(source)?;
        if prompt.is_none() && skills.needs_prompt() {
            let hint = "auto needs a prompt; a chat changes its skill with /set skill ID";
            return Err(usage(hint));
        }
        self.sampling.settings(&Sampling::default())?;
        if let Some(Prompt::Tokens(tokens)) = prompt {
            model::known_tokens(tokens, source)?;
        }
        Ok(skills)
    }

    fn load(&self, source: ModelSource, skills: &SkillChoice, context: &mut Context) -> Result<Engine> {
        let options = self.load.options().speculation(self.sampling.spec);
        let options = options.count_routes(self.route_stats.is_some());
        let engine = args::load(source, &skills.first(options), context)?;
        if self.route_stats.is_some() && !engine.model().has_experts() {
            return Err(usage("--route-stats: the model has no experts"));
        }
        Ok(engine)
    }

    /// The library's options; `bare`: without the chat template. Prints notes about what the model file lacks.
    fn answer_options(&self, engine: &Engine, sampling: Sampling, bare: bool, out: &Output) -> AnswerOptions {
        let template = engine.source().text.chat_template.as_deref();
        if template.is_none() && !bare {
            out.note("note: the file has no chat template; ChatML is used, --raw uses none");
        }
        if engine.stops().is_empty() {
            out.note("note: the file has no token that ends an answer; answers end at -n or at the end of the context");
        }
        let options = AnswerOptions::default().sampling(sampling);
        let mut options = options.max_tokens(self.max_tokens).stop(self.stop.clone());
        if self.no_think {
            if !template.is_some_and(|source| source.contains("enable_thinking")) {
                out.note("note: the chat template has no switch for thinking; --no-think changes nothing");
            }
            options.template_kwargs.insert("enable_thinking".into(), false.into());
        }
        options
    }

    fn chat(self, engine: &mut Engine, sampling: Sampling, options: AnswerOptions, context: &mut Context) -> Result {
        let settings = chat::Settings {
            sampling,
            seed: self.sampling.seed,
            max_tokens: self.max_tokens,
        };
        let mut chat = Chat::new(engine, self.system, settings, options)?;
        let mut lines = chat::lines::source(&context.interrupt)?;
        context.out.note("chat: /help lists the commands, Ctrl-D ends it");
        chat.run(lines.as_mut(), &mut || context.interrupt.renewed(), &mut context.out)
    }

    /// The answer, printed while it is generated unless the output is JSON.
    fn answer(
        &self,
        engine: &mut Engine,
        prompt: Prompt,
        options: &AnswerOptions,
        cancel: &Cancel,
        context: &mut Context,
    ) -> Result<Answer> {
        let out = &mut context.out;
        let mut write = |text: &str| match out.json {
            true => Ok(()),
            false => out.text(text).and_then(|()| out.flush()),
        };
        streamed(&mut write, |on_text: OnText| match prompt {
            Prompt::Tokens(tokens) => engine.continue_tokens(&tokens, options, cancel, on_text),
            Prompt::Text(text) if self.raw => engine.complete(&text, options, cancel, on_text),
            Prompt::Text(text) => {
                let mut messages: Vec<Message> = self.system.iter().map(Message::system).collect();
                messages.push(Message::user(text));
                engine.chat(&messages, options, cancel, on_text)
            }
        })
    }
}
