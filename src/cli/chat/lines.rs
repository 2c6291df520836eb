//! Where a chat's lines come from: an editor on a terminal, plain lines otherwise, and messages of several lines.

use super::super::interrupt::Interrupt;
use super::super::{Error, Result};
use cmf_gpu::Kind;
use rustyline::error::{ReadlineError, Signal};
use rustyline::history::MemHistory;
use rustyline::{Config, Editor};
use std::io::{BufRead, IsTerminal, Read, Write};

/// Most bytes of a line.
const MAX_LINE: u64 = 1 << 20;
/// What stands in front of a message.
const PROMPT: &str = "> ";
/// What stands in front of its further lines.
const CONTINUED: &str = ". ";

/// What was read.
#[derive(Debug, PartialEq, Eq)]
pub enum Line {
    /// A line without its end.
    Text(String),
    /// Ctrl-C: what was typed is gone.
    Interrupted,
    /// There is no more.
    End,
}

/// A source of lines.
pub trait Lines {
    /// The next line. Errors: `Io`, `Parse` for what is no text.
    fn line(&mut self, prompt: &str) -> Result<Line>;
}

/// The lines of a message, as long as they end in a backslash.
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

/// The source that fits what stdin and stdout are.
pub fn source(interrupt: &Interrupt) -> Result<Box<dyn Lines + '_>> {
    if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
        return Ok(Box::new(Plain { interrupt }));
    }
    interrupt.remember_terminal();
    let editor = Editor::with_history(Config::default(), MemHistory::new()).map_err(failure)?;
    Ok(Box::new(Edited { editor, interrupt }))
}

/// An editor with a history.
struct Edited<'a> {
    editor: Editor<(), MemHistory>,
    interrupt: &'a Interrupt,
}

impl Lines for Edited<'_> {
    fn line(&mut self, prompt: &str) -> Result<Line> {
        // Ctrl-C is a key here; a signal comes from elsewhere and means what it says.
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

/// Lines as the terminal makes them.
struct Plain<'a> {
    interrupt: &'a Interrupt,
}

impl Lines for Plain<'_> {
    fn line(&mut self, prompt: &str) -> Result<Line> {
        // The terminal forgets the line by itself at the first Ctrl-C; the second one ends the program.
        self.interrupt.renewed();
        // Whoever closed stderr does not want to know.
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
        return Err(Error::new(
            Kind::Usage,
            format!("stdin: a line longer than {MAX_LINE} bytes"),
        ));
    }
    let line = String::from_utf8(bytes).map_err(|_| Error::new(Kind::Parse, "stdin: not UTF-8"))?;
    let line = line.strip_suffix('\n').unwrap_or(&line);
    Ok(Line::Text(line.strip_suffix('\r').unwrap_or(line).into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_lines_end_as_they_do_anywhere() {
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
