//! The error type of the library.
//!
//! Every error has a [`Kind`] with a stable name for scripts, and one sentence with the operand, the expected and the found
//! value.

use std::fmt;

/// The class of an error. The names are part of the command line's contract: no variant is ever renamed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// The file does not start with a known magic number.
    InvalidMagic,
    /// The version of the file format is not supported.
    UnsupportedVersion,
    /// The file requires a feature that is not supported.
    UnsupportedFeature,
    /// An offset, a length or an index is out of range.
    Bounds,
    /// Invalid bytes: JSON, UTF-8, a record, a payload.
    Parse,
    /// A stored checksum differs from that of the bytes.
    HashMismatch,
    /// A signature does not match the file or the pinned key.
    SignatureInvalid,
    /// The network needs a tensor that the file does not have.
    MissingTensor,
    /// The file is valid, but its network is not supported.
    UnsupportedModel,
    /// A tensor's type cannot be read, run or written.
    UnsupportedTensorType,
    /// The file is a skill, which cannot run without its base model.
    SkillFile,
    /// The shards of a model are incomplete or do not belong together.
    ShardMismatch,
    /// No adapter matches the request.
    NoAdapter,
    /// More memory is needed than available.
    OutOfMemory,
    /// The device was lost.
    DeviceLost,
    /// The driver refused or failed an operation.
    DeviceError,
    /// The prompt or the answer does not fit into the context.
    ContextFull,
    /// The chat template is invalid or rejected the conversation.
    Template,
    /// The tokenizer is missing, invalid or cannot encode the text.
    Tokenizer,
    /// A kernel computed a value that is not a finite number.
    NonFinite,
    /// Reading or writing failed.
    Io,
    /// The caller cancelled the work before it was done.
    Interrupted,
    /// A bug in this library.
    Internal,
    /// Invalid arguments or an invalid order of calls.
    Usage,
}

impl Kind {
    /// The stable name, as printed: that of the variant.
    pub fn name(self) -> String {
        format!("{self:?}")
    }
}

/// An error: its kind and a message.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Error {
    /// The class of the error.
    pub kind: Kind,
    /// One sentence. Control characters are escaped, so that names from a file cannot control a terminal.
    pub message: String,
}

/// A result with an [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind`; control characters in `message` are escaped.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Error {
            kind,
            message: escape(message.into()),
        }
    }

    /// An `Io` error on `path`.
    pub fn io(path: impl AsRef<std::path::Path>, err: &std::io::Error) -> Self {
        Error::new(Kind::Io, format!("{}: {err}", path.as_ref().display()))
    }

    /// The same error with `context: ` in front of its message.
    pub fn context(self, context: impl fmt::Display) -> Self {
        Error::new(self.kind, format!("{context}: {}", self.message))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.message)
    }
}

impl std::error::Error for Error {}

/// `text` with all characters escaped that could control a terminal.
pub fn escape(text: String) -> String {
    // U+202A..202E and U+2066..2069 reorder the text on a terminal.
    let hostile =
        |c: char| c.is_control() || ('\u{202a}'..='\u{202e}').contains(&c) || ('\u{2066}'..='\u{2069}').contains(&c);
    if !text.contains(hostile) {
        return text;
    }
    text.chars().fold(String::new(), |mut escaped, c| {
        match hostile(c) {
            true => escaped.extend(c.escape_default()),
            false => escaped.push(c),
        }
        escaped
    })
}

/// An error of the given kind with a formatted message.
macro_rules! error {
    ($kind:ident, $($arg:tt)*) => {
        $crate::error::Error::new($crate::error::Kind::$kind, format!($($arg)*))
    };
}

/// Returns an error of the given kind with a formatted message from the enclosing function.
macro_rules! bail {
    ($($arg:tt)*) => {
        return Err($crate::error::error!($($arg)*))
    };
}
pub(crate) use {bail, error};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_control_a_terminal() {
        let err = Error::new(Kind::Parse, "tensor '\u{1b}[2J\u{202e}'");
        assert_eq!(err.to_string(), "Parse: tensor '\\u{1b}[2J\\u{202e}'");
    }
}
