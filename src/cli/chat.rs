//! The chat of `run`: lines with messages and commands in, answers out.
//!
//! The whole conversation is rendered for every answer; the engine reuses the part that it still has cached. A turn that
//! fails leaves the conversation unchanged.

mod command;
pub mod lines;
#[cfg(test)]
mod tests;

use super::answer::{streamed, summary};
use super::context::{Outcome, Result};
use super::output::Output;
use super::overlay;
use super::sampling::random_seed;
use cmf_gpu::engine::OnText;
use cmf_gpu::options::{Sampling, TaskChoice};
use cmf_gpu::source::NO_TASK;
use cmf_gpu::{AnswerOptions, Cancel, Engine, Finish, Kind, Message, Notice};
pub use command::Settings;
use command::{Command, HELP};
use lines::{Line, Lines};

/// The value of `/set task` for the default task: that of the active skill, else that of the file.
const DEFAULT_TASK: &str = "default";

/// Where a chat prints.
pub trait Sink {
    /// Prints a part of an answer, at once.
    fn text(&mut self, text: &str) -> Result<()>;
    /// Prints the reply to a command, or an error.
    fn say(&mut self, text: &str);
    /// Prints other information, which `--quiet` suppresses.
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

fn note_all(notices: &[Notice], sink: &mut dyn Sink) {
    for notice in notices {
        sink.note(&format!("note: {notice}"));
    }
}

/// A conversation with a model.
pub struct Chat<'a> {
    engine: &'a mut Engine,
    /// The system message at its start.
    system: Option<String>,
    settings: Settings,
    /// Stop texts and variables of the template.
    options: AnswerOptions,
    /// Messages of the user and answers in turn; the last one is an answer.
    messages: Vec<Message>,
    /// How often the last message was answered again.
    retries: u64,
    /// The summary of the last answer.
    last: Option<String>,
}

impl<'a> Chat<'a> {
    /// An empty conversation. Errors: `Tokenizer` and `Template` when the model cannot chat.
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

