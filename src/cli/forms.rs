//! The forms of a command line that users of other programs type, brought into the form that the parser knows.
//!
//! `cmf-gpu MODEL PROMPT` means `run`; flags that other programs have and this one does not need are left out, with a note that
//! says why.

use clap::Command;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::Path;

/// A flag of other programs that changes nothing here.
struct Needless {
    names: &'static [&'static str],
    /// Whether a value follows it. An optional one is a value if it does not begin with a hyphen.
    value: bool,
    why: &'static str,
}

const EVERYTHING: &str = "every layer runs on the device";
const THREADS: &str = "the device computes, no threads have to be chosen";

const NEEDLESS: [Needless; 12] = [
    flag(&["-ngl", "--gpu-layers", "--n-gpu-layers"], true, EVERYTHING),
    flag(&["-t", "--threads", "-tb", "--threads-batch"], true, THREADS),
    flag(
        &["-fa", "--flash-attn"],
        true,
        "attention never stores a matrix of scores",
    ),
    flag(
        &["--jinja", "--no-jinja"],
        false,
        "the chat template of the model is always used; --raw uses none",
    ),
    flag(
        &["-cnv", "--conversation", "-i", "--interactive"],
        false,
        "without a prompt there is a chat on a terminal",
    ),
    flag(
        &["-no-cnv", "--no-conversation", "-st", "--single-turn"],
        false,
        "a prompt gets one answer",
    ),
    flag(&["--color"], false, "an answer has no colours"),
    flag(
        &["--mlock", "--no-mmap", "--mmap"],
        false,
        "the file is mapped, and the weights are copied to the device",
    ),
    flag(
        &["-b", "--batch-size", "-ub", "--ubatch-size"],
        true,
        "the sizes of runs follow from the model",
    ),
    flag(&["--no-warmup", "--warmup"], false, "there is no warm-up run"),
    flag(
        &["--no-display-prompt", "--log-disable"],
        false,
        "stdout has the answer only; -q leaves out notes",
    ),
    flag(&["--special", "-sp"], false, "special tokens are not printed"),
];

const fn flag(names: &'static [&'static str], value: bool, why: &'static str) -> Needless {
    Needless { names, value, why }
}

/// Other spellings with one hyphen and several letters, which the parser would read as several flags.
const SPELLINGS: [(&str, &str); 6] = [
    // Unknown, but not the help that -h prints.
    ("-hf", "--hf-repo"),
    ("-sys", "--system"),
    ("-ctk", "--kv"),
    ("-ctv", "--kv"),
    ("--cache-type-k", "--kv"),
    ("--cache-type-v", "--kv"),
];

/// A command line in the parser's form, and notes for the user.
pub struct Plain {
    pub arguments: Vec<OsString>,
    pub notes: Vec<String>,
}

/// Brings the arguments, of which the first is the program's name, into the parser's form.
pub fn plain(arguments: Vec<OsString>, parser: &Command) -> Plain {
    let mut arguments = arguments;
    let mut notes = Vec::new();
    let at = first_word(&arguments);
    let word = arguments
        .get(at)
        .and_then(|word| word.to_str())
        .unwrap_or_default()
        .to_owned();
    match word.as_str() {
        "version" => arguments[at] = "--version".into(),
        "--list-devices" => arguments[at] = "devices".into(),
        _ if is_run(&word, at < arguments.len(), parser) => arguments.insert(at, "run".into()),
        _ => {}
    }
    if arguments.get(at).is_some_and(|word| word == "run")
        && let Some(run) = parser.find_subcommand("run")
    {
        arguments = without_needless(arguments, at + 1, run, &mut notes);
    }
    Plain { arguments, notes }
}

/// The index of the first argument that is not a flag of all commands.
fn first_word(arguments: &[OsString]) -> usize {
    const GLOBAL: [&str; 5] = ["--json", "-q", "--quiet", "-v", "--verbose"];
    let is_global = |argument: &OsString| GLOBAL.iter().any(|flag| argument == flag);
    let flags = arguments.iter().skip(1).take_while(|argument| is_global(argument));
    1 + flags.count()
}

/// Whether the command `run` is left out before this word: a model, or a flag of `run`.
fn is_run(word: &str, exists: bool, parser: &Command) -> bool {
    const OF_PROGRAM: [&str; 4] = ["-h", "--help", "-V", "--version"];
    if !exists || OF_PROGRAM.contains(&word) || word == "help" || parser.find_subcommand(word).is_some() {
        return false;
    }
    let is_name = word.contains('/') || word.contains('\\') || Path::new(word).extension().is_some();
    word.starts_with('-') || is_name || Path::new(word).exists()
}

