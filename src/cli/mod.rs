//! The command line: parsing, dispatch, and how a run of the program ends.
//!
//! The only place that prints, reads the environment or ends the process. One file a command; what several share is in
//! `args` (flags), `model` (which one), `output` (streams) and `interrupt` (Ctrl-C). Commands know the library's public
//! face and nothing else.

mod answer;
mod args;
mod bench;
mod chat;
mod chat_template;
mod compact;
mod convert;
mod defrag;
mod detokenize;
mod devices;
mod diff;
mod info;
mod interrupt;
mod logits;
mod mask;
mod model;
mod moe;
mod output;
mod overlay;
mod parity;
mod ppl;
mod prompt;
mod run;
mod shaders;
mod shard;
mod sign;
mod skill;
mod tokenize;
mod verify;
mod work;

use clap::builder::FalseyValueParser;
use clap::error::ErrorKind;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};
use cmf_gpu::session::Finish;
use cmf_gpu::{Error, Kind};
use interrupt::Interrupt;
use output::Output;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

/// Runs language models from CMF files on any GPU.
#[derive(Parser)]
#[command(name = "cmf-gpu", version, max_term_width = 100, disable_help_subcommand = true)]
#[command(after_help = "Every flag has an environment twin, CMF_GPU_ and its name in capitals; the flag wins.")]
struct Cli {
    /// Prints one JSON object on stdout, errors too
    #[arg(long, global = true, env = "CMF_GPU_JSON", value_parser = FalseyValueParser::new(), hide_env = true)]
    json: bool,
    /// Leaves stderr to errors
    #[arg(short, long, global = true, env = "CMF_GPU_QUIET", value_parser = FalseyValueParser::new(), hide_env = true)]
    quiet: bool,
    /// Says more on stderr
    #[arg(short, long, global = true, env = "CMF_GPU_VERBOSE", value_parser = FalseyValueParser::new(), hide_env = true)]
    verbose: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Lists what models can run on
    Devices,
    /// Shows what is in a model file
    Info(info::Args),
    /// Checks every hash and every weight of a model file
    Verify(verify::Args),
    /// Signs the files of a model
    Sign(sign::Args),
    /// Shows what two models have not in common
    Diff(diff::Args),
    /// Splits a model into several files
    Shard(shard::Args),
    /// Writes a model as one file without dead bytes
    Compact(compact::Args),
    /// Shows task masks
    Mask(mask::Args),
    /// Lists, adds, removes, exports, applies, routes, fits and measures skills
    Skill(skill::Args),
    /// Drops the neurons that a task's mask switches off
    Defrag(defrag::Args),
    /// Adds a mask that keeps the experts a task uses
    MoeMask(moe::MaskArgs),
    /// Drops the experts that a task does not use
    MoeDefrag(moe::DefragArgs),
    /// Answers a prompt
    Run(run::Args),
    /// Writes teacher-forced logits of every position
    Logits(logits::Args),
    /// Measures the perplexity of a text
    Ppl(ppl::Args),
    /// Compares a device with the reference on the host, kernel by kernel or step by step
    Parity(parity::Args),
    /// Measures prefill and decode speed
    Bench(bench::Args),
    /// Makes a CMF file of a Hugging Face directory, a GGUF file or another CMF file
    Convert(convert::Args),
    /// Shows the prompt that a conversation becomes
    ChatTemplate(chat_template::Args),
    /// Shows the tokens of a text
    Tokenize(tokenize::Args),
    /// Shows the text of tokens
    Detokenize(detokenize::Args),
    /// Shows the WGSL of every kernel variant
    Shaders(shaders::Args),
}

impl Command {
    #[cfg(target_os = "linux")]
    fn needs_device(&self) -> bool {
        matches!(
            self,
            Command::Devices
                | Command::Run(_)
                | Command::Logits(_)
                | Command::Ppl(_)
                | Command::Parity(_)
                | Command::Bench(_)
        ) || matches!(self, Command::Skill(args) if args.needs_device())
    }
}

/// What every command gets: where to write, whether to stop, and where values come from.
struct Context {
    out: Output,
    interrupt: Interrupt,
    /// The command's own matches, for [`args::chosen`].
    matches: ArgMatches,
}

/// How a command ends when nothing failed.
enum Outcome {
    /// All is well.
    Done,
    /// A check failed; it was reported.
    Failed,
    /// Ctrl-C.
    Interrupted,
}

/// A command's result.
type Result<T = Outcome> = cmf_gpu::Result<T>;

/// An error about how the program was called.
fn usage(message: impl Into<String>) -> Error {
    Error::new(Kind::Usage, message)
}

/// What work ends with that Ctrl-C ends.
fn interrupted() -> Error {
    Error::new(Kind::Interrupted, "cancelled")
}