    /// Reads and answers until the lines end. `renewed` returns a new token for each answer, which cancels it.
    ///
    /// Errors: those of [`is_fatal`]. Other errors are printed, and the chat goes on.
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
                    sink.note("press Ctrl-C again to leave");
                    continue;
                }
            };
            interrupted = false;
            match Command::parse(&line) {
                Err(hint) => sink.say(&hint),
                Ok(Command::Exit) => return Ok(Outcome::Done),
                Ok(command) => self.perform(command, renewed, sink)?,
            }
        }
    }

    fn perform(&mut self, command: Command, renewed: &mut dyn FnMut() -> Cancel, sink: &mut dyn Sink) -> Result<()> {
        match command {
            Command::Message(text) => {
                self.retries = 0;
                let mut messages = self.messages.clone();
                messages.push(Message::user(text));
                self.answer(messages, &renewed(), sink)?;
            }
            Command::Regen => self.regenerate(renewed, sink)?,
            Command::Blank | Command::Exit => {}
            Command::Help => sink.say(HELP),
            Command::Clear => {
                self.messages.clear();
                sink.say("the conversation is cleared");
            }
            Command::System(text) => {
                self.system = text;
                sink.say(match self.system {
                    Some(_) => "the system message is set",
                    None => "the system message is removed",
                });
            }
            Command::Show(Some(name)) => sink.say(&self.show(&name)),
            Command::Show(None) => sink.say(&self.show_all()),
            Command::Set(name, value) if name == "task" => self.set_task(&value, sink)?,
            Command::Set(name, value) if name == "skill" => self.set_skill(&value, sink)?,
            Command::Set(name, value) => match self.settings.with(&name, &value) {
                Ok(settings) => {
                    self.settings = settings;
                    sink.say(&self.show(&name));
                }
                Err(hint) => sink.say(&hint),
            },
            Command::Stats => sink.say(&self.stats()),
        }
        Ok(())
    }

    /// One setting in words, or a hint.
    fn show(&self, name: &str) -> String {
        match name {
            "task" => overlay::describe_task(self.engine),
            "skill" => overlay::describe_skills(self.engine),
            _ => self.settings.show(name).unwrap_or_else(|hint| hint),
        }
    }

    /// All settings, one per line.
    fn show_all(&self) -> String {
        let numbers = self.settings.all().map(|(name, value)| format!("{name} {value}"));
        let others = ["task", "skill"].map(|name| self.show(name));
        numbers.into_iter().chain(others).collect::<Vec<_>>().join("\n")
    }

    /// Activates a task's mask, or the default one. Errors: those of [`is_fatal`].
    fn set_task(&mut self, value: &str, sink: &mut dyn Sink) -> Result<()> {
        let masks = self.engine.source().masks();
        // A mask may have the name "default". The name of a mask always means that mask.
        let named = masks.is_some_and(|masks| masks.find(value).is_ok());
        let choice = match value {
            DEFAULT_TASK if named => {
                sink.note("note: the model has a task named default, which is used");
                TaskChoice::Named(value.into())
            }
            DEFAULT_TASK => TaskChoice::Default,
            NO_TASK => TaskChoice::Full,
            name => TaskChoice::Named(name.into()),
        };
        if let Some(notices) = said(self.engine.choose_task(&choice), sink)? {
            note_all(&notices, sink);
            sink.say(&overlay::describe_task(self.engine));
        }
        Ok(())
    }

    /// Changes the skill, and the mask if the skill has a task. Errors: those of [`is_fatal`].
    fn set_skill(&mut self, value: &str, sink: &mut dyn Sink) -> Result<()> {
        if value == "auto" {
            sink.say("auto needs the prompt of `run -p`; a chat changes its skill with /set skill ID");
            return Ok(());
        }
        let before = self.engine.task().map(str::to_owned);
        let skill = Some(value).filter(|value| *value != "none");
        if let Some(notices) = said(self.engine.set_skill(skill), sink)? {
            note_all(&notices, sink);
            sink.say(&overlay::describe_skills(self.engine));
            if self.engine.task() != before.as_deref() {
                sink.say(&overlay::describe_task(self.engine));
            }
        }
        Ok(())
    }

    fn stats(&mut self) -> String {
        let report = self.engine.device_report();
        let device = format!("{} ({}, {})", report.name, report.backend, report.kind);
        let ctx = report.ctx;
        let system = self.system.as_ref().map_or("", |_| " and a system message");
        let (messages, cached) = (self.messages.len(), self.engine.session().cached().len());
        let conversation = format!("{messages} messages{system}, {cached} of {ctx} tokens cached");
        let last = self.last.as_deref().unwrap_or("no answer yet");
        [&conversation, last, &device].join("\n")
    }

    /// Answers the last message again. The last answer stays if there is no new one.
    fn regenerate(&mut self, renewed: &mut dyn FnMut() -> Cancel, sink: &mut dyn Sink) -> Result<()> {
        let Some((_, messages)) = self.messages.split_last() else {
            sink.say("there is no message to answer again");
            return Ok(());
        };
        if self.settings.sampling.temperature == 0.0 {
            sink.note("note: with temp 0 every answer is the same");
        }
        self.retries += 1;
        self.answer(messages.to_vec(), &renewed(), sink)
    }

    /// Answers the last of `messages`; with the answer they become the conversation.
    fn answer(&mut self, mut messages: Vec<Message>, cancel: &Cancel, sink: &mut dyn Sink) -> Result<()> {
        // With a fixed seed, /regen gives different answers, and the same ones in every chat.
        let fixed = self.settings.seed.map(|seed| seed.wrapping_add(self.retries));
        let seed = fixed.unwrap_or_else(random_seed);
        self.options.max_tokens = Some(self.settings.max_tokens);
        self.options.sampling = Some(Sampling {
            seed,
            ..self.settings.sampling.clone()
        });
        let system = self.system.iter().map(Message::system);
        let all: Vec<Message> = system.chain(messages.iter().cloned()).collect();
        let (engine, options) = (&mut *self.engine, &self.options);
        let ask = |on_text: OnText| engine.chat(&all, options, cancel, on_text);
        let answer = match streamed(&mut |text| sink.text(text), ask) {
            Ok(answer) => answer,
            Err(err) if is_fatal(err.kind) => return Err(err),
            Err(err) => {
                let hint = match err.kind {
                    Kind::ContextFull if !self.messages.is_empty() => "; /clear starts a new conversation",
                    _ => "",
                };
                sink.say(&format!("error: {err}\nthe message is discarded{hint}"));
                return Ok(());
            }
        };
        note_all(&answer.notices, sink);
        let summary = summary(&answer);
        sink.note(&summary);
        self.last = Some(match self.settings.sampling.temperature {
            0.0 => summary,
            _ => format!("{summary} seed {seed}"),
        });
        match answer.finish {
            Finish::Interrupted if answer.text.is_empty() => {
                sink.note("no answer; the message is discarded");
                return Ok(());
            }
            Finish::Context => sink.say("the context is full; /clear starts a new conversation"),
            _ => {}
        }
        messages.push(Message::assistant(answer.text));
        self.messages = messages;
        Ok(())
    }
}

/// The result of a change; `None` after an error, which is printed. Errors: those of [`is_fatal`].
fn said<T>(result: Result<T>, sink: &mut dyn Sink) -> Result<Option<T>> {
    match result {
        Err(err) if !is_fatal(err.kind) => {
            sink.say(&err.message);
            Ok(None)
        }
        result => result.map(Some),
    }
}

/// Whether an error ends the chat.
fn is_fatal(kind: Kind) -> bool {
    use Kind::{DeviceError, DeviceLost, Internal, Io, OutOfMemory};
    matches!(kind, Io | DeviceLost | DeviceError | OutOfMemory | Internal)
}
