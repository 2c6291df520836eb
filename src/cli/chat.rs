//! The chat of `run`: messages and commands in, answers out, until there is no more.
//!
//! The conversation is a list of messages, rendered anew for every answer; what the engine still has cached of it is its
//! business. A turn that fails leaves the conversation as it was.

mod command;
pub mod lines;
#[cfg(test)]
mod tests;

use super::answer::{OnText, streamed, summary};
use super::output::Output;
use super::overlay;
use super::run::random;
use super::{Outcome, Result};
use cmf_gpu::Kind;
use cmf_gpu::container::NO_TASK;
use cmf_gpu::engine::Engine;
use cmf_gpu::options::{AnswerOptions, TaskChoice};
use cmf_gpu::sampling::Sampling;
use cmf_gpu::session::{Cancel, Finish};
pub use command::Settings;
use command::{Command, HELP};
use lines::{Line, Lines};
use serde_json::{Value, json};

/// The task that is nobody's choice: the active skill's, else the file's.
const OPEN: &str = "default";

/// Where a chat is shown.
pub trait Sink {
    /// Shows a part of an answer, at once.
    fn text(&mut self, text: &str) -> Result<()>;
    /// Replies to a command, or says what is wrong.
    fn say(&mut self, text: &str);
    /// Says what nobody asked for.
    fn note(&mut self, text: &str);
}

impl Sink for Output {
    fn text(&mut self, text: &str) -> Result<()> {
        Output::text(self, text)?;
        self.flush()
    }

    fn say(&mut self, text: &str) {
        Output::say(self, text);
    }

    fn note(&mut self, text: &str) {
        Output::note(self, text);
    }
}

/// A conversation with a model.
pub struct Chat<'a> {
    engine: &'a mut Engine,
    /// The system message in front of it.
    system: Option<String>,
    settings: Settings,
    /// Stop texts and variables of the template.
    options: AnswerOptions,
    /// Messages of the user and answers in turn, an answer at the end.
    messages: Vec<Value>,
    /// How often the last message was answered anew.
    retries: u64,
    /// The last answer in numbers.
    last: Option<String>,
}

