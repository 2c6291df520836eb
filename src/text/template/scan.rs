//! A first look at a chat template before the template engine parses it.
//!
//! Enforces the limits that keep parsing bounded, refuses tags that would load other templates, and turns the
//! `generation` tag of chat templates into a plain scope. Knows tags, strings, comments and raw blocks, not expressions.

use crate::error::{Result, bail};

/// Longest template source, in bytes.
const MAX_SOURCE: usize = 1 << 20;
/// Most code bytes (white space and string literals not counted) in one tag: bounds the depth of operator chains.
const MAX_TAG_CODE: usize = 16 << 10;
/// Most `elif` tags in a template: each nests one level deeper for the parser.
const MAX_ELIF: usize = 1000;

/// Checks `source` and returns it with `generation` tags as `with` tags, every other byte and line unchanged.
pub(super) fn prepare(source: &str) -> Result<String> {
    if source.len() > MAX_SOURCE {
        bail!(
            Template,
            "the template has {} bytes, at most {MAX_SOURCE} are allowed",
            source.len()
        );
    }
    let mut out = String::with_capacity(source.len());
    let (mut copied, mut pos, mut elifs) = (0, 0, 0);
    while let Some(at) = find_open(source, pos) {
        let after = at + 2;
        let body = &source[after..];
        match source.as_bytes()[at + 1] {
            // What is not closed is left to the parser, which names it.
            b'#' => match body.find("#}") {
                Some(end) => pos = after + end + 2,
                None => break,
            },
            b'{' => match close(body, "}}").map_err(|code| too_long(source, at, code))? {
                Some(end) => pos = after + end + 2,
                None => break,
            },
            _ => {
                let name_at = after + body.len() - body.trim_start_matches(['-', '+']).trim_start().len();
                let rest = &source[name_at..];
                let name = &rest[..rest
                    .find(|c: char| !(c.is_alphanumeric() || c == '_'))
                    .unwrap_or(rest.len())];
                let line = || line_of(source, at);
                match name {
                    "raw" => {
                        match end_of_raw(source, name_at) {
                            Some(end) => pos = end,
                            None => break,
                        }
                        continue;
                    }
                    "include" | "import" | "from" | "extends" => {
                        bail!(
                            Template,
                            "line {}: '{name}' is refused, a chat template stands alone",
                            line()
                        );
                    }
                    "elif" => elifs += 1,
                    _ => {}
                }
                if elifs > MAX_ELIF {
                    bail!(Template, "line {}: more than {MAX_ELIF} 'elif' tags", line());
                }
                let Some(end) = close(body, "%}").map_err(|code| too_long(source, at, code))? else {
                    break;
                };
                pos = after + end + 2;
                if let "generation" | "endgeneration" = name {
                    let arguments = source[name_at + name.len()..after + end]
                        .trim_end_matches(['-', '+'])
                        .trim();
                    if !arguments.is_empty() {
                        bail!(
                            Template,
                            "line {}: '{name}' takes no arguments, found '{arguments}'",
                            line()
                        );
                    }
                    out.push_str(&source[copied..name_at]);
                    out.push_str(if name == "generation" { "with" } else { "endwith" });
                    copied = name_at + name.len();
                }
            }
        }
    }
    out.push_str(&source[copied..]);
    Ok(out)
}

fn too_long(source: &str, at: usize, code: usize) -> crate::Error {
    let line = line_of(source, at);
    crate::Error::new(
        crate::Kind::Template,
        format!("line {line}: a tag holds more than {code} bytes of code, at most {MAX_TAG_CODE} are allowed"),
    )
}

fn line_of(source: &str, at: usize) -> usize {
    source.as_bytes()[..at].iter().filter(|&&b| b == b'\n').count() + 1
}

/// Where the next `{{`, `{%` or `{#` starts.
fn find_open(source: &str, from: usize) -> Option<usize> {
    let bytes = source.as_bytes();
    (from..bytes.len().saturating_sub(1)).find(|&i| bytes[i] == b'{' && matches!(bytes[i + 1], b'{' | b'%' | b'#'))
}

/// Where in `body` the tag ends (at `end`, outside of strings and brackets); `Err` with the bytes of code when too many.
fn close(body: &str, end: &str) -> Result<Option<usize>, usize> {
    let bytes = body.as_bytes();
    let (mut i, mut depth, mut code) = (0, 0usize, 0);
    while i < bytes.len() {
        if depth == 0 && bytes[i..].starts_with(end.as_bytes()) {
            return Ok(Some(i));
        }
        match bytes[i] {
            quote @ (b'"' | b'\'') => {
                i += 1;
                while i < bytes.len() && bytes[i] != quote {
                    i += if bytes[i] == b'\\' { 2 } else { 1 };
                }
            }
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if bytes.get(i).is_some_and(|b| !b.is_ascii_whitespace()) {
            code += 1;
            if code > MAX_TAG_CODE {
                return Err(code - 1);
            }
        }
        i += 1;
    }
    Ok(None)
}

/// Where the text after the `endraw` tag starts.
fn end_of_raw(source: &str, from: usize) -> Option<usize> {
    let mut pos = from;
    while let Some(open) = source[pos..].find("{%").map(|i| pos + i + 2) {
        let rest = source[open..].trim_start_matches(['-', '+']).trim_start();
        if let Some(tail) = rest.strip_prefix("endraw") {
            let tail = tail.trim_start().trim_start_matches(['-', '+']);
            if let Some(text) = tail.strip_prefix("%}") {
                return Some(source.len() - text.len());
            }
        }
        pos = open;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_real_generation_tags_become_scopes() {
        let source = "{% raw %}{% generation %}{% endraw %}{# {% generation %} #}{{ '{% generation %}' }}\n\
                      {%- generation -%}x{% endgeneration +%}";
        let expected = "{% raw %}{% generation %}{% endraw %}{# {% generation %} #}{{ '{% generation %}' }}\n\
                        {%- with -%}x{% endwith +%}";
        assert_eq!(prepare(source).unwrap(), expected);
    }

    #[test]
    fn tags_that_load_templates_and_oversized_sources_are_refused() {
        for tag in ["include 'x'", "import 'x' as y", "from 'x' import y", "extends 'x'"] {
            let err = prepare(&format!("\n\n{{%- {tag} %}}")).unwrap_err();
            assert!(err.message.starts_with("line 3: "), "{err}");
        }
        assert!(prepare(&" ".repeat(MAX_SOURCE)).is_ok());
        assert!(prepare(&" ".repeat(MAX_SOURCE + 1)).is_err());
        assert!(prepare(&format!("{{{{ {} x }}}}", "not ".repeat(6000))).is_err());
        assert!(prepare(&format!("{{{{ '{}' }}}}", "long text ".repeat(6000))).is_ok());
        assert!(prepare(&"{% elif x %}".repeat(MAX_ELIF + 1)).is_err());
    }
}
