//! The one error type of the library.
//!
//! Every failure has a [`Kind`] with a stable name (scripts match on it) and a sentence that carries the operand, what
//! was wanted and what was found. Nothing here prints or exits.

use std::fmt;

/// What class of thing went wrong. The names are part of the command line's contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The file does not start with a magic number this program knows.
    InvalidMagic,
    /// The container's version is not one this program reads.
    UnsupportedVersion,
    /// The file requires a feature this program does not have.
    UnsupportedFeature,
    /// An offset, a length or an index lies outside of what it indexes.
    Bounds,
    /// Bytes that do not form what they should form: JSON, UTF-8, a record, a payload.
    Parse,
    /// A stored checksum differs from the bytes.
    HashMismatch,
    /// A signature does not fit the file or the pinned key.
    SignatureInvalid,
    /// The network needs a tensor that the file lacks.
    MissingTensor,
    /// The file is sound, but describes a network this program cannot run.
    UnsupportedModel,
    /// A tensor's type cannot be read, run or written.
    UnsupportedTensorType,
    /// The file is a skill, which is applied to a model and never run.
    SkillFile,
    /// The shards of a model are incomplete or do not belong together.
    ShardMismatch,
    /// No adapter answers the request.
    NoAdapter,
    /// The plan needs more memory than there is.
    OutOfMemory,
    /// The device went away.
    DeviceLost,
    /// The driver refused or failed an operation.
    DeviceError,
    /// The prompt or the answer does not fit the context.
    ContextFull,
    /// The chat template is invalid or refused the conversation.
    Template,
    /// The tokenizer is missing, invalid or cannot encode the text.
    Tokenizer,
    /// A kernel produced a value that is not a finite number.
    NonFinite,
    /// The operating system refused to read or write.
    Io,
    /// The caller asked for something that makes no sense.
    Usage,
    /// The caller ended the work before it was done. No failure: the command line reports no error of this kind, it ends with
    /// 130.
    Interrupted,
}

impl Kind {
    /// The stable name, as printed.
    pub fn name(self) -> &'static str {
        match self {
            Kind::InvalidMagic => "InvalidMagic",
            Kind::UnsupportedVersion => "UnsupportedVersion",
            Kind::UnsupportedFeature => "UnsupportedFeature",
            Kind::Bounds => "Bounds",
            Kind::Parse => "Parse",
            Kind::HashMismatch => "HashMismatch",
            Kind::SignatureInvalid => "SignatureInvalid",
            Kind::MissingTensor => "MissingTensor",
            Kind::UnsupportedModel => "UnsupportedModel",
            Kind::UnsupportedTensorType => "UnsupportedTensorType",
            Kind::SkillFile => "SkillFile",
            Kind::ShardMismatch => "ShardMismatch",
            Kind::NoAdapter => "NoAdapter",
            Kind::OutOfMemory => "OutOfMemory",
            Kind::DeviceLost => "DeviceLost",
            Kind::DeviceError => "DeviceError",
            Kind::ContextFull => "ContextFull",
            Kind::Template => "Template",
            Kind::Tokenizer => "Tokenizer",
            Kind::NonFinite => "NonFinite",
            Kind::Io => "Io",
            Kind::Usage => "Usage",
            Kind::Interrupted => "Interrupted",
        }
    }
}

/// A failure: its kind and one sentence for a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The class of failure.
    pub kind: Kind,
    /// One sentence: operand, wanted, found. Control characters are escaped, so that a hostile name cannot draw on a terminal.
    pub message: String,
}

/// Shorthand used across the crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind`; control characters in `message` are escaped.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Error {
            kind,
            message: escape(message.into()),
        }
    }

    /// An operating system failure on `path`.
    pub fn io(path: impl AsRef<std::path::Path>, err: &std::io::Error) -> Self {
        Error::new(Kind::Io, format!("{}: {err}", path.as_ref().display()))
    }

    /// The same error with `context: ` in front of its message.
    pub fn context(self, context: impl fmt::Display) -> Self {
        Error {
            kind: self.kind,
            message: escape(format!("{context}: {}", self.message)),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.name(), self.message)
    }
}

impl std::error::Error for Error {}

/// `text` with the characters escaped that could draw on a terminal.
pub fn escape(text: String) -> String {
    // U+202A..202E and U+2066..2069 reorder what a terminal shows.
    let hostile =
        |c: char| c.is_control() || ('\u{202a}'..='\u{202e}').contains(&c) || ('\u{2066}'..='\u{2069}').contains(&c);
    if !text.contains(hostile) {
        return text;
    }
    text.chars()
        .map(|c| {
            if hostile(c) {
                c.escape_default().to_string()
            } else {
                c.to_string()
            }
        })
        .collect()
}

/// Leaves the enclosing function with an error of the given kind and a formatted message.
macro_rules! bail {
    ($kind:ident, $($arg:tt)*) => {
        return Err($crate::error::Error::new($crate::error::Kind::$kind, format!($($arg)*)))
    };
}
pub(crate) use bail;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_names_cannot_draw_on_a_terminal() {
        let err = Error::new(Kind::Parse, "tensor '\u{1b}[2J\u{202e}'");
        assert_eq!(err.to_string(), "Parse: tensor '\\u{1b}[2J\\u{202e}'");
    }
}