/// Runs the program.
pub fn main() -> ExitCode {
    // A panic is a defect. Its own report would be many lines, and some are caught on purpose further down.
    let panicked = Arc::new(Mutex::new(String::new()));
    let told = panicked.clone();
    std::panic::set_hook(Box::new(move |info| {
        if let Ok(mut told) = told.lock() {
            *told = info.to_string();
        }
    }));
    let arguments: Vec<OsString> = std::env::args_os().collect();
    // Until the arguments are understood; an error in them is reported the way they ask for.
    let json = arguments.iter().any(|argument| argument == "--json") || {
        let value = std::env::var("CMF_GPU_JSON").unwrap_or_default();
        !["", "0", "false", "no", "off", "n", "f"].contains(&value.to_lowercase().as_str())
    };
    match catch_unwind(AssertUnwindSafe(|| start(arguments, json))) {
        Ok(code) => code,
        Err(_) => {
            let what = panicked.lock().map(|told| told.clone()).unwrap_or_default();
            let message = format!("internal error, please report it: {}", what.replace('\n', " "));
            failed(&Error::new(Kind::DeviceError, message), json)
        }
    }
}

fn start(arguments: Vec<OsString>, json: bool) -> ExitCode {
    let command = Cli::command().version(version());
    let parsed = command
        .try_get_matches_from(arguments)
        .and_then(|matches| Ok((Cli::from_arg_matches(&matches)?, matches)));
    let (cli, matches) = match parsed {
        Ok(parsed) => parsed,
        Err(err) if matches!(err.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            let text = err.render().to_string();
            let mut out = Output::new(false, true, false);
            return ended(
                out.text(&text).and_then(|()| out.finish()).map(|()| Outcome::Done),
                false,
            );
        }
        Err(err) => return failed(&usage(one_line(&err)), json),
    };
    #[cfg(target_os = "linux")]
    if cli.command.needs_device() {
        without_device_selection();
    }
    let interrupt = match Interrupt::install() {
        Ok(interrupt) => interrupt,
        Err(err) => return failed(&err, cli.json),
    };
    let mut context = Context {
        out: Output::new(cli.json, cli.quiet, cli.verbose),
        interrupt,
        matches: matches
            .subcommand()
            .map(|(_, matches)| matches.clone())
            .unwrap_or_default(),
    };
    let result = dispatch(cli.command, &mut context).and_then(|outcome| context.out.finish().map(|()| outcome));
    let result = match result {
        // Ctrl-C ends whoever reads the other end of the pipe, too.
        Err(err) if output::is_closed(&err) && context.interrupt.cancel().is_cancelled() => Err(interrupted()),
        result => result,
    };
    ended(result, cli.json)
}

fn dispatch(command: Command, context: &mut Context) -> Result {
    match command {
        Command::Devices => devices::run(context),
        Command::Info(args) => info::run(args, context),
        Command::Verify(args) => verify::run(args, context),
        Command::Sign(args) => sign::run(args, context),
        Command::Diff(args) => diff::run(args, context),
        Command::Shard(args) => shard::run(args, context),
        Command::Compact(args) => compact::run(args, context),
        Command::Mask(args) => mask::run(args, context),
        Command::Skill(args) => skill::run(args, context),
        Command::Defrag(args) => defrag::run(args, context),
        Command::MoeMask(args) => moe::mask(args, context),
        Command::MoeDefrag(args) => moe::defrag(args, context),
        Command::Run(args) => run::run(args, context),
        Command::Logits(args) => logits::run(args, context),
        Command::Ppl(args) => ppl::run(args, context),
        Command::Parity(args) => parity::run(args, context),
        Command::Bench(args) => bench::run(args, context),
        Command::Convert(args) => convert::run(args, context),
        Command::ChatTemplate(args) => chat_template::run(args, context),
        Command::Tokenize(args) => tokenize::run(args, context),
        Command::Detokenize(args) => detokenize::run(args, context),
        Command::Shaders(args) => shaders::run(args, context),
    }
}

fn ended(result: Result, json: bool) -> ExitCode {
    match result {
        Ok(Outcome::Done) => code(0),
        Ok(Outcome::Failed) => code(1),
        Ok(Outcome::Interrupted) => code(130),
        Err(err) if err.kind == Kind::Interrupted => {
            // A reader of JSON gets its one object all the same, with the word that an answer ends with.
            if json {
                answer_object(&json!({"finish": Finish::Interrupted.name()}));
            }
            code(130)
        }
        Err(err) => failed(&err, json),
    }
}

/// Writes the one object when it is all that is left to do.
fn answer_object(object: &Value) {
    let mut out = Output::new(true, true, false);
    // Where that fails too there is nobody left to tell.
    let _ = out.json(object).and_then(|()| out.finish());
}

