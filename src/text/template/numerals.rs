//! Reads numbers from text and writes them in Python's formats.

use super::text::{digit_value, is_blank};

/// How a number or a text is written: Python's format specification, to which `%` directives are translated.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    pub(super) fill: char,
    /// `<`, `>`, `^`, or `=` for a sign before the padding. None is the type's own.
    pub(super) align: Option<char>,
    /// `-`, `+` or a space.
    pub(super) sign: Option<char>,
    /// `#`: with a prefix, or with a point in any case.
    pub(super) alternate: bool,
    /// `z`: no negative zero.
    pub(super) no_negative_zero: bool,
    pub(super) width: usize,
    /// `,` or `_`
    pub(super) grouping: Option<char>,
    pub(super) precision: Option<usize>,
    /// The letter of the format. None is the type's own.
    pub(super) kind: Option<char>,
}

impl Default for Spec {
    fn default() -> Spec {
        Spec {
            fill: ' ',
            align: None,
            sign: None,
            alternate: false,
            no_negative_zero: false,
            width: 0,
            grouping: None,
            precision: None,
            kind: None,
        }
    }
}

impl Spec {
    /// `text` padded to the width.
    pub(super) fn pad(&self, text: &str, own: char) -> String {
        self.pad_number("", text, own, 0)
    }

    /// A sign or prefix and digits, padded to the width. Zeros that fill the width are grouped by `group` digits.
    fn pad_number(&self, prefix: &str, digits: &str, own: char, group: usize) -> String {
        let length = prefix.chars().count() + digits.chars().count();
        let missing = self.width.saturating_sub(length);
        let fill = |count: usize| self.fill.to_string().repeat(count);
        match self.align.unwrap_or(own) {
            '<' => format!("{prefix}{digits}{}", fill(missing)),
            '^' => format!("{}{prefix}{digits}{}", fill(missing / 2), fill(missing - missing / 2)),
            '=' => match self.grouping.filter(|_| self.fill == '0' && group > 0) {
                Some(separator) => {
                    let width = self.width.saturating_sub(prefix.chars().count());
                    format!("{prefix}{}", grouped(digits, separator, group, width))
                }
                None => format!("{prefix}{}{digits}", fill(missing)),
            },
            _ => format!("{}{prefix}{digits}", fill(missing)),
        }
    }

    fn sign_of(&self, negative: bool) -> &'static str {
        match (negative, self.sign) {
            (true, _) => "-",
            (false, Some('+')) => "+",
            (false, Some(' ')) => " ",
            _ => "",
        }
    }

    /// An integer in the format `d`, `b`, `o`, `x` or `X`. None for another one.
    pub(super) fn int(&self, number: i128) -> Option<String> {
        let magnitude = number.unsigned_abs();
        let (digits, prefix, group) = match self.kind.unwrap_or('d') {
            'd' | 'n' => (magnitude.to_string(), "", 3),
            'b' => (format!("{magnitude:b}"), "0b", 4),
            'o' => (format!("{magnitude:o}"), "0o", 4),
            'x' => (format!("{magnitude:x}"), "0x", 4),
            'X' => (format!("{magnitude:X}"), "0X", 4),
            _ => return None,
        };
        // `%.5d` writes at least five digits.
        let zeros = self.precision.unwrap_or(0).saturating_sub(digits.len());
        let digits = "0".repeat(zeros) + &digits;
        let digits = match self.grouping {
            Some(separator) => grouped(&digits, separator, group, 0),
            None => digits,
        };
        let prefix = if self.alternate { prefix } else { "" };
        let prefix = format!("{}{prefix}", self.sign_of(number < 0));
        Some(self.pad_number(&prefix, &digits, '>', group))
    }

    /// A float in the format `e`, `f`, `g`, `%` or, without one, like `repr`. None for another format.
    pub(super) fn float(&self, number: f64) -> Option<String> {
        let kind = self.kind;
        let magnitude = number.abs();
        let body = match kind.map(|kind| kind.to_ascii_lowercase()) {
            _ if !number.is_finite() => {
                let name = if number.is_nan() { "nan" } else { "inf" };
                format!("{name}{}", if kind == Some('%') { "%" } else { "" })
            }
            Some('e') => exponential(magnitude, self.precision.unwrap_or(6), self.alternate),
            Some('f') => fixed(magnitude, self.precision.unwrap_or(6), self.alternate),
            Some('%') => fixed(magnitude * 100.0, self.precision.unwrap_or(6), self.alternate) + "%",
            Some('g' | 'n') => general(magnitude, self.precision.unwrap_or(6), self.alternate, 0),
            None => match self.precision {
                // Like `g`, with at least one digit after the point.
                Some(precision) => general(magnitude, precision, self.alternate, 1),
                None => {
                    let text = super::write::float(magnitude, false);
                    let point = self.alternate && !text.contains('.');
                    if point { text.replacen('e', ".e", 1) } else { text }
                }
            },
            Some(_) => return None,
        };
        let upper = kind.is_some_and(|kind| kind.is_ascii_uppercase());
        let body = if upper { body.to_ascii_uppercase() } else { body };
        let body = match self.grouping {
            Some(separator) => {
                let whole = body.bytes().take_while(u8::is_ascii_digit).count();
                grouped(&body[..whole], separator, 3, 0) + &body[whole..]
            }
            None => body,
        };
        let is_zero = body.bytes().all(|b| !(b'1'..=b'9').contains(&b)) && number.is_finite();
        let negative = number.is_sign_negative() && !number.is_nan() && !(self.no_negative_zero && is_zero);
        Some(self.pad_number(self.sign_of(negative), &body, '>', 3))
    }
}

