//! Source files as text: which there are, their code without comments, literals and tests, and their string literals.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A Rust file.
pub struct Source {
    /// The text with comments, literals and test modules replaced by spaces. Lines keep their numbers.
    pub code: String,
    /// Line and content of each string literal outside tests.
    pub strings: Vec<(usize, String)>,
}

impl Source {
    pub fn new(text: &str) -> Source {
        let (mut code, mut strings) = blanked(text);
        for (begin, end) in test_items(&code) {
            let tested = code[begin..end].to_owned();
            let line = |at: usize| code[..at].matches('\n').count() + 1;
            let lines = line(begin)..=line(end);
            strings.retain(|(line, _)| !lines.contains(line));
            code.replace_range(begin..end, &spaces(&tested));
        }
        Source { code, strings }
    }
}

pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Texts of all files under `dir` with this extension, by path relative to the repository.
pub fn files(dir: &str, extension: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut dirs = vec![root().join(dir)];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(&dir).unwrap_or_else(|err| panic!("{}: {err}", dir.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                let name = path.strip_prefix(root()).unwrap().to_str().unwrap().replace('\\', "/");
                found.insert(name, std::fs::read_to_string(&path).unwrap());
            }
        }
    }
    assert!(!found.is_empty(), "no {extension} in {dir}");
    found
}

/// The Rust files of a tree without the files of tests.
pub fn sources(dir: &str) -> BTreeMap<String, Source> {
    let is_test = |file: &String| Path::new(file).file_stem().is_some_and(|stem| stem == "tests");
    let all = files(dir, "rs").into_iter();
    all.filter(|(file, _)| !is_test(file))
        .map(|(file, text)| (file, Source::new(&text)))
        .collect()
}

/// As many spaces as there are bytes; line ends stay.
fn spaces(text: &str) -> String {
    let bytes = text.bytes();
    bytes.map(|byte| if byte == b'\n' { '\n' } else { ' ' }).collect()
}

/// The text with comments and the contents of literals replaced by spaces, and the string literals with their lines.
fn blanked(text: &str) -> (String, Vec<(usize, String)>) {
    let (mut code, mut strings, mut at) = (String::with_capacity(text.len()), Vec::new(), 0);
    while at < text.len() {
        let rest = &text[at..];
        let before = code.chars().next_back();
        let begins_word = !before.is_some_and(|c| c.is_alphanumeric() || c == '_');
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            block_comment(rest)
        } else if let Some((quote, length)) = string(rest, begins_word) {
            let line = text[..at].matches('\n').count() + 1;
            strings.push((line, rest[quote..length].to_owned()));
            length
        } else if let Some(length) = character(rest) {
            length
        } else {
            let c = rest.chars().next().unwrap_or(' ');
            code.push_str(if c.is_ascii() { &rest[..1] } else { "" });
            if !c.is_ascii() {
                code.push_str(&spaces(&rest[..c.len_utf8()]));
            }
            at += c.len_utf8();
            continue;
        };
        code.push_str(&spaces(&rest[..length]));
        at += length;
    }
    (code, strings)
}

/// Bytes of the block comment at the start; comments nest.
fn block_comment(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        match &text.as_bytes()[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    text.len()
}

/// Where the content of the string literal at the start begins, and the bytes of the literal.
fn string(text: &str, begins_word: bool) -> Option<(usize, usize)> {
    let prefix = if begins_word {
        text.find(|c| !"bcr".contains(c))?
    } else {
        0
    };
    let hashes = text[prefix..].find(|c| c != '#')?;
    let quote = prefix + hashes;
    let raw = text[..prefix].ends_with('r');
    if !text[quote..].starts_with('"') || (hashes > 0 && !raw) || prefix > 2 {
        return None;
    }
    let content = quote + 1;
    if raw {
        let end = format!("\"{}", "#".repeat(hashes));
        return Some((content, content + text[content..].find(&end)? + end.len()));
    }
    let mut escaped = false;
    for (i, c) in text[content..].char_indices() {
        match c {
            '"' if !escaped => return Some((content, content + i + 1)),
            '\\' => escaped = !escaped,
            _ => escaped = false,
        }
    }
    None
}

/// Bytes of the character literal at the start; none for a lifetime.
fn character(text: &str) -> Option<usize> {
    let rest = text.strip_prefix('\'')?;
    if rest.starts_with('\\') {
        return Some(rest[2..].find('\'')? + 4);
    }
    let c = rest.chars().next()?;
    rest[c.len_utf8()..].starts_with('\'').then_some(c.len_utf8() + 2)
}

/// The ranges of items under `#[cfg(test)]`.
fn test_items(code: &str) -> Vec<(usize, usize)> {
    const ATTRIBUTE: &str = "#[cfg(test)]";
    let found = code.match_indices(ATTRIBUTE);
    found
        .map(|(at, _)| (at, item_end(code, at + ATTRIBUTE.len())))
        .collect()
}

/// The end of the item that begins at `from`: past its semicolon, or past its closing brace.
fn item_end(code: &str, from: usize) -> usize {
    body(code, from).map_or_else(|at| (at + 1).min(code.len()), |(_, close)| close + 1)
}

/// The braces of the body of an item that begins at `from`, or where its semicolon is.
fn body(code: &str, from: usize) -> Result<(usize, usize), usize> {
    let (mut nested, mut braces, mut open) = (0, 0, from);
    for (i, byte) in code.bytes().enumerate().skip(from) {
        match byte {
            b'(' | b'[' if braces == 0 => nested += 1,
            b')' | b']' if braces == 0 => nested -= 1,
            b';' if braces == 0 && nested == 0 => return Err(i),
            b'{' if nested == 0 => {
                open = if braces == 0 { i } else { open };
                braces += 1;
            }
            b'}' if nested == 0 => {
                braces -= 1;
                if braces == 0 {
                    return Ok((open, i));
                }
            }
            _ => {}
        }
    }
    Err(code.len())
}

/// Name, first line and number of lines of each function with a body.
pub fn functions(code: &str) -> Vec<(String, usize, usize)> {
    let line = |at: usize| code[..at].matches('\n').count() + 1;
    let mut found = Vec::new();
    for (at, _) in code.match_indices("fn ") {
        let inside = code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let name: String = word(&code[at + 3..]).into();
        if inside || name.is_empty() {
            continue;
        }
        if let Ok((_, close)) = body(code, at) {
            found.push((name, line(at), line(close) - line(at) + 1));
        }
    }
    found
}

/// The identifier at the start of a text.
pub fn word(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
    &text[..end.unwrap_or(text.len())]
}

#[test]
fn comments_literals_and_tests_are_blanked() {
    let text = r##"
fn a<'x>() -> &'x str { "fn \" b() {" /* { /* { */ */ } // }
const C: [char; 2] = ['"', '\''];
const D: &str = r#"say "--flag" now"#; let r#type = 1;
#[cfg(test)]
mod tests { fn e() { "--test"; } }
fn f(x: [u8; 3]) {
}
"##;
    let source = Source::new(text);
    assert_eq!(source.code.len(), text.len());
    let strings: Vec<_> = source.strings.iter().map(|(line, s)| (*line, s.as_str())).collect();
    assert_eq!(strings, [(2, "fn \\\" b() {\""), (4, "say \"--flag\" now\"#")]);
    let found = functions(&source.code);
    assert_eq!(found, [("a".to_owned(), 2, 1), ("f".to_owned(), 7, 2)]);
    assert!(source.code.contains("let r#type") && !source.code.contains("mod tests"));
}