/// The arguments without flags that are not needed, from index `from` on. Values of the parser's flags are not looked at.
fn without_needless(arguments: Vec<OsString>, from: usize, run: &Command, notes: &mut Vec<String>) -> Vec<OsString> {
    let with_value = flags_with_value(run);
    let mut rest = arguments.into_iter().peekable();
    let mut kept: Vec<OsString> = rest.by_ref().take(from).collect();
    while let Some(argument) = rest.next() {
        let text = argument.to_str().unwrap_or_default();
        if text == "--" {
            kept.push(argument);
            break;
        }
        let (name, joined) = match text.split_once('=') {
            Some((name, value)) if text.starts_with("--") => (name, Some(value)),
            _ => (text, None),
        };
        if let Some(needless) = NEEDLESS.iter().find(|flag| flag.names.contains(&name)) {
            if needless.value && joined.is_none() {
                // The value of -fa is optional.
                let is_value = |next: &OsString| {
                    !next
                        .to_str()
                        .is_some_and(|next| next.starts_with('-') && !is_number(next))
                };
                let optional = name == "-fa" || name == "--flash-attn";
                let known = |next: &OsString| ["on", "off", "auto", "0", "1"].iter().any(|value| next == value);
                rest.next_if(|next| if optional { known(next) } else { is_value(next) });
            }
            notes.push(format!("note: {name} is not needed: {}", needless.why));
            continue;
        }
        if let Some((_, ours)) = SPELLINGS.iter().find(|(theirs, _)| *theirs == name) {
            kept.push(match joined {
                Some(value) => format!("{ours}={value}").into(),
                None => (*ours).into(),
            });
        } else {
            let takes_value = with_value.contains(text);
            kept.push(argument.clone());
            if !takes_value {
                continue;
            }
        }
        if joined.is_none() {
            kept.extend(rest.next());
        }
    }
    kept.extend(rest);
    kept
}

fn is_number(text: &str) -> bool {
    text.parse::<f64>().is_ok()
}

/// The spellings of all flags that take a value.
fn flags_with_value(command: &Command) -> BTreeSet<String> {
    let flags = command
        .get_arguments()
        .filter(|flag| flag.get_action().takes_values() && !flag.is_positional());
    let spellings = flags.flat_map(|flag| {
        let long = flag
            .get_long_and_visible_aliases()
            .into_iter()
            .flatten()
            .map(|name| format!("--{name}"));
        let hidden = flag
            .get_all_aliases()
            .into_iter()
            .flatten()
            .map(|name| format!("--{name}"));
        let short = flag
            .get_short_and_visible_aliases()
            .into_iter()
            .flatten()
            .map(|name| format!("-{name}"));
        long.chain(hidden).chain(short).collect::<Vec<_>>()
    });
    spellings.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn formed(words: &[&str]) -> (Vec<String>, usize) {
        let arguments = ["cmf-gpu"].iter().chain(words).map(OsString::from).collect();
        let Plain { arguments, notes } = plain(arguments, &super::super::Cli::command());
        let words = arguments[1..]
            .iter()
            .map(|word| word.to_str().unwrap().to_owned())
            .collect();
        (words, notes.len())
    }

    #[test]
    fn a_command_may_be_left_out_before_a_model() {
        for (given, wanted) in [
            (&["m.gguf", "hi"][..], &["run", "m.gguf", "hi"][..]),
            (&["dir/m"], &["run", "dir/m"]),
            (&["-m", "m", "-p", "hi"], &["run", "-m", "m", "-p", "hi"]),
            (&["--json", "m.cmf"], &["--json", "run", "m.cmf"]),
            (&["info", "m.cmf"], &["info", "m.cmf"]),
            (&["version"], &["--version"]),
            (&["help", "run"], &["help", "run"]),
            (&["--help"], &["--help"]),
            (&["--list-devices"], &["devices"]),
            (&["nonsense"], &["nonsense"]),
            (&[], &[]),
        ] {
            assert_eq!(
                formed(given),
                (wanted.iter().map(|&word| word.to_owned()).collect(), 0),
                "{given:?}"
            );
        }
    }

    #[test]
    fn flags_that_are_not_needed_are_left_out() {
        for (given, wanted, notes) in [
            (
                &["-m", "m", "-ngl", "99", "-t", "4", "-p", "-t"][..],
                &["run", "-m", "m", "-p", "-t"][..],
                2,
            ),
            (
                &["run", "m", "-fa", "on", "-fa", "--jinja", "hi"],
                &["run", "m", "hi"],
                3,
            ),
            (
                &["run", "m", "--n-gpu-layers=99", "-ctk", "f16"],
                &["run", "m", "--kv", "f16"],
                1,
            ),
            (
                &["run", "m", "-ngl", "-1", "--", "-ngl"],
                &["run", "m", "--", "-ngl"],
                1,
            ),
            (&["run", "m", "-sys", "-t"], &["run", "m", "--system", "-t"], 0),
            (&["bench", "m", "-t", "4"], &["bench", "m", "-t", "4"], 0),
        ] {
            assert_eq!(
                formed(given),
                (wanted.iter().map(|&word| word.to_owned()).collect(), notes),
                "{given:?}"
            );
        }
    }
}
