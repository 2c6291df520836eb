//! The lines of a chat: messages, commands and settings.

use cmf_gpu::options::Sampling;

/// The text of `/help`.
pub const HELP: &str = "\
/help                 this list
/exit                 ends the chat; so do Ctrl-D and pressing Ctrl-C twice
/clear                starts a new conversation with the same system message
/system [TEXT]        sets the system message; without TEXT removes it
/set [NAME [VALUE]]   shows or changes settings:
                      temp top-k top-p min-p repeat-penalty presence-penalty frequency-penalty seed max-tokens
                      task: the task whose mask is active; none = the full model, default = the task of the skill,
                      else that of the file
                      skill: the active skill, with its mask if no task was set; none = no skill
/regen                answers the last message again
/stats                shows the size of the conversation, the last answer and the device
A \\ at the end of a line continues the message on the next line; // begins a message with /.
Ctrl-C ends an answer and keeps its text.";

/// The meaning of a line.
#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    /// A message to answer.
    Message(String),
    /// An empty line.
    Blank,
    Help,
    Exit,
    Clear,
    /// Sets or removes the system message.
    System(Option<String>),
    /// Shows one setting or all.
    Show(Option<String>),
    /// Changes a setting: name and value.
    Set(String, String),
    Regen,
    Stats,
}

impl Command {
    /// Parses a line. Errors: a hint for the user.
    pub fn parse(line: &str) -> Result<Command, String> {
        if line.trim().is_empty() {
            return Ok(Command::Blank);
        }
        let Some(command) = line.strip_prefix('/') else {
            return Ok(Command::Message(line.into()));
        };
        if command.starts_with('/') {
            return Ok(Command::Message(command.into()));
        }
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let rest = rest.trim();
        let alone = |command| match rest {
            "" => Ok(command),
            _ => Err(format!("/{name} takes no argument")),
        };
        match name {
            "help" => alone(Command::Help),
            "exit" => alone(Command::Exit),
            "clear" => alone(Command::Clear),
            "regen" => alone(Command::Regen),
            "stats" => alone(Command::Stats),
            "system" => Ok(Command::System((!rest.is_empty()).then(|| rest.into()))),
            "set" => match rest.split_once(char::is_whitespace) {
                Some((name, value)) => Ok(Command::Set(name.into(), value.trim().into())),
                None => Ok(Command::Show((!rest.is_empty()).then(|| rest.into()))),
            },
            _ => Err(format!(
                "there is no command /{name}; /help lists the commands, // begins a message with /"
            )),
        }
    }
}

/// The settings of answers.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// How tokens are chosen; its seed is replaced by `seed` below.
    pub sampling: Sampling,
    /// The seed of every answer; `None` = a random one for each.
    pub seed: Option<u64>,
    /// Most tokens of an answer.
    pub max_tokens: usize,
}

