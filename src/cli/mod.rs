//! The command line: parsing, dispatch, and the exit code.
//!
//! The only module that prints, reads the environment or ends the process. One file per command or group of small commands;
//! shared code is in `args` (flags), `model` and `file` (files), `context` and `output` (results), and `interrupt` (Ctrl-C).

mod answer;
mod args;
mod bench;
mod chat;
mod context;
mod convert;
mod devices;
mod file;
mod forms;
mod imagine;
mod info;
mod interrupt;
mod logits;
mod mask;
mod model;
mod output;
mod overlay;
mod parity;
mod ppl;
mod prompt;
mod run;
mod sampling;
mod shaders;
mod skill;
mod text;
mod tools;
mod verify;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use cmf_gpu::{Error, Kind};
use context::{Context, Outcome, Result, interrupted, usage};
use interrupt::Interrupt;
use output::Output;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

/// The environment variables, for `--help`.
const ENVIRONMENT: &str = "\
Examples:
  cmf-gpu model.gguf                        a chat
  cmf-gpu model.gguf 'Why is the sky blue?' one answer
  cmf-gpu help run                          the flags of a command

Environment variables (a flag takes precedence):
  CMF_GPU_MODEL    the model of a command that is given none
  CMF_GPU_DEVICE   --device
  CMF_GPU_CTX      --ctx
  CMF_GPU_KV       --kv
  CMF_GPU_VRAM_MB  --vram-mb";

/// Runs language models, and makes pictures, from GGUF, CMF and .ninfer files and Hugging Face directories on any GPU.
#[derive(Parser)]
#[command(name = "cmf-gpu", version, max_term_width = 100)]
#[command(after_help = ENVIRONMENT)]
struct Cli {
    /// Prints one JSON object on stdout, also for an error
    #[arg(long, global = true)]
    json: bool,
    /// Prints only errors on stderr
    #[arg(short, long, global = true)]
    quiet: bool,
    /// Prints details on stderr
    #[arg(short, long, global = true)]
    verbose: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Lists the devices that can run models
    Devices,
    /// Describes a model file
    Info(info::Args),
    /// Checks every hash and every weight of a model file
    Verify(verify::Args),
    /// Signs the files of a model
    Sign(tools::SignArgs),
    /// Lists the differences between two models
    Diff(tools::DiffArgs),
    /// Splits a model into several files
    Shard(tools::ShardArgs),
    /// Writes a model as one file without unused bytes
    Compact(tools::CompactArgs),
    /// Lists and describes task masks
    Mask(mask::Args),
    /// Lists, adds, removes, exports, applies, routes, fits and measures skills
    Skill(skill::Args),
    /// Removes the neurons that a task's mask switches off
    Defrag(tools::DefragArgs),
    /// Adds a mask that keeps the experts a task uses
    MoeMask(tools::MoeMaskArgs),
    /// Removes the experts that a task does not use
    MoeDefrag(tools::MoeDefragArgs),
    /// Answers a prompt
    Run(run::Args),
    /// Makes pictures from a text
    Imagine(imagine::Args),
    /// Writes teacher-forced logits of every position
    Logits(logits::Args),
    /// Measures the perplexity of a text
    Ppl(ppl::Args),
    /// Compares a device with the CPU reference, kernel by kernel or step by step
    Parity(parity::Args),
    /// Measures the speed of prefill and decode
    Bench(bench::Args),
    /// Converts a Hugging Face or diffusers directory, a GGUF, .ninfer or CMF file to CMF, and ternary models between GGUF and
    /// .ninfer
    Convert(convert::Args),
    /// Prints the prompt that the chat template makes of a conversation
    ChatTemplate(text::TemplateArgs),
    /// Prints the tokens of a text
    Tokenize(text::TokenizeArgs),
    /// Prints the text of tokens
    Detokenize(text::DetokenizeArgs),
    /// Prints the WGSL of every kernel variant
    Shaders(shaders::Args),
}

impl Command {
    #[cfg(target_os = "linux")]
    fn needs_device(&self) -> bool {
        use Command::{Bench, Devices, Imagine, Logits, Parity, Ppl, Run, Skill};
        let always = matches!(
            self,
            Devices | Run(_) | Imagine(_) | Logits(_) | Ppl(_) | Parity(_) | Bench(_)
        );
        always || matches!(self, Skill(args) if args.needs_device())
    }

    /// The flags that help against an error. The library does not know them.
    fn hint(&self) -> Hint {
        match self {
            Command::Imagine(_) => |kind| match kind {
                Kind::OutOfMemory => Some("-W and -H set the size, --vram-mb the memory limit"),
                _ => None,
            },
            _ => flags,
        }
    }

