//! The streams: answers on stdout, everything else on stderr, bars only where a person looks on.

use super::Result;
use cmf_gpu::error::escape;
use cmf_gpu::{Error, Kind};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;
use std::io::{self, BufWriter, IsTerminal, Stdout, Write};
use std::time::{Duration, Instant};

/// The name that write errors carry.
const STDOUT: &str = "stdout";
/// Message of the error that a closed pipe becomes.
const CLOSED: &str = "stdout: closed";
/// Work shorter than this shows no bar.
const PATIENCE: Duration = Duration::from_secs(2);

/// Where a command writes.
pub struct Output {
    stdout: BufWriter<Stdout>,
    /// Whether stdout carries one JSON object.
    pub json: bool,
    /// Whether stderr is left to errors.
    pub quiet: bool,
    /// Whether stderr says more.
    pub verbose: bool,
}

impl Output {
    /// The streams of this process.
    pub fn new(json: bool, quiet: bool, verbose: bool) -> Output {
        Output {
            stdout: BufWriter::new(io::stdout()),
            json,
            quiet,
            verbose,
        }
    }

    /// Writes a part of the answer. Errors: `Io`; see [`is_closed`].
    pub fn text(&mut self, text: &str) -> Result<()> {
        self.stdout.write_all(text.as_bytes()).map_err(|err| failure(&err))
    }

    /// Writes a line of the answer.
    pub fn line(&mut self, line: impl AsRef<str>) -> Result<()> {
        self.text(line.as_ref())?;
        self.text("\n")
    }

    /// Writes the one object.
    pub fn json(&mut self, object: &Value) -> Result<()> {
        self.line(object.to_string())
    }

    /// Shows what was written so far.
    pub fn flush(&mut self) -> Result<()> {
        self.stdout.flush().map_err(|err| failure(&err))
    }

    /// Ends the output: an answer that could not be written is a failure.
    pub fn finish(&mut self) -> Result<()> {
        self.flush()
    }

    /// Says something on stderr, unless that should be quiet.
    pub fn note(&self, note: impl AsRef<str>) {
        if !self.quiet {
            error_text(&escape(note.as_ref().to_string()));
        }
    }

    /// Says something on stderr that a person asked for, in any number of lines.
    pub fn say(&self, text: &str) {
        text.lines().for_each(|line| error_text(&escape(line.to_string())));
    }

    /// Says something on stderr that was asked for with `-v`.
    pub fn detail(&self, note: impl AsRef<str>) {
        if self.verbose {
            self.note(note);
        }
    }

    /// A bar for work that may take long, in bytes or in pieces.
    pub fn progress(&self, what: &'static str, bytes: bool) -> Progress {
        Progress {
            what,
            bytes,
            wanted: !self.quiet && io::stderr().is_terminal(),
            start: Instant::now(),
            bar: None,
        }
    }
}

/// A bar on stderr that appears when work takes long and goes when it ends.
pub struct Progress {
    what: &'static str,
    bytes: bool,
    wanted: bool,
    start: Instant,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// So much of so much is done.
    pub fn set(&mut self, done: u64, total: u64) {
        if !self.wanted || self.start.elapsed() < PATIENCE {
            return;
        }
        let bar = self.bar.get_or_insert_with(|| {
            let template = match self.bytes {
                true => "{prefix} [{bar:30}] {bytes}/{total_bytes} {eta}",
                false => "{prefix} [{bar:30}] {pos}/{len} {eta}",
            };
            let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr()).with_style(style);
            bar.set_prefix(self.what);
            bar
        });
        bar.set_length(total);
        bar.set_position(done);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// The line that reports an error.
pub fn error_line(what: &str) {
    error_text(&format!("error: {what}"));
}

fn error_text(text: &str) {
    // Whoever closed stderr does not want to know.
    let _ = writeln!(io::stderr(), "{text}");
}

fn failure(err: &io::Error) -> Error {
    match err.kind() {
        io::ErrorKind::BrokenPipe => Error::new(Kind::Io, CLOSED),
        _ => Error::io(STDOUT, err),
    }
}

/// Whether an error says that nobody reads stdout any more.
pub fn is_closed(err: &Error) -> bool {
    err.kind == Kind::Io && err.message == CLOSED
}

/// Bytes for people.
pub fn size(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB"] {
        if value < 1024.0 {
            return match unit {
                "B" => format!("{bytes} B"),
                _ => format!("{value:.1} {unit}"),
            };
        }
        value /= 1024.0;
    }
    format!("{value:.2} GiB")
}