impl Settings {
    /// All settings: name and value.
    pub fn all(&self) -> [(&'static str, String); 9] {
        let sampling = &self.sampling;
        [
            ("temp", sampling.temperature.to_string()),
            ("top-k", sampling.top_k.to_string()),
            ("top-p", sampling.top_p.to_string()),
            ("min-p", sampling.min_p.to_string()),
            ("repeat-penalty", sampling.repeat_penalty.to_string()),
            ("presence-penalty", sampling.presence_penalty.to_string()),
            ("frequency-penalty", sampling.frequency_penalty.to_string()),
            ("seed", self.seed.map_or("random".into(), |seed| seed.to_string())),
            ("max-tokens", self.max_tokens.to_string()),
        ]
    }

    /// One setting: name and value. Errors: a hint.
    pub fn show(&self, name: &str) -> Result<String, String> {
        match self.all().iter().find(|(known, _)| *known == name) {
            Some((name, value)) => Ok(format!("{name} {value}")),
            None => Err(self.unknown(name)),
        }
    }

    /// These settings with one changed. Errors: a hint.
    pub fn with(&self, name: &str, value: &str) -> Result<Settings, String> {
        let mut new = self.clone();
        let sampling = &mut new.sampling;
        match name {
            "temp" => sampling.temperature = number(name, value)?,
            "top-k" => sampling.top_k = number(name, value)?,
            "top-p" => sampling.top_p = number(name, value)?,
            "min-p" => sampling.min_p = number(name, value)?,
            "repeat-penalty" => sampling.repeat_penalty = number(name, value)?,
            "presence-penalty" => sampling.presence_penalty = number(name, value)?,
            "frequency-penalty" => sampling.frequency_penalty = number(name, value)?,
            "seed" if value == "random" => new.seed = None,
            "seed" => new.seed = Some(number(name, value)?),
            "max-tokens" => new.max_tokens = number(name, value)?,
            _ => return Err(self.unknown(name)),
        }
        new.sampling.validate().map_err(|err| err.message)?;
        Ok(new)
    }

    fn unknown(&self, name: &str) -> String {
        let names = self.all().map(|(name, _)| name).join(", ");
        format!("there is no setting {name}; expected one of {names}, task, skill")
    }
}

fn number<T: std::str::FromStr>(name: &str, value: &str) -> Result<T, String>
where
    T::Err: std::fmt::Display,
{
    value.parse().map_err(|err| format!("{name} {value}: {err}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings {
            sampling: Sampling::default(),
            seed: None,
            max_tokens: 512,
        }
    }

    #[test]
    fn lines_are_messages_or_commands() {
        let message = |text: &str| Ok(Command::Message(text.into()));
        assert_eq!(Command::parse("hi /exit "), message("hi /exit "));
        assert_eq!(Command::parse(" /exit"), message(" /exit"));
        assert_eq!(Command::parse("//exit"), message("/exit"));
        assert_eq!(Command::parse("a\nb"), message("a\nb"));
        assert_eq!(Command::parse(" \t\n"), Ok(Command::Blank));
        assert_eq!(Command::parse("/exit "), Ok(Command::Exit));
        let system = Command::System(Some("be  brief\nand kind".into()));
        assert_eq!(Command::parse("/system  be  brief\nand kind"), Ok(system));
        assert_eq!(Command::parse("/system"), Ok(Command::System(None)));
        assert_eq!(Command::parse("/set"), Ok(Command::Show(None)));
        assert_eq!(Command::parse("/set temp"), Ok(Command::Show(Some("temp".into()))));
        assert_eq!(
            Command::parse("/set top-k  7"),
            Ok(Command::Set("top-k".into(), "7".into()))
        );
        for (line, hint) in [
            ("/", "/help"),
            ("/Exit", "/Exit"),
            ("/etc/passwd: what is it?", "/etc/passwd:"),
            ("/clear all", "/clear takes no argument"),
        ] {
            let said = Command::parse(line).unwrap_err();
            assert!(said.contains(hint), "{said}");
        }
    }

    #[test]
    fn every_setting_is_shown_as_it_is_set_and_in_the_help() {
        for (name, value) in settings().all() {
            assert!(HELP.contains(name), "{name}");
            assert_eq!(settings().with(name, &value), Ok(settings()), "{name}");
            let new = if name == "min-p" || name == "top-p" { "0.5" } else { "3" };
            let changed = settings().with(name, new).unwrap();
            assert_eq!(changed.show(name), Ok(format!("{name} {new}")));
            let differ = |(a, b): &(_, _)| a != b;
            assert_eq!(changed.all().iter().zip(&settings().all()).filter(differ).count(), 1);
        }
    }

    #[test]
    fn invalid_values_are_refused() {
        for (name, value) in [
            ("temp", "warm"),
            ("temp", "-1"),
            ("temp", "nan"),
            ("top-k", "-1"),
            ("top-p", "0"),
            ("min-p", "2"),
            ("repeat-penalty", "0"),
            ("presence-penalty", "inf"),
            ("frequency-penalty", "101"),
            ("seed", "18446744073709551616"),
            ("max-tokens", "many"),
        ] {
            let hint = settings().with(name, value).unwrap_err();
            assert!(hint.contains(value) || hint.contains("NaN"), "{name} {value}: {hint}");
        }
        assert!(settings().with("speed", "1").unwrap_err().contains("max-tokens"));
        assert!(settings().show("speed").is_err());
    }
}
