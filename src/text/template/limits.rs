//! What a rendering may use, and how it fails.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Deepest nesting of values, in levels.
pub(super) const MAX_VALUE_DEPTH: u32 = 200;
/// Longest time of a rendering. The budget of steps ends one much earlier, except on an overloaded machine.
const MAX_TIME: Duration = Duration::from_secs(30);
/// Steps between two looks at the clock.
const STEPS_PER_LOOK: u64 = 4096;

/// Why compiling or rendering a template ends.
#[derive(Debug)]
pub(super) enum Fault {
    /// The template called `raise_exception`.
    Raised(String),
    /// Anything else: a class such as "undefined value", a message, and the line where it happened.
    Failed {
        class: &'static str,
        message: String,
        line: Option<u32>,
    },
}

/// A result with a [`Fault`].
pub(super) type Outcome<T> = Result<T, Box<Fault>>;

impl Fault {
    pub(super) fn new(class: &'static str, message: impl Into<String>) -> Box<Fault> {
        Box::new(Fault::Failed {
            class,
            message: message.into(),
            line: None,
        })
    }

    /// An operation that its operands do not allow.
    pub(super) fn invalid(message: impl Into<String>) -> Box<Fault> {
        Fault::new("invalid operation", message)
    }

    /// Sets the line unless it is known.
    pub(super) fn at(mut self: Box<Fault>, here: u32) -> Box<Fault> {
        if let Fault::Failed { line, .. } = &mut *self {
            line.get_or_insert(here);
        }
        self
    }

    fn exhausted(what: &str) -> Box<Fault> {
        let message = format!("the template exceeded its limits of time and memory: {what}");
        Fault::new("limit", message)
    }
}

/// What is left of the limits of a rendering.
pub(super) struct Budget {
    steps: Cell<u64>,
    bytes: Cell<u64>,
    look: Cell<u64>,
    end: Instant,
}

impl Budget {
    /// `steps` counts evaluated parts of the template and items of values; `bytes` the text and the items that are made.
    pub(super) fn new(steps: u64, bytes: u64) -> Budget {
        Budget {
            steps: Cell::new(steps),
            bytes: Cell::new(bytes),
            look: Cell::new(steps),
            end: Instant::now() + MAX_TIME,
        }
    }

    /// Uses `count` steps.
    pub(super) fn steps(&self, count: u64) -> Outcome<()> {
        let Some(left) = self.steps.get().checked_sub(count) else {
            return Err(Fault::exhausted("too many steps"));
        };
        self.steps.set(left);
        if self.look.get() - left >= STEPS_PER_LOOK {
            self.look.set(left);
            if Instant::now() > self.end {
                return Err(Fault::exhausted("too much time"));
            }
        }
        Ok(())
    }

    /// Uses `count` bytes of text that is made or searched.
    pub(super) fn bytes(&self, count: u64) -> Outcome<()> {
        let Some(left) = self.bytes.get().checked_sub(count) else {
            return Err(Fault::exhausted("too much text"));
        };
        self.bytes.set(left);
        Ok(())
    }

    /// Uses what a list of `count` items costs, before it is made.
    pub(super) fn items(&self, count: u64) -> Outcome<()> {
        self.bytes(count.saturating_mul(32))
    }
}
