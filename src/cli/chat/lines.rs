//! The lines of a chat: from a line editor on a terminal, else from stdin; and messages of several lines.

use crate::cli::context::usage;
use crate::cli::interrupt::Interrupt;
use cmf_gpu::{Error, Kind, Result};
use rustyline::error::{ReadlineError, Signal};
use rustyline::history::MemHistory;
use rustyline::{Config, Editor};
use std::io::{BufRead, IsTerminal, Read, Write};

/// Most bytes of a line.
const MAX_LINE: u64 = 1 << 20;
/// The prompt of a message.
const PROMPT: &str = "> ";
/// The prompt of its further lines.
const CONTINUED: &str = ". ";

/// The result of reading a line.
#[derive(Debug, PartialEq, Eq)]
pub enum Line {
    /// A line without its line break.
    Text(String),
    /// Ctrl-C, which discards the typed text.
    Interrupted,
    /// The end of the input.
    End,
}

/// A source of lines.
pub trait Lines {
    /// The next line. Errors: `Io`; `Parse` when it is not UTF-8.
    fn line(&mut self, prompt: &str) -> Result<Line>;
}

/// A message: lines that end in a backslash continue on the next one.
pub fn message(lines: &mut dyn Lines) -> Result<Line> {
    let mut message = String::new();
    let mut prompt = PROMPT;
    loop {
        match lines.line(prompt)? {
            Line::Text(line) => match line.strip_suffix('\\') {
                Some(line) => message = message + line + "\n",
                None => return Ok(Line::Text(message + &line)),
            },
            ended => return Ok(ended),
        }
        prompt = CONTINUED;
    }
}

/// A line editor if stdin and stdout are terminals, else plain lines.
pub fn source(interrupt: &Interrupt) -> Result<Box<dyn Lines + '_>> {
    if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
        return Ok(Box::new(Plain { interrupt }));
    }
    interrupt.remember_terminal();
    let editor = Editor::with_history(Config::default(), MemHistory::new()).map_err(failure)?;
    Ok(Box::new(Edited { editor, interrupt }))
}

/// A line editor with a history.
struct Edited<'a> {
    editor: Editor<(), MemHistory>,
    interrupt: &'a Interrupt,
}

impl Lines for Edited<'_> {
    fn line(&mut self, prompt: &str) -> Result<Line> {
        // The editor reads Ctrl-C as a key; a signal comes from another process and ends the program.
        self.interrupt.abrupt();
        loop {
            return match self.editor.readline(prompt) {
                Ok(line) => {
                    if !line.trim().is_empty() {
                        self.editor.add_history_entry(line.as_str()).map_err(failure)?;
                    }
                    Ok(Line::Text(line))
                }
                Err(ReadlineError::Signal(Signal::Resize)) => continue,
                #[cfg(unix)]
                Err(ReadlineError::Signal(Signal::Interrupt)) => Ok(Line::Interrupted),
                Err(ReadlineError::Interrupted) => Ok(Line::Interrupted),
                Err(ReadlineError::Eof) => Ok(Line::End),
                Err(err) => Err(failure(err)),
            };
        }
    }
}

fn failure(err: ReadlineError) -> Error {
    Error::new(Kind::Io, format!("stdin: {err}"))
}

/// Lines without an editor.
struct Plain<'a> {
    interrupt: &'a Interrupt,
}

impl Lines for Plain<'_> {
    fn line(&mut self, prompt: &str) -> Result<Line> {
        // At the first Ctrl-C the terminal discards the line; the second one ends the program.
        self.interrupt.renewed();
        // A closed stderr leaves no place for the prompt.
        let _ = write!(std::io::stderr(), "{prompt}");
        let line = read_line(&mut std::io::stdin().lock())?;
        if line == Line::End {
            let _ = writeln!(std::io::stderr());
        }
        Ok(line)
    }
}

fn read_line(stream: &mut dyn BufRead) -> Result<Line> {
    let mut bytes = Vec::new();
    let read = stream.take(MAX_LINE + 1).read_until(b'\n', &mut bytes);
    read.map_err(|err| Error::io("stdin", &err))?;
    if bytes.is_empty() {
        return Ok(Line::End);
    }
    if bytes.len() as u64 > MAX_LINE {
        return Err(usage(format!("stdin: a line longer than {MAX_LINE} bytes")));
    }
    let line = String::from_utf8(bytes).map_err(|_| Error::new(Kind::Parse, "stdin: not UTF-8"))?;
    let line = line.strip_suffix('\n').unwrap_or(&line);
    Ok(Line::Text(line.strip_suffix('\r').unwrap_or(line).into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_lines_may_end_in_carriage_returns() {
        let mut stream = "a\r\n\nb\\\nlast".as_bytes();
        let mut read = || read_line(&mut stream).unwrap();
        for line in ["a", "", "b\\", "last"] {
            assert_eq!(read(), Line::Text(line.into()));
        }
        assert_eq!(read(), Line::End);
        assert_eq!(read_line(&mut &b"caf\xe9\n"[..]).unwrap_err().kind, Kind::Parse);
        let long = vec![b'a'; MAX_LINE as usize + 5];
        assert_eq!(read_line(&mut &long[..]).unwrap_err().kind, Kind::Usage);
    }
}