/// Reports an error: one line on stderr, and the object that was promised on stdout.
fn failed(err: &Error, json: bool) -> ExitCode {
    // Nobody reads the other end of the pipe any more, which is not worth a word.
    if output::is_closed(err) {
        return code(0);
    }
    output::error_line(&err.to_string());
    if json {
        answer_object(&json!({"error": {"kind": err.kind.name(), "message": err.message}}));
    }
    code(if err.kind == Kind::Usage { 2 } else { 1 })
}

fn code(code: u8) -> ExitCode {
    ExitCode::from(code)
}

/// What the parser says in one line, without its usage lines and hints about help.
fn one_line(err: &clap::Error) -> String {
    let missing = [
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand,
        ErrorKind::MissingSubcommand,
    ];
    if missing.contains(&err.kind()) {
        return "a command is missing; --help lists them".into();
    }
    let text = err.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let said = text
        .split("\n\n")
        .take_while(|part| !part.trim_start().starts_with("Usage:") && !part.starts_with("For more information"));
    let parts: Vec<String> = said
        .map(|part| part.split_whitespace().collect::<Vec<_>>().join(" "))
        .filter_map(|part| match part.split_once("as a value, use '-- ") {
            Some((_, value)) => dashed(value.trim_end_matches('\'')),
            None => Some(part),
        })
        .filter(|part| !part.is_empty())
        .collect();
    parts.join("; ")
}

/// How to give a value that was taken for a flag, as the parser knows only the one without a flag; `None`: it is none.
fn dashed(value: &str) -> Option<String> {
    let joined =
        || format!("tip: as a value it is joined to its flag, as in --flag={value}, or comes after -- without one");
    (!value.starts_with("--")).then(joined)
}

/// Starts the program anew with a Vulkan layer disabled that would print `error:` lines of its own.
///
/// Mesa's device selection layer connects to a Wayland display, and that library complains on stderr where there is no
/// session directory: over ssh, in containers. Which device runs a model is chosen here, so the layer is not missed. An
/// environment can only be changed safely by a new program, which on Unix takes this one's place.
#[cfg(target_os = "linux")]
fn without_device_selection() {
    use std::os::unix::process::CommandExt;
    const SWITCH: &str = "NODEVICE_SELECT";
    if std::env::var_os("XDG_RUNTIME_DIR").is_some() || std::env::var_os(SWITCH).is_some() {
        return;
    }
    let mut arguments = std::env::args_os();
    if let (Ok(program), Some(name)) = (std::env::current_exe(), arguments.next()) {
        // Only returns when it cannot be done, and then the noise is all that is wrong.
        let _ = std::process::Command::new(program)
            .arg0(name)
            .args(arguments)
            .env(SWITCH, "1")
            .exec();
    }
}

/// The version and the graphics interfaces that were compiled in.
fn version() -> &'static str {
    let names = cmf_gpu::gpu::compiled_backends();
    // The parser wants text that outlives it; this is made once.
    Box::leak(format!("{} (backends: {})", env!("CARGO_PKG_VERSION"), names.join(", ")).into_boxed_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parser_is_sound_and_every_flag_has_its_environment_twin() {
        let command = Cli::command();
        command.clone().debug_assert();
        let subcommands: Vec<_> = command.get_subcommands().collect();
        assert!(subcommands.len() > 10);
        for command in subcommands.into_iter().chain([&command]) {
            for flag in command.get_arguments().filter(|flag| flag.get_long().is_some()) {
                let long = flag.get_long().unwrap_or_default();
                if ["help", "version"].contains(&long) {
                    continue;
                }
                let twin = format!("CMF_GPU_{}", long.to_uppercase().replace('-', "_"));
                let env = flag.get_env().and_then(|env| env.to_str());
                assert_eq!(env, Some(twin.as_str()), "{} --{long}", command.get_name());
            }
        }
    }

    #[test]
    fn what_the_parser_says_is_one_line() {
        let said = |arguments: &[&str]| match Cli::try_parse_from(arguments) {
            Ok(_) => String::new(),
            Err(err) => one_line(&err),
        };
        assert_eq!(said(&["cmf-gpu"]), "a command is missing; --help lists them");
        let unknown = said(&["cmf-gpu", "run", "--tmep", "1"]);
        assert!(
            unknown.starts_with("unexpected argument '--tmep' found; tip: ") && unknown.contains("--temp"),
            "{unknown}"
        );
        assert_eq!(
            said(&["cmf-gpu", "run", "m", "--skill", "-x"]),
            "unexpected argument '-x' found; tip: as a value it is joined to its flag, as in --flag=-x, or comes after -- \
             without one"
        );
        assert_eq!(
            said(&["cmf-gpu", "skill", "route", "m", "--task", "x"]),
            "unexpected argument '--task' found"
        );
    }
}