    fn run(self, context: &mut Context) -> Result {
        match self {
            Command::Devices => devices::run(context),
            Command::Info(args) => info::run(args, context),
            Command::Verify(args) => verify::run(args, context),
            Command::Sign(args) => tools::sign(args, context),
            Command::Diff(args) => tools::diff(args, context),
            Command::Shard(args) => tools::shard(args, context),
            Command::Compact(args) => tools::compact(args, context),
            Command::Mask(args) => mask::run(args, context),
            Command::Skill(args) => skill::run(args, context),
            Command::Defrag(args) => tools::defrag(args, context),
            Command::MoeMask(args) => tools::moe_mask(args, context),
            Command::MoeDefrag(args) => tools::moe_defrag(args, context),
            Command::Run(args) => run::run(args, context),
            Command::Imagine(args) => imagine::run(args, context),
            Command::Logits(args) => logits::run(args, context),
            Command::Ppl(args) => ppl::run(args, context),
            Command::Parity(args) => parity::run(args, context),
            Command::Bench(args) => bench::run(args, context),
            Command::Convert(args) => convert::run(args, context),
            Command::ChatTemplate(args) => text::template(args, context),
            Command::Tokenize(args) => text::tokenize(args, context),
            Command::Detokenize(args) => text::detokenize(args, context),
            Command::Shaders(args) => shaders::run(args, context),
        }
    }
}

/// The flags that help against an error.
type Hint = fn(Kind) -> Option<&'static str>;

/// Runs the program.
pub fn main() -> ExitCode {
    // A panic is a bug. The hook keeps its message, because the default report takes several lines and some panics are
    // caught on purpose.
    let message = Arc::new(Mutex::new(String::new()));
    let kept = message.clone();
    std::panic::set_hook(Box::new(move |info| {
        if let Ok(mut kept) = kept.lock() {
            *kept = info.to_string();
        }
    }));
    let arguments: Vec<OsString> = std::env::args_os().collect();
    // Errors in the arguments are reported before they are parsed.
    let json = arguments.iter().any(|argument| argument == "--json");
    catch_unwind(AssertUnwindSafe(|| start(arguments, json))).unwrap_or_else(|_| {
        let message = message
            .lock()
            .map(|message| message.replace('\n', " "))
            .unwrap_or_default();
        let message = format!("this is a bug, please report it: {message}");
        failed(&Error::new(Kind::Internal, message), json, flags)
    })
}

fn start(arguments: Vec<OsString>, json: bool) -> ExitCode {
    let command = Cli::command().version(version());
    let forms::Plain { arguments, notes } = forms::plain(arguments, &command);
    let parsed = command.try_get_matches_from(arguments);
    let parsed = parsed.and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(err) if matches!(err.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            let text = err.render().to_string();
            let mut out = Output::new(false, true, false);
            let printed = out.text(&text).and_then(|()| out.flush());
            return ended(printed.map(|()| Outcome::Done), false, flags);
        }
        Err(err) => return failed(&usage(one_line(&err)), json, flags),
    };
    #[cfg(target_os = "linux")]
    if cli.command.needs_device() {
        without_device_selection();
    }
    let interrupt = match Interrupt::install() {
        Ok(interrupt) => interrupt,
        Err(err) => return failed(&err, cli.json, flags),
    };
    let mut context = Context {
        out: Output::new(cli.json, cli.quiet, cli.verbose),
        interrupt,
    };
    notes.iter().for_each(|note| context.out.note(note));
    let hint = cli.command.hint();
    let result = cli.command.run(&mut context);
    let result = match result.and_then(|outcome| context.out.flush().map(|()| outcome)) {
        // Ctrl-C also ends the program that reads the other end of the pipe.
        Err(err) if output::is_closed(&err) && context.interrupt.cancel().is_cancelled() => Err(interrupted()),
        result => result,
    };
    ended(result, cli.json, hint)
}

fn ended(result: Result, json: bool, hint: Hint) -> ExitCode {
    match result {
        Ok(Outcome::Done) => ExitCode::from(0),
        Ok(Outcome::Failed) => ExitCode::from(1),
        Ok(Outcome::Interrupted) => ExitCode::from(130),
        Err(err) if err.kind == Kind::Interrupted => {
            if json {
                print_object(&json!({"finish": cmf_gpu::Finish::Interrupted.name()}));
            }
            ExitCode::from(130)
        }
        Err(err) => failed(&err, json, hint),
    }
}

/// Prints the JSON object of a command that has printed nothing else.
fn print_object(object: &Value) {
    let mut out = Output::new(true, true, false);
    // A failure to write has no other place to be reported.
    let _ = out.json(object).and_then(|()| out.flush());
}

/// Reports an error: one line on stderr, and with `--json` an object on stdout.
fn failed(err: &Error, json: bool, hint: Hint) -> ExitCode {
    // The reader of a closed pipe has ended on purpose, as in `| head`.
    if output::is_closed(err) {
        return ExitCode::from(0);
    }
    let message = match hint(err.kind) {
        Some(flags) => format!("{} ({flags})", err.message),
        None => err.message.clone(),
    };
    output::error_line(err.kind, &message);
    if json {
        print_object(&json!({"error": {"kind": err.kind.name(), "message": message}}));
    }
    ExitCode::from(if err.kind == Kind::Usage { 2 } else { 1 })
}

