//! Characters and strings as Python's `str` understands them.

use super::limits::{Fault, Outcome};
use unicode_properties::{GeneralCategory, GeneralCategoryGroup, UnicodeGeneralCategory};

/// Python's `str.isspace` for one character.
pub(super) fn is_blank(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Python's `str.isalpha` for one character.
pub(super) fn is_alpha(c: char) -> bool {
    c.is_ascii_alphabetic() || c.general_category_group() == GeneralCategoryGroup::Letter
}

/// Python's `str.isdecimal` for one character.
pub(super) fn is_decimal(c: char) -> bool {
    c.is_ascii_digit() || c.general_category() == GeneralCategory::DecimalNumber
}

/// Python's `str.isdigit` for one character: also digits in circles, superscripts and so on.
pub(super) fn is_digit(c: char) -> bool {
    is_decimal(c)
        || matches!(c, '²' | '³' | '¹' | '⁰' | '⁴'..='⁹' | '₀'..='₉' | '①'..='⑨' | '⑴'..='⑼' | '⒈'..='⒐' | '⓪'
            | '⓵'..='⓽' | '⓿' | '❶'..='❾' | '➀'..='➈' | '➊'..='➒' | '፩'..='፱' | '᧚' | '𐩀'..='𐩃' | '𐹠'..='𐹨'
            | '𑁒'..='𑁚' | '🄀'..='🄊')
}

/// Python's `str.isnumeric` for one character: also fractions, Roman numerals and Chinese numbers.
pub(super) fn is_numeric(c: char) -> bool {
    c.general_category_group() == GeneralCategoryGroup::Number
        || "㐅㒃㠪㭍一七万三九二五亖亿什仟仨伍佰億兆兩八六十千卄卅卌参參叁叄四壱壹幺廾廿弌弍弎弐拾捌柒漆玖百肆萬貮貳贰阡陆陌陸零〇"
            .contains(c)
}

/// Python's `str.isalnum` for one character.
pub(super) fn is_alnum(c: char) -> bool {
    c.is_ascii_alphanumeric() || !c.is_ascii() && (is_alpha(c) || is_digit(c) || is_numeric(c))
}

/// Python's `str.isprintable` for one character, except for the marks that messages have only while they are rendered:
/// `repr` must not spell them out.
pub(super) fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return (' '..='~').contains(&c);
    }
    if ('\u{fdd0}'..='\u{fdd2}').contains(&c) {
        return true;
    }
    use GeneralCategoryGroup::{Other, Separator};
    !matches!(c.general_category_group(), Other | Separator)
}

/// The value of a decimal digit of any script. The digits of a script are next to each other, from 0 to 9.
pub(super) fn digit_value(c: char) -> Option<u32> {
    if c.is_ascii() || !is_decimal(c) {
        return c.to_digit(10);
    }
    let before = (1..60).take_while(|&i| char::from_u32(c as u32 - i).is_some_and(is_decimal));
    Some(before.count() as u32 % 10)
}

/// `c` as the first letter of a word.
pub(super) fn title_case(c: char) -> Vec<char> {
    match c {
        'Ǆ' | 'ǅ' | 'ǆ' => vec!['ǅ'],
        'Ǉ' | 'ǈ' | 'ǉ' => vec!['ǈ'],
        'Ǌ' | 'ǋ' | 'ǌ' => vec!['ǋ'],
        'Ǳ' | 'ǲ' | 'ǳ' => vec!['ǲ'],
        // Georgian letters have capitals, which begin no words.
        'ა'..='ჿ' => vec![c],
        // A letter that becomes several, such as 'ß': only the first one is a capital.
        _ => {
            let mut upper = c.to_uppercase();
            upper
                .next()
                .into_iter()
                .chain(upper.flat_map(char::to_lowercase))
                .collect()
        }
    }
}

/// Python's `str.title`: every run of letters begins with a capital.
pub(super) fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut inside = false;
    for c in text.chars() {
        match inside {
            true => out.extend(c.to_lowercase()),
            false => out.extend(title_case(c)),
        }
        inside = c.is_lowercase() || c.is_uppercase() || is_title(c);
    }
    out
}

/// Python's `str.capitalize`.
pub(super) fn capitalize(text: &str) -> String {
    let mut chars = text.chars();
    let mut out: String = chars.next().map(title_case).into_iter().flatten().collect();
    out.push_str(&chars.as_str().to_lowercase());
    out
}

/// Python's `str.swapcase`.
pub(super) fn swap_case(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_uppercase() {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
    }
    out
}

/// Python's `str.splitlines`: the lines, with their ends if `keep`.
pub(super) fn lines(text: &str, keep: bool) -> Vec<&str> {
    let mut found = Vec::new();
    let mut start = 0;
    let mut chars = text.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        if !matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        ) {
            continue;
        }
        let mut end = at + c.len_utf8();
        if c == '\r' && chars.next_if(|&(_, next)| next == '\n').is_some() {
            end += 1;
        }
        found.push(&text[start..if keep { end } else { at }]);
        start = end;
    }
    if start < text.len() {
        found.push(&text[start..]);
    }
    found
}

/// Which sides of a text.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Side {
    Left,
    Right,
    Both,
}

