//! The parser's errors as one line.

use clap::error::ErrorKind;

/// The message of a parser error on one line, without usage lines and pointers to help.
pub fn one_line(err: &clap::Error) -> String {
    let missing = [
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand,
        ErrorKind::MissingSubcommand,
    ];
    if missing.contains(&err.kind()) {
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
