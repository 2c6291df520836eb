//! Splits the code of one template tag into tokens.

use crate::error::{Result, bail};

/// Most bytes of code in one tag, without white space and string literals. Bounds the depth of operator chains.
const MAX_TAG_CODE: usize = 16 << 10;

#[derive(Clone, Copy)]
pub(super) struct Token<'a> {
    pub(super) text: &'a str,
    /// Offset in the template source, in bytes.
    pub(super) start: usize,
    /// Number of open brackets around the token. A bracket does not count itself.
    pub(super) depth: usize,
}

impl Token<'_> {
    pub(super) fn end(&self) -> usize {
        self.start + self.text.len()
    }

    pub(super) fn is_literal(&self) -> bool {
        self.text.starts_with(['"', '\'']) || self.text.starts_with(|c: char| c.is_ascii_digit())
    }

    pub(super) fn is_name(&self) -> bool {
        self.text.starts_with(|c: char| c.is_alphabetic() || c == '_')
    }
}

/// The code of one tag.
pub(super) struct Code<'a> {
    /// Its tokens, without white space control.
    pub(super) tokens: Vec<Token<'a>>,
    /// Offset of the closing delimiter in the template source.
    pub(super) end: usize,
}

/// Reads the tag whose code starts at `start` and ends at the delimiter `close`. `None` if the tag or a string in it
/// has no end, which the parser of minijinja reports.
///
/// Errors: `Template` for a tag that is too long.
pub(super) fn lex<'a>(source: &'a str, start: usize, close: &str) -> Result<Option<Code<'a>>> {
    let mut tokens: Vec<Token> = Vec::new();
    let (mut at, mut depth, mut code) = (start, 0usize, 0);
    // `{{-1}}` strips white space and prints 1.
    if source[at..].starts_with(['-', '+']) {
        at += 1;
    }
    while let Some(c) = source[at..].chars().next() {
        let rest = &source[at..];
        if depth == 0 && rest.starts_with(close) {
            if tokens
                .last()
                .is_some_and(|last| matches!(last.text, "-" | "+") && last.end() == at)
            {
                tokens.pop();
            }
            return Ok(Some(Code { tokens, end: at }));
        }
        if c.is_whitespace() {
            at += c.len_utf8();
            continue;
        }
        let Some(text) = first_token(rest, c) else {
            return Ok(None);
        };
        if !matches!(c, '"' | '\'') {
            code += text.len();
            if code > MAX_TAG_CODE {
                let line = line_of(source, start);
                bail!(
                    Template,
                    "line {line}: a tag has more than {MAX_TAG_CODE} bytes of code"
                );
            }
        }
        if matches!(c, ')' | ']' | '}') {
            depth = depth.saturating_sub(1);
        }
        tokens.push(Token { text, start: at, depth });
        if matches!(c, '(' | '[' | '{') {
            depth += 1;
        }
        at += text.len();
    }
    Ok(None)
}

/// The number of the line at the offset `at`.
pub(super) fn line_of(source: &str, at: usize) -> usize {
    source.as_bytes()[..at].iter().filter(|&&b| b == b'\n').count() + 1
}

/// The token at the start of `rest`, whose first character is `c`; `None` for a string without an end.
fn first_token(rest: &str, c: char) -> Option<&str> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let word = |text: &str| text.find(|c| !is_word(c)).unwrap_or(text.len());
    let length = match c {
        '"' | '\'' => {
            let mut escaped = false;
            let closes = |&(_, x): &(usize, char)| {
                let closes = x == c && !escaped;
                escaped = x == '\\' && !escaped;
                closes
            };
            rest.char_indices().skip(1).find(closes)?.0 + 1
        }
        c if c.is_ascii_digit() => {
            // `1.5` is one number, `1.x` is not.
            let whole = word(rest);
            let fraction = rest[whole..]
                .strip_prefix('.')
                .filter(|fraction| fraction.starts_with(|c: char| c.is_ascii_digit()));
            whole + fraction.map_or(0, |fraction| 1 + word(fraction))
        }
        c if is_word(c) => word(rest),
        '=' | '!' | '<' | '>' if rest[1..].starts_with('=') => 2,
        c => c.len_utf8(),
    };
    Some(&rest[..length])
}