/// `digits` with a separator every `group` digits, and with zeros before them up to `width` characters.
fn grouped(digits: &str, separator: char, group: usize, width: usize) -> String {
    // Groups of four are those of other bases; in a decimal number an `e` begins the exponent.
    let is_digit = |b: &u8| {
        if group == 4 {
            b.is_ascii_hexdigit()
        } else {
            b.is_ascii_digit()
        }
    };
    let whole = digits.bytes().take_while(|b| is_digit(b) || *b == separator as u8);
    let (whole, rest) = digits.split_at(whole.count());
    let width = width.saturating_sub(rest.len());
    let plain: Vec<char> = whole.chars().filter(|c| *c != separator).collect();
    let mut reversed = Vec::new();
    let mut count = 0;
    while count < plain.len() || reversed.len() < width {
        if count > 0 && count % group == 0 {
            reversed.push(separator);
        }
        let digit = plain.len().checked_sub(count + 1).map_or('0', |at| plain[at]);
        reversed.push(digit);
        count += 1;
    }
    reversed.iter().rev().collect::<String>() + rest
}

fn fixed(number: f64, precision: usize, point: bool) -> String {
    let text = format!("{number:.precision$}");
    if point && precision == 0 { text + "." } else { text }
}

fn exponential(number: f64, precision: usize, point: bool) -> String {
    let text = format!("{number:.precision$e}");
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let point = if point && precision == 0 { "." } else { "" };
    format!("{mantissa}{point}e{exponent:+03}")
}

/// The format `g`: `precision` significant digits, without zeros at the end unless `keep`; fixed unless the exponent is
/// small or large. `after` is the least number of digits after the point of a fixed number.
fn general(number: f64, precision: usize, keep: bool, after: usize) -> String {
    let precision = precision.max(1);
    let rounded = format!("{number:.*e}", precision - 1);
    let (mantissa, exponent) = rounded.split_once('e').unwrap_or((&rounded, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    // Without a letter, the last digit that fits makes the point and one digit after it.
    let fits = exponent < precision as i32 - i32::from(after > 0);
    if exponent < -4 || !fits {
        let mantissa = if keep {
            mantissa.to_string()
        } else {
            trimmed(mantissa, 0)
        };
        let point = if keep && !mantissa.contains('.') { "." } else { "" };
        return format!("{mantissa}{point}e{exponent:+03}");
    }
    let decimals = usize::try_from(precision as i32 - 1 - exponent).unwrap_or(0);
    let text = fixed(number, decimals, keep);
    if keep { text } else { trimmed(&text, after) }
}

/// Without zeros at the end, and with at least `after` digits after the point.
fn trimmed(text: &str, after: usize) -> String {
    let mut text = match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => text.to_string(),
    };
    if after > 0 && !text.contains('.') {
        text.push_str(".0");
    }
    text
}

/// The digits of a number, with a `_` between two of them at most. None if one is something else.
fn plain_digits(text: &str, radix: u32) -> Option<String> {
    let mut out = String::new();
    let mut after_digit = false;
    for c in text.chars() {
        match c {
            '_' if after_digit => after_digit = false,
            c => {
                let value = digit_value(c)
                    .or_else(|| c.to_digit(36))
                    .filter(|value| *value < radix)?;
                out.push(char::from_digit(value, 36)?);
                after_digit = true;
            }
        }
    }
    (after_digit && !out.is_empty()).then_some(out)
}

/// What reading an integer gives.
pub(super) enum Parsed {
    Int(i128),
    Invalid,
    TooLarge,
}

/// Python's `int(text, radix)`. The radix 0 is that of the prefix.
pub(super) fn parse_int(text: &str, radix: u32) -> Parsed {
    let text = text.trim_matches(is_blank);
    let (negative, digits) = match text.strip_prefix(['-', '+']) {
        Some(digits) => (text.starts_with('-'), digits),
        None => (false, text),
    };
    let prefix = digits.get(..2).map(str::to_ascii_lowercase);
    let prefixed = match prefix.as_deref() {
        Some("0x") => 16,
        Some("0o") => 8,
        Some("0b") => 2,
        _ => 0,
    };
    let (radix, digits) = match (radix, prefixed) {
        (0, 0) if digits.starts_with('0') && digits.bytes().any(|b| (b'1'..=b'9').contains(&b)) => {
            return Parsed::Invalid;
        }
        (0, 0) => (10, digits),
        (0, found) => (found, &digits[2..]),
        (radix, found) if radix == found => (radix, &digits[2..]),
        (radix, _) => (radix, digits),
    };
    // One `_` may follow a prefix.
    let digits = if prefixed == radix {
        digits.strip_prefix('_').unwrap_or(digits)
    } else {
        digits
    };
    let Some(digits) = plain_digits(digits, radix) else {
        return Parsed::Invalid;
    };
    let digits = if negative { format!("-{digits}") } else { digits };
    i128::from_str_radix(&digits, radix).map_or(Parsed::TooLarge, Parsed::Int)
}

/// Python's `float(text)`.
pub(super) fn parse_float(text: &str) -> Option<f64> {
    let text = text.trim_matches(is_blank);
    let mut plain = String::with_capacity(text.len());
    let mut before = ' ';
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let is_digit = |c: char| digit_value(c).is_some();
        if c == '_' {
            if !is_digit(before) || !chars.peek().is_some_and(|next| is_digit(*next)) {
                return None;
            }
        } else {
            plain.push(
                digit_value(c)
                    .and_then(|value| char::from_digit(value, 10))
                    .unwrap_or(c),
            );
        }
        before = c;
    }
    plain.parse().ok()
}