/// Python's `str.strip` and its variants: without the characters `set`, or without blanks.
pub(super) fn strip<'a>(mut text: &'a str, side: Side, set: Option<&str>) -> &'a str {
    let drop = |c: char| match set {
        Some(set) => set.contains(c),
        None => is_blank(c),
    };
    if side != Side::Right {
        text = text.trim_start_matches(drop);
    }
    if side != Side::Left {
        text = text.trim_end_matches(drop);
    }
    text
}

/// Python's `str.split` (or `rsplit`) at `separator`, or at runs of blanks; at most `limit` times.
pub(super) fn split<'a>(text: &'a str, separator: Option<&str>, limit: usize, from_right: bool) -> Vec<&'a str> {
    let side = if from_right { Side::Right } else { Side::Left };
    let mut rest = match separator {
        Some(_) => text,
        None => strip(text, side, None),
    };
    let mut found = Vec::new();
    while found.len() < limit {
        let cut = match (separator, from_right) {
            (Some(separator), false) => rest.split_once(separator),
            (Some(separator), true) => rest.rsplit_once(separator).map(|(head, tail)| (tail, head)),
            (None, false) => rest.split_once(is_blank),
            (None, true) => rest.rsplit_once(is_blank).map(|(head, tail)| (tail, head)),
        };
        let Some((part, more)) = cut else { break };
        found.push(part);
        rest = match separator {
            Some(_) => more,
            None => strip(more, side, None),
        };
    }
    if separator.is_some() || !rest.is_empty() {
        found.push(rest);
    }
    if from_right {
        found.reverse();
    }
    found
}

/// `text` with `&`, `<`, `>` and quotes as HTML entities.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    out
}

/// Python's `str.expandtabs`.
pub(super) fn expand_tabs(text: &str, width: usize) -> String {
    let mut out = String::with_capacity(text.len());
    let mut column = 0;
    for c in text.chars() {
        match c {
            '\t' if width > 0 => {
                let blanks = width - column % width;
                out.extend(std::iter::repeat_n(' ', blanks));
                column += blanks;
            }
            '\t' => {}
            c => {
                out.push(c);
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    out
}

/// The name of a variable in Python.
pub(super) fn is_identifier(text: &str) -> bool {
    let start = |c: char| c == '_' || is_alpha(c) || c.general_category() == GeneralCategory::LetterNumber;
    let rest = |c: char| {
        use GeneralCategory::{ConnectorPunctuation, NonspacingMark, SpacingMark};
        let category = c.general_category();
        start(c) || is_decimal(c) || matches!(category, ConnectorPunctuation | NonspacingMark | SpacingMark)
    };
    text.starts_with(start) && text.chars().all(rest)
}

/// Whether `c` is a letter that begins words, such as 'ǅ'.
pub(super) fn is_title(c: char) -> bool {
    c.general_category() == GeneralCategory::TitlecaseLetter
}

/// Python's `str.istitle`: capitals begin words, and nothing else does.
pub(super) fn is_titled(text: &str) -> bool {
    let (mut inside, mut any) = (false, false);
    for c in text.chars() {
        let begins = c.is_uppercase() || is_title(c);
        if begins && inside || c.is_lowercase() && !inside {
            return false;
        }
        inside = begins || c.is_lowercase();
        any |= inside;
    }
    any
}

/// Python's `str.casefold`, for the letters whose folding differs from `lower` in common scripts.
pub(super) fn fold(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            'ß' | 'ẞ' => out.push_str("ss"),
            'ς' => out.push('σ'),
            'ſ' => out.push('s'),
            'µ' => out.push('μ'),
            'ﬀ'..='ﬆ' | 'ŉ' | 'ǰ' => out.extend(c.to_uppercase().flat_map(char::to_lowercase)),
            c => out.extend(c.to_lowercase()),
        }
    }
    out
}

/// Text with the entities of HTML that [`escape`] writes, and numbers, as characters.
pub(super) fn unescape(text: &str) -> Outcome<String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('&') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let entity = rest.find(';').map(|end| &rest[1..end]);
        let number = entity.and_then(|entity| entity.strip_prefix('#')).and_then(|number| {
            let hex = number.strip_prefix(['x', 'X']);
            let parsed = hex.map_or_else(|| number.parse(), |hex| u32::from_str_radix(hex, 16));
            parsed.ok().and_then(char::from_u32)
        });
        let c = match entity {
            Some("amp") => Some('&'),
            Some("lt") => Some('<'),
            Some("gt") => Some('>'),
            Some("quot") => Some('"'),
            Some("apos") => Some('\''),
            Some("nbsp") => Some('\u{a0}'),
            _ => number,
        };
        match (c, entity) {
            (Some(c), Some(entity)) => {
                out.push(c);
                rest = &rest[entity.len() + 2..];
            }
            (None, Some(entity)) if !entity.is_empty() && entity.chars().all(|c| c.is_ascii_alphanumeric()) => {
                return Err(Fault::invalid(format!(
                    "striptags: the entity '&{entity};' is not supported"
                )));
            }
            _ => {
                out.push('&');
                rest = &rest[1..];
            }
        }
    }
    out.push_str(rest);
    Ok(out)
}
