//! Splits the source of a template into text and the tokens of its tags, with the blanks that tags remove.

use super::limits::{Fault, Outcome};
use super::text::{Side, is_blank, is_identifier, strip};
use super::write::escape;
use std::sync::Arc;

/// A token with its line.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Token {
    pub(super) line: u32,
    pub(super) kind: Lexeme,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Lexeme {
    /// Text outside of tags.
    Text(String),
    /// `{{` and `}}`
    PrintBegin,
    PrintEnd,
    /// `{%` and `%}`
    TagBegin,
    TagEnd,
    Name(Arc<str>),
    Str(Arc<str>),
    Int(i128),
    Float(f64),
    /// An operator or a bracket.
    Op(&'static str),
    End,
}

/// Longest first, so that `**` is not two products.
const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<", "=", ".",
    ":", "|", ",", ";",
];

/// The tokens of `source`, ending with [`Lexeme::End`].
pub(super) fn tokens(source: &str) -> Outcome<Vec<Token>> {
    let mut text = source.replace("\r\n", "\n").replace('\r', "\n");
    if text.ends_with('\n') {
        text.pop();
    }
    let mut lexer = Lexer {
        source: &text,
        at: 0,
        line: 1,
        line_start: true,
        found: Vec::new(),
    };
    while lexer.at < text.len() {
        lexer.text().map_err(|fault| fault.at(lexer.line))?;
    }
    lexer.push(Lexeme::End);
    Ok(lexer.found)
}

struct Lexer<'a> {
    source: &'a str,
    at: usize,
    line: u32,
    /// Whether the text that follows begins a line.
    line_start: bool,
    found: Vec<Token>,
}

fn syntax(message: impl Into<String>) -> Box<Fault> {
    Fault::new("syntax error", message)
}