/// The message of a parser error on one line, without usage lines and pointers to help.
fn one_line(err: &clap::Error) -> String {
    use ErrorKind::{DisplayHelpOnMissingArgumentOrSubcommand, MissingSubcommand};
    if matches!(err.kind(), DisplayHelpOnMissingArgumentOrSubcommand | MissingSubcommand) {
        return "a command is missing; --help lists them".into();
    }
    let text = err.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let paragraphs = text
        .split("\n\n")
        .take_while(|part| !part.trim_start().starts_with("Usage:") && !part.starts_with("For more information"));
    let lines: Vec<String> = paragraphs
        .map(|part| part.split_whitespace().collect::<Vec<_>>().join(" "))
        .filter_map(|line| match line.split_once("as a value, use '-- ") {
            Some((_, value)) => value_tip(value.trim_end_matches('\'')),
            None => Some(line),
        })
        .filter(|line| !line.is_empty())
        .collect();
    lines.join("; ")
}

/// How to pass a value that the parser took for a flag: its own tip works only for positional values. `None` where the
/// text is a flag and no value.
fn value_tip(value: &str) -> Option<String> {
    let tip = || format!("tip: to pass it as a value, write --flag={value}, or put it after --");
    (!value.starts_with("--")).then(tip)
}

/// The flags that help a language model against an error.
fn flags(kind: Kind) -> Option<&'static str> {
    match kind {
        Kind::ContextFull => Some("--ctx sets the context length"),
        Kind::OutOfMemory => Some("--ctx sets the context length, --vram-mb the memory limit"),
        _ => None,
    }
}

/// Restarts the program with one Vulkan layer disabled, which would print `error:` lines of its own.
///
/// Mesa's device selection layer connects to a Wayland display, and that library complains on stderr where there is no
/// session directory: over ssh, in containers. This program selects the device itself and does not need the layer. An
/// environment can only be changed safely for a new program, which on Unix replaces this one.
#[cfg(target_os = "linux")]
fn without_device_selection() {
    use std::os::unix::process::CommandExt;
    const SWITCH: &str = "NODEVICE_SELECT";
    if std::env::var_os("XDG_RUNTIME_DIR").is_some() || std::env::var_os(SWITCH).is_some() {
        return;
    }
    let mut arguments = std::env::args_os();
    if let (Ok(program), Some(name)) = (std::env::current_exe(), arguments.next()) {
        // Returns only on failure, which leaves the extra lines and nothing else wrong.
        let _ = std::process::Command::new(program)
            .arg0(name)
            .args(arguments)
            .env(SWITCH, "1")
            .exec();
    }
}

/// The version and the graphics backends that were compiled in.
fn version() -> &'static str {
    let names = cmf_gpu::gpu::compiled_backends();
    // clap needs a text that lives as long as the program; this is made once.
    Box::leak(format!("{} (backends: {})", env!("CARGO_PKG_VERSION"), names.join(", ")).into_boxed_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_parser_is_sound_and_help_lists_every_environment_variable() {
        fn names(command: &clap::Command, found: &mut BTreeSet<String>) {
            let env = command.get_arguments().filter_map(|argument| argument.get_env());
            found.extend(env.map(|name| name.to_str().unwrap().to_owned()));
            command.get_subcommands().for_each(|command| names(command, found));
        }
        let command = Cli::command();
        command.clone().debug_assert();
        let mut found = BTreeSet::from([model::ENVIRONMENT.to_owned()]);
        names(&command, &mut found);
        let listed = ENVIRONMENT
            .lines()
            .skip_while(|line| !line.starts_with("Environment"))
            .skip(1);
        let listed: BTreeSet<String> = listed
            .map(|line| line.split_whitespace().next().unwrap().to_owned())
            .collect();
        assert_eq!(found, listed);
    }

    #[test]
    fn parser_errors_take_one_line() {
        let message = |arguments: &[&str]| match Cli::try_parse_from(arguments) {
            Ok(_) => String::new(),
            Err(err) => one_line(&err),
        };
        assert_eq!(message(&["cmf-gpu"]), "a command is missing; --help lists them");
        let unknown = message(&["cmf-gpu", "run", "--tmep", "1"]);
        assert!(
            unknown.starts_with("unexpected argument '--tmep' found; tip: ") && unknown.contains("--temp"),
            "{unknown}"
        );
        assert_eq!(
            message(&["cmf-gpu", "run", "m", "--skill", "-x"]),
            "unexpected argument '-x' found; tip: to pass it as a value, write --flag=-x, or put it after --"
        );
        assert_eq!(
            message(&["cmf-gpu", "skill", "route", "m", "--task", "x"]),
            "unexpected argument '--task' found"
        );
    }
}
