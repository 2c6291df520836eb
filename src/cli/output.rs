//! The streams: answers on stdout, everything else on stderr, progress bars only on a terminal.

use cmf_gpu::error::escape;
use cmf_gpu::{Error, Kind, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;
use std::fmt;
use std::io::{self, BufWriter, IsTerminal, Stdout, Write};
use std::path::Path;
use std::time::{Duration, Instant};

/// Message of the error for a closed pipe.
const CLOSED: &str = "stdout: closed";
/// Work shorter than this shows no bar.
const PATIENCE: Duration = Duration::from_secs(2);

/// Where a command writes.
pub struct Output {
    stdout: BufWriter<Stdout>,
    /// Whether stdout carries one JSON object.
    pub json: bool,
    /// Whether stderr carries only errors.
    pub quiet: bool,
    /// Whether stderr carries details too.
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

    /// Writes the JSON object of `--json`.
    pub fn json(&mut self, object: &Value) -> Result<()> {
        self.line(object.to_string())
    }

    /// Sends buffered text to stdout. Errors: `Io` when the answer could not be written.
    pub fn flush(&mut self) -> Result<()> {
        self.stdout.flush().map_err(|err| failure(&err))
    }

    /// Prints a line on stderr, unless `quiet` is set.
    pub fn note(&self, note: impl AsRef<str>) {
        if !self.quiet {
            error_text(&escape(note.as_ref().to_string()));
        }
    }

    /// Prints a `note:` line on stderr for each notice.
    pub fn notices<'a>(&self, notices: impl IntoIterator<Item = &'a (impl fmt::Display + 'a)>) {
        for notice in notices {
            self.note(format!("note: {notice}"));
        }
    }

    /// Prints lines on stderr that the user asked for, `quiet` or not.
    pub fn say(&self, text: &str) {
        text.lines().for_each(|line| error_text(&escape(line.to_string())));
    }

    /// Prints a line on stderr if `verbose` is set.
    pub fn detail(&self, note: impl AsRef<str>) {
        if self.verbose {
            self.note(note);
        }
    }

    /// A progress bar; `total` and `done` are bytes, or items where `bytes` is false.
    pub fn progress(&self, what: &'static str, bytes: bool) -> Progress {
        Progress {
            what,
            bytes,
            shown: !self.quiet && io::stderr().is_terminal(),
            start: Instant::now(),
            bar: None,
        }
    }
}

/// A progress bar on stderr. It appears when work takes longer than [`PATIENCE`] and disappears when dropped.
pub struct Progress {
    what: &'static str,
    bytes: bool,
    shown: bool,
    start: Instant,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Shows `done` of `total`.
    pub fn set(&mut self, done: u64, total: u64) {
        if !self.shown || self.start.elapsed() < PATIENCE {
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

/// Prints the line that reports an error.
pub fn error_line(kind: Kind, message: &str) {
    error_text(&format!("error: {}: {message}", kind.name()));
}

fn error_text(text: &str) {
    // A closed stderr leaves no place to report this.
    let _ = writeln!(io::stderr(), "{text}");
}

fn failure(err: &io::Error) -> Error {
    match err.kind() {
        io::ErrorKind::BrokenPipe => Error::new(Kind::Io, CLOSED),
        _ => Error::io("stdout", err),
    }
}

/// Whether an error means that the reader of stdout has closed it.
pub fn is_closed(err: &Error) -> bool {
    err.kind == Kind::Io && err.message == CLOSED
}

/// A path for a line of text.
pub fn shown(path: &Path) -> String {
    escape(path.display().to_string())
}

/// A number of bytes with a unit, as in `1.5 MiB`.
pub fn size(bytes: u64) -> String {
    let mut value = bytes as f64;
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    for unit in ["KiB", "MiB"] {
        value /= 1024.0;
        if value < 1024.0 {
            return format!("{value:.1} {unit}");
        }
    }
    format!("{:.2} GiB", value / 1024.0)
}

/// An f32 as the shortest decimal number: 0.7, not 0.699999988.
pub fn short(value: f32) -> Option<f64> {
    value.to_string().parse().ok()
}