impl<'a> Lexer<'a> {
    fn rest(&self) -> &'a str {
        &self.source[self.at..]
    }

    fn push(&mut self, kind: Lexeme) {
        self.found.push(Token { line: self.line, kind });
    }

    /// Moves on by `length` bytes.
    fn skip(&mut self, length: usize) {
        let passed = &self.source[self.at..self.at + length];
        self.line += passed.matches('\n').count() as u32;
        self.at += length;
    }

    fn skip_blanks(&mut self) {
        let rest = self.rest();
        self.skip(rest.len() - strip(rest, Side::Left, None).len());
    }

    /// Skips `expected` if it is next.
    fn eat(&mut self, expected: &str) -> bool {
        let found = self.rest().starts_with(expected);
        if found {
            self.skip(expected.len());
        }
        found
    }

    /// The text up to the next tag, and that tag.
    fn text(&mut self) -> Outcome<()> {
        let rest = self.rest();
        let tags = rest.match_indices('{');
        let open = tags
            .map(|(at, _)| at)
            .find(|at| matches!(rest.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#')));
        let Some(open) = open else {
            self.push(Lexeme::Text(rest.to_string()));
            self.skip(rest.len());
            return Ok(());
        };
        let tag = &rest[open..open + 2];
        let sign = rest[open + 2..].chars().next().filter(|c| matches!(c, '-' | '+'));
        self.before(open, sign, tag != "{{");
        self.skip(2 + sign.map_or(0, char::len_utf8));
        match tag {
            "{{" => {
                self.push(Lexeme::PrintBegin);
                self.code("}}", Lexeme::PrintEnd)
            }
            "{#" => {
                // Jinja misses the end only if there is text that could contain it.
                if self.rest().is_empty() {
                    return Ok(());
                }
                let Some(end) = self.rest().find("#}") else {
                    return Err(syntax("Missing end of comment tag"));
                };
                let body = &self.rest()[..end];
                // The sign of the end, which the sign of the beginning cannot be as well.
                let (body, sign) = match body.as_bytes().last() {
                    Some(b'-') => (end - 1, "-"),
                    Some(b'+') => (end - 1, "+"),
                    _ => (end, ""),
                };
                self.skip(body + sign.len() + 2);
                self.after(sign, true);
                Ok(())
            }
            _ if self.is_raw() => self.raw(),
            _ => {
                self.push(Lexeme::TagBegin);
                self.code("%}", Lexeme::TagEnd)
            }
        }
    }

    /// The text of `length` bytes before a tag, without the blanks that the tag's sign removes, or that stand before a
    /// statement or a comment on its line.
    fn before(&mut self, length: usize, sign: Option<char>, statement: bool) {
        let text = &self.rest()[..length];
        let mut kept = text;
        if sign == Some('-') {
            kept = strip(text, Side::Right, None);
        } else if sign.is_none() && statement {
            let line = text.rfind('\n').map_or(0, |at| at + 1);
            if (line > 0 || self.line_start) && text[line..].chars().all(is_blank) {
                kept = &text[..line];
            }
        }
        if !kept.is_empty() {
            self.push(Lexeme::Text(kept.to_string()));
        }
        self.skip(length);
    }

    /// What the end of a tag removes: all blanks after `-`; one line end after a statement or a comment without a sign.
    fn after(&mut self, sign: &str, statement: bool) {
        let start = self.at;
        match sign {
            "-" => self.skip_blanks(),
            "" if statement => drop(self.eat("\n")),
            _ => {}
        }
        self.line_start = self.source[start..self.at].ends_with('\n');
    }

    /// Whether the tag that has begun is `raw`. The pattern allows no `+` at its end.
    fn is_raw(&self) -> bool {
        let name = strip(self.rest(), Side::Left, None).strip_prefix("raw");
        let end = name.map(|rest| strip(rest, Side::Left, None));
        end.is_some_and(|end| end.starts_with("%}") || end.starts_with("-%}"))
    }

    /// The text up to `endraw`.
    fn raw(&mut self) -> Outcome<()> {
        let end = self.rest().find("%}").unwrap_or(0);
        let sign = if self.rest()[..end].ends_with('-') { "-" } else { "+" };
        self.skip(end + 2);
        self.after(sign, true);
        let rest = self.rest();
        for (open, _) in rest.match_indices("{%") {
            let tag = &rest[open + 2..];
            let sign = tag.chars().next().filter(|c| matches!(c, '-' | '+'));
            let name = strip(&tag[sign.map_or(0, char::len_utf8)..], Side::Left, None);
            let Some(close) = name.strip_prefix("endraw") else {
                continue;
            };
            let close = strip(close, Side::Left, None);
            let end = ["%}", "-%}", "+%}"].into_iter().find(|end| close.starts_with(end));
            let Some(end) = end else { continue };
            self.before(open, sign, true);
            self.skip(rest.len() - open - close.len() + end.len());
            self.after(&end[..end.len() - 2], true);
            return Ok(());
        }
        match rest {
            "" => Ok(()),
            _ => Err(syntax("Missing end of raw directive")),
        }
    }

    /// The tokens of a tag up to its `end`.
    fn code(&mut self, end: &str, kind: Lexeme) -> Outcome<()> {
        let mut brackets: Vec<&str> = Vec::new();
        loop {
            self.skip_blanks();
            let rest = self.rest();
            if rest.is_empty() {
                self.line_start = false;
                return Ok(());
            }
            if brackets.is_empty() {
                let statement = end == "%}";
                let sign = ["-", "+", ""].into_iter().find(|sign| {
                    let after = rest.strip_prefix(sign);
                    (statement || *sign != "+") && after.is_some_and(|after| after.starts_with(end))
                });
                if let Some(sign) = sign {
                    self.push(kind);
                    self.skip(sign.len() + end.len());
                    self.after(sign, statement);
                    return Ok(());
                }
            }
            if self.literal()? {
                continue;
            }
            let Some(op) = OPERATORS.into_iter().find(|op| rest.starts_with(op)) else {
                let c = rest.chars().next().unwrap_or_default();
                return Err(syntax(format!("unexpected char '{}'", c.escape_debug())));
            };
            match op {
                "{" => brackets.push("}"),
                "(" => brackets.push(")"),
                "[" => brackets.push("]"),
                "}" | ")" | "]" => match brackets.pop() {
                    Some(expected) if expected == op => {}
                    Some(expected) => return Err(syntax(format!("unexpected '{op}', expected '{expected}'"))),
                    None => return Err(syntax(format!("unexpected '{op}'"))),
                },
                _ => {}
            }
            self.push(Lexeme::Op(op));
            self.skip(op.len());
        }
    }

    /// A number, a name or a string, if one is next.
    fn literal(&mut self) -> Outcome<bool> {
        let rest = self.rest();
        let Some(first) = rest.chars().next() else {
            return Ok(false);
        };
        if first.is_ascii_digit() {
            return self.number().map(|()| true);
        }
        if first == '\'' || first == '"' {
            let mut escaped = false;
            let end = rest[1..].find(|c| {
                let ends = c == first && !escaped;
                escaped = c == '\\' && !escaped;
                ends
            });
            let Some(end) = end else {
                return Err(syntax(format!("unexpected char '{}'", first.escape_debug())));
            };
            let value = unescape(&rest[1..1 + end])?;
            self.push(Lexeme::Str(value.into()));
            self.skip(end + 2);
            return Ok(true);
        }
        let is_word = |c: char| c == '_' || c.is_alphanumeric() || !c.is_ascii() && is_identifier(&format!("_{c}"));
        if !is_word(first) {
            return Ok(false);
        }
        let name = &rest[..rest.find(|c| !is_word(c)).unwrap_or(rest.len())];
        if !is_identifier(name) {
            return Err(syntax("Invalid character in identifier"));
        }
        self.push(Lexeme::Name(name.into()));
        self.skip(name.len());
        Ok(true)
    }

    fn number(&mut self) -> Outcome<()> {
        let rest = self.rest();
        // After a dot a number is an index, not a fraction.
        let after_dot = self.source[..self.at].ends_with('.');
        let (length, is_float) = match float_length(rest).filter(|_| !after_dot) {
            Some(length) => (length, true),
            None => (int_length(rest), false),
        };
        let digits = rest[..length].replace('_', "").to_ascii_lowercase();
        let kind = if is_float {
            digits.parse().ok().map(Lexeme::Float)
        } else {
            let radix = match digits.get(..2) {
                Some("0x") => 16,
                Some("0o") => 8,
                Some("0b") => 2,
                _ => 10,
            };
            let digits = if radix == 10 { &digits[..] } else { &digits[2..] };
            i128::from_str_radix(digits, radix).ok().map(Lexeme::Int)
        };
        let Some(kind) = kind else {
            return Err(syntax(format!("the number {} is too large", &rest[..length])));
        };
        self.push(kind);
        self.skip(length);
        Ok(())
    }
}

/// The length of `digit (_? digit)*`, 0 if there is none.
fn digits(text: &str, is_digit: impl Fn(u8) -> bool) -> usize {
    let bytes = text.as_bytes();
    let mut length = 0;
    loop {
        let skip = usize::from(length > 0 && bytes.get(length) == Some(&b'_'));
        match bytes.get(length + skip) {
            Some(&b) if is_digit(b) => length += skip + 1,
            _ => return length,
        }
    }
}

/// The length of the integer that `text` begins with.
fn int_length(text: &str) -> usize {
    let radix = text.get(..2).map(str::to_ascii_lowercase);
    let body = text.get(2..).unwrap_or("");
    // A `_` may follow the prefix.
    let skip = usize::from(body.starts_with('_'));
    let found = match radix.as_deref() {
        Some("0x") => digits(&body[skip..], |b| b.is_ascii_hexdigit()),
        Some("0o") => digits(&body[skip..], |b| matches!(b, b'0'..=b'7')),
        Some("0b") => digits(&body[skip..], |b| matches!(b, b'0' | b'1')),
        _ => 0,
    };
    if found > 0 {
        return 2 + skip + found;
    }
    if text.starts_with('0') {
        return digits(text, |b| b == b'0');
    }
    digits(text, |b| b.is_ascii_digit())
}

/// The length of the number with a fraction or an exponent that `text` begins with.
fn float_length(text: &str) -> Option<usize> {
    let is_digit = |b: u8| b.is_ascii_digit();
    let mut length = digits(text, is_digit);
    let mut found = false;
    if let Some(fraction) = text[length..].strip_prefix('.') {
        let count = digits(fraction, is_digit);
        if count > 0 {
            length += 1 + count;
            found = true;
        }
    }
    if let Some(exponent) = text[length..].strip_prefix(['e', 'E']) {
        let number = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
        let count = digits(number, is_digit);
        if count > 0 {
            length += 1 + exponent.len() - number.len() + count;
            found = true;
        }
    }
    found.then_some(length)
}

/// The value of a string literal: Python's escapes, and a backslash where there is none.
fn unescape(text: &str) -> Outcome<String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        let Some(kind) = rest[at + 1..].chars().next() else {
            return Err(syntax("a string ends in a backslash"));
        };
        rest = &rest[at + 1 + kind.len_utf8()..];
        let simple = match kind {
            '\n' => "",
            '\\' => "\\",
            '\'' => "'",
            '"' => "\"",
            'a' => "\u{7}",
            'b' => "\u{8}",
            'f' => "\u{c}",
            'n' => "\n",
            'r' => "\r",
            't' => "\t",
            'v' => "\u{b}",
            'x' => {
                rest = code(rest, 16, 2..3, &mut out)?;
                continue;
            }
            'u' => {
                rest = code(rest, 16, 4..5, &mut out)?;
                continue;
            }
            'U' => {
                rest = code(rest, 16, 8..9, &mut out)?;
                continue;
            }
            '0'..='7' => {
                rest = code(&text[text.len() - rest.len() - 1..], 8, 1..4, &mut out)?;
                continue;
            }
            'N' => return Err(syntax("names of characters, as in '\\N{DASH}', are not supported")),
            other if other.is_ascii() => {
                out.extend(['\\', other]);
                continue;
            }
            // Jinja writes other characters as escapes first, and the two backslashes become one.
            other => {
                out.push_str(&escape(other));
                continue;
            }
        };
        out.push_str(simple);
    }
    out.push_str(rest);
    Ok(out)
}

/// Appends the character whose number `text` begins with, of so many digits. Returns what follows.
fn code<'a>(text: &'a str, radix: u32, count: std::ops::Range<usize>, out: &mut String) -> Outcome<&'a str> {
    let digits = text
        .bytes()
        .take(count.end - 1)
        .take_while(|b| char::from(*b).is_digit(radix));
    let length = digits.count();
    let number = u32::from_str_radix(&text[..length], radix)
        .ok()
        .filter(|_| length >= count.start);
    let Some(c) = number.and_then(char::from_u32) else {
        return Err(syntax(format!(
            "the escape of the character {:?} is truncated or names no character",
            &text[..length]
        )));
    };
    out.push(c);
    Ok(&text[length..])
}
