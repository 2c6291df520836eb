//! Breaks text into lines as Python's `textwrap.wrap` does, with blanks inside of lines as they are.

use super::text::{self, is_alnum, is_alpha};

/// The blanks at which words end.
fn is_blank(c: char) -> bool {
    matches!(c, '\t'..='\r' | ' ')
}

/// Whether a line neither begins nor ends with the chunk.
fn blank(chunk: &[char]) -> bool {
    chunk.iter().all(|c| text::is_blank(*c))
}

/// The lines of `text`, of at most `width` characters. Longer words are broken if `break_long`, words with hyphens after
/// a hyphen if `hyphens`.
pub(super) fn wrap(text: &str, width: usize, break_long: bool, hyphens: bool) -> Vec<String> {
    let text: Vec<char> = text.chars().collect();
    let mut chunks = chunks(&text, hyphens);
    chunks.reverse();
    let mut lines: Vec<String> = Vec::new();
    while !chunks.is_empty() {
        if !lines.is_empty() && chunks.last().is_some_and(|chunk| blank(chunk)) {
            chunks.pop();
        }
        let (mut line, mut length) = (Vec::<&[char]>::new(), 0);
        while let Some(chunk) = chunks.last().filter(|chunk| length + chunk.len() <= width) {
            length += chunk.len();
            line.extend(chunks.pop());
        }
        if let Some(chunk) = chunks.last_mut().filter(|chunk| chunk.len() > width) {
            if break_long {
                let mut end = width - length;
                let hyphen = chunk[..end].iter().rposition(|c| *c == '-');
                if let Some(at) = hyphen.filter(|at| hyphens && chunk[..*at].iter().any(|c| *c != '-')) {
                    end = at + 1;
                }
                let (begin, rest) = chunk.split_at(end);
                line.push(begin);
                *chunk = rest;
            } else if line.is_empty() {
                line.extend(chunks.pop());
            }
        }
        if line.last().is_some_and(|chunk| blank(chunk)) {
            line.pop();
        }
        if !line.is_empty() {
            lines.push(line.concat().into_iter().collect());
        }
    }
    lines
}

/// Runs of blanks and words. A word ends after a hyphen at which it may be broken, and around a dash of hyphens.
fn chunks(text: &[char], hyphens: bool) -> Vec<&[char]> {
    let letter = |at: Option<usize>| {
        at.and_then(|at| text.get(at))
            .is_some_and(|c| *c == '_' || is_alpha(*c))
    };
    let word = |at: Option<usize>| {
        at.and_then(|at| text.get(at))
            .is_some_and(|c| *c == '_' || is_alnum(*c))
    };
    let is = |at: Option<usize>, wanted: &str| at.and_then(|at| text.get(at)).is_some_and(|c| wanted.contains(*c));
    let mut chunks = Vec::new();
    let mut begin = 0;
    // The end of a dash of two or more hyphens between words.
    let mut dash_end = 0;
    for (i, &c) in text.iter().enumerate() {
        let back = |count: usize| i.checked_sub(count);
        let ahead = |count: usize| Some(i + count);
        let dash = match c == '-' && !is(back(1), "-") {
            true => text[i..].iter().take_while(|c| **c == '-').count(),
            false => 0,
        };
        let punctuated = |at| word(at) || is(at, "!\"'&.,?");
        let dashes = hyphens && dash > 1 && i >= dash_end && punctuated(back(1)) && word(ahead(dash));
        if dashes {
            dash_end = i + dash;
        }
        let breaks = || {
            let before =
                letter(back(2)) && letter(back(3)) || punctuated(back(2)) && is(back(3), "-") && letter(back(4));
            let after = letter(ahead(0)) && (letter(ahead(1)) || is(ahead(1), "-") && letter(ahead(2)));
            is(back(1), "-") && before && after
        };
        let starts = match back(1) {
            None => true,
            Some(before) => {
                is_blank(text[before]) != is_blank(c) || dashes || i == dash_end || hyphens && i > dash_end && breaks()
            }
        };
        if starts && i > 0 {
            chunks.push(&text[begin..i]);
            begin = i;
        }
    }
    chunks.extend(Some(&text[begin..]).filter(|rest| !rest.is_empty()));
    chunks
}