impl<'a> Chat<'a> {
    /// A conversation that nobody has begun. Errors: `Tokenizer` when the model has none, so that there can be none.
    pub fn new(
        engine: &'a mut Engine,
        system: Option<String>,
        settings: Settings,
        options: AnswerOptions,
    ) -> Result<Chat<'a>> {
        engine.tokenizer()?;
        engine.template()?;
        Ok(Chat {
            engine,
            system,
            settings,
            options,
            messages: Vec::new(),
            retries: 0,
            last: None,
        })
    }

    /// Reads and answers until the lines end. `renewed` gives each answer the token that cancels it.
    ///
    /// Errors: the device's, and what cannot be read or written; others are said, and the chat goes on.
    pub fn run(
        &mut self,
        lines: &mut dyn Lines,
        renewed: &mut dyn FnMut() -> Cancel,
        sink: &mut dyn Sink,
    ) -> Result<Outcome> {
        let mut interrupted = false;
        loop {
            let line = match lines::message(lines)? {
                Line::Text(line) => line,
                Line::End => return Ok(Outcome::Done),
                Line::Interrupted if interrupted => return Ok(Outcome::Interrupted),
                Line::Interrupted => {
                    interrupted = true;
                    sink.note("Ctrl-C again leaves");
                    continue;
                }
            };
            interrupted = false;
            match Command::parse(&line) {
                Err(hint) => sink.say(&hint),
                Ok(Command::Exit) => return Ok(Outcome::Done),
                Ok(Command::Message(text)) => {
                    self.retries = 0;
                    let message = json!({"role": "user", "content": text});
                    let messages = self.messages.iter().cloned().chain([message]).collect();
                    self.answer(messages, &renewed(), sink)?;
                }
                Ok(Command::Regen) => self.regenerate(renewed, sink)?,
                Ok(Command::Blank) => {}
                Ok(Command::Help) => sink.say(HELP),
                Ok(Command::Clear) => {
                    self.messages.clear();
                    sink.say("a new conversation begins");
                }
                Ok(Command::System(text)) => {
                    self.system = text;
                    sink.say(match self.system {
                        Some(_) => "the system message is set",
                        None => "there is no system message",
                    });
                }
                Ok(Command::Show(Some(name))) => sink.say(&self.show(&name)),
                Ok(Command::Show(None)) => sink.say(&self.show_all()),
                Ok(Command::Set(name, value)) if name == "task" => self.set_task(&value, sink)?,
                Ok(Command::Set(name, value)) if name == "skill" => self.set_skill(&value, sink)?,
                Ok(Command::Set(name, value)) => match self.settings.with(&name, &value) {
                    Ok(settings) => {
                        self.settings = settings;
                        sink.say(&self.show(&name));
                    }
                    Err(hint) => sink.say(&hint),
                },
                Ok(Command::Stats) => sink.say(&self.stats()),
            }
        }
    }

    /// One setting in words, or a hint.
    fn show(&self, name: &str) -> String {
        match name {
            "task" => overlay::shown_task(self.engine),
            "skill" => overlay::shown(self.engine),
            _ => self.settings.show(name).unwrap_or_else(|hint| hint),
        }
    }

    /// All settings, a line each.
    fn show_all(&self) -> String {
        let numbers = self.settings.all().map(|(name, value)| format!("{name} {value}"));
        let others = ["task", "skill"].map(|name| self.show(name));
        numbers.into_iter().chain(others).collect::<Vec<_>>().join("\n")
    }

    /// Puts a task's mask in force, or leaves open which. Errors: those that end everything.
    fn set_task(&mut self, value: &str, sink: &mut dyn Sink) -> Result<()> {
        let masks = self.engine.container().masks();
        // Any word but none may be the name of a mask, and a name means what it names.
        let named = masks.is_some_and(|masks| masks.find(value).is_ok());
        let choice = match value {
            OPEN if named => {
                sink.note("note: the model has a task of that name, which this means");
                TaskChoice::Named(value.into())
            }
            OPEN => TaskChoice::Default,
            NO_TASK => TaskChoice::Full,
            name => TaskChoice::Named(name.into()),
        };
        match self.engine.choose_task(&choice) {
            Err(err) if ends_everything(err.kind) => return Err(err),
            Err(err) => sink.say(&err.message),
            Ok(notice) => {
                if let Some(notice) = notice {
                    sink.note(&format!("note: {notice}"));
                }
                sink.say(&overlay::shown_task(self.engine));
            }
        }
        Ok(())
    }

    /// Changes the skill, and with it the mask where it goes with one. Errors: those that end everything.
    fn set_skill(&mut self, value: &str, sink: &mut dyn Sink) -> Result<()> {
        if value == "auto" {
            sink.say("auto needs a prompt that decides, as run takes it; a chat changes skills with /set skill ID");
            return Ok(());
        }
        let before = self.engine.task().map(str::to_owned);
        match self.engine.set_skill(Some(value).filter(|value| *value != "none")) {
            Err(err) if ends_everything(err.kind) => return Err(err),
            Err(err) => sink.say(&err.message),
            Ok(notice) => {
                if let Some(notice) = notice {
                    sink.note(&format!("note: {notice}"));
                }
                sink.say(&overlay::shown(self.engine));
                if self.engine.task() != before.as_deref() {
                    sink.say(&overlay::shown_task(self.engine));
                }
            }
        }
        Ok(())
    }

    fn stats(&mut self) -> String {
        let placement = self.engine.placement();
        let device = format!("{} ({}, {})", placement.name, placement.backend, placement.kind);
        let ctx = placement.ctx;
        let system = if self.system.is_some() {
            " and a system message"
        } else {
            ""
        };
        let conversation = format!(
            "{} messages{system}, {} of {ctx} tokens cached",
            self.messages.len(),
            self.engine.session().cached().len()
        );
        let last = self.last.as_deref().unwrap_or("no answer yet");
        [&conversation, last, &device].join("\n")
    }

    /// Another answer in place of the last one, which stays if there is none.
    fn regenerate(&mut self, renewed: &mut dyn FnMut() -> Cancel, sink: &mut dyn Sink) -> Result<()> {
        let Some((_, messages)) = self.messages.split_last() else {
            sink.say("there is no answer to be made anew");
            return Ok(());
        };
        if self.settings.sampling.temperature == 0.0 {
            sink.note("note: with temp 0 every answer is the same");
        }
        self.retries += 1;
        self.answer(messages.to_vec(), &renewed(), sink)
    }

    /// Answers the last of `messages`; with the answer they become the conversation.
    fn answer(&mut self, mut messages: Vec<Value>, cancel: &Cancel, sink: &mut dyn Sink) -> Result<()> {
        // A given seed gives other answers anew, but always the same ones.
        let seed = self
            .settings
            .seed
            .map_or_else(random, |seed| seed.wrapping_add(self.retries));
        self.options.max_tokens = Some(self.settings.max_tokens);
        self.options.sampling = Some(Sampling {
            seed,
            ..self.settings.sampling.clone()
        });
        let system = self
            .system
            .iter()
            .map(|text| json!({"role": "system", "content": text}));
        let all: Vec<Value> = system.chain(messages.iter().cloned()).collect();
        let (engine, options) = (&mut *self.engine, &self.options);
        let ask = |on_text: OnText| engine.chat(&all, options, cancel, on_text);
        let answer = match streamed(&mut |text| sink.text(text), ask) {
            Ok(answer) => answer,
            Err(err) if ends_everything(err.kind) => return Err(err),
            Err(err) => {
                let way_out = match err.kind {
                    Kind::ContextFull if !self.messages.is_empty() => "; /clear begins a new conversation",
                    _ => "",
                };
                sink.say(&format!("error: {err}\nthe turn is taken back{way_out}"));
                return Ok(());
            }
        };
        answer.notices.iter().for_each(|notice| sink.note(notice));
        let summary = summary(&answer);
        sink.note(&summary);
        self.last = Some(match self.settings.sampling.temperature {
            0.0 => summary,
            _ => format!("{summary} seed {seed}"),
        });
        match answer.finish {
            Finish::Interrupted if answer.text.is_empty() => {
                sink.note("nothing was answered, the turn is taken back");
                return Ok(());
            }
            Finish::Context => sink.say("the context is full; /clear begins a new conversation"),
            _ => {}
        }
        messages.push(json!({"role": "assistant", "content": answer.text}));
        self.messages = messages;
        Ok(())
    }
}

/// Whether there is no use in going on.
fn ends_everything(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::Io | Kind::DeviceLost | Kind::DeviceError | Kind::OutOfMemory
    )
}
