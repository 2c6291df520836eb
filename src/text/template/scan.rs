//! Checks the source of a chat template before minijinja parses it, and prepares it.
//!
//! Enforces the limits that keep parsing bounded, refuses tags that load other templates, turns the `generation` tag
//! of chat templates into a plain scope, and inserts the filters of [`harden`].

use super::harden;
use super::lexer::{Code, lex, line_of};
use crate::error::{Result, bail};
use std::ops::Range;

/// Longest template source, in bytes.
const MAX_SOURCE: usize = 1 << 20;
/// Most `elif` tags in a template. The parser nests one level deeper for each.
const MAX_ELIF: usize = 1000;

/// Checks `source` and returns it with `generation` tags as `with` tags and with the filters of [`harden`]. Lines
/// keep their numbers.
pub(super) fn prepare(source: &str) -> Result<String> {
    if source.len() > MAX_SOURCE {
        bail!(
            Template,
            "the template has {} bytes, expected at most {MAX_SOURCE}",
            source.len()
        );
    }
    let mut scan = Scan {
        source,
        elifs: 0,
        edits: Vec::new(),
    };
    let mut at = 0;
    while let Some(open) = find_open(source, at) {
        // minijinja's parser reports a tag without an end.
        let Some(end) = scan.tag(open)? else { break };
        at = end;
    }
    Ok(scan.edited())
}

struct Scan<'a> {
    source: &'a str,
    elifs: usize,
    /// Ranges of the source, in order, and their new text.
    edits: Vec<(Range<usize>, String)>,
}

impl Scan<'_> {
    /// Handles the comment, expression or statement that starts at `open`. Returns the offset of its end; `None` if
    /// it has none.
    fn tag(&mut self, open: usize) -> Result<Option<usize>> {
        let source = self.source;
        let start = open + 2;
        match source.as_bytes()[open + 1] {
            b'#' => Ok(source[start..].find("#}").map(|length| start + length + 2)),
            b'{' => {
                let Some(code) = lex(source, start, "}}")? else {
                    return Ok(None);
                };
                self.harden(&code, 0, "");
                Ok(Some(code.end + 2))
            }
            _ => self.statement(open),
        }
    }

    fn statement(&mut self, open: usize) -> Result<Option<usize>> {
        let source = self.source;
        let name = {
            let rest = source[open + 2..].trim_start_matches(['-', '+']).trim_start();
            &rest[..rest
                .find(|c: char| !(c.is_alphanumeric() || c == '_'))
                .unwrap_or(rest.len())]
        };
        match name {
            "raw" => return Ok(end_of_raw(source, open + 2)),
            "include" | "import" | "from" | "extends" => bail!(
                Template,
                "line {}: '{name}' is not allowed: a chat template cannot load other templates",
                line_of(source, open)
            ),
            "elif" => self.elifs += 1,
            _ => {}
        }
        if self.elifs > MAX_ELIF {
            let line = line_of(source, open);
            bail!(Template, "line {line}: more than {MAX_ELIF} 'elif' tags");
        }
        let Some(code) = lex(source, open + 2, "%}")? else {
            return Ok(None);
        };
        match (name, &code.tokens[..]) {
            ("generation" | "endgeneration", [only]) => {
                let scope = if name == "generation" { "with" } else { "endwith" };
                self.edits.push((only.start..only.end(), scope.to_string()));
            }
            ("generation" | "endgeneration", [_, argument, ..]) => bail!(
                Template,
                "line {}: '{name}' takes no arguments, found '{}'",
                line_of(source, open),
                argument.text
            ),
            _ => self.harden(&code, 1, name),
        }
        Ok(Some(code.end + 2))
    }

    /// Adds the insertions for a tag whose code begins after `name_tokens` tokens.
    fn harden(&mut self, code: &Code, name_tokens: usize, name: &str) {
        let tokens = code.tokens.get(name_tokens..).unwrap_or_default();
        let insertions = harden::insertions(tokens, name).into_iter();
        self.edits.extend(insertions.map(|(at, text)| (at..at, text)));
    }

    fn edited(self) -> String {
        let mut out = String::with_capacity(self.source.len());
        let mut copied = 0;
        for (range, text) in self.edits {
            out.push_str(&self.source[copied..range.start]);
            out.push_str(&text);
            copied = range.end;
        }
        out.push_str(&self.source[copied..]);
        out
    }
}

/// The offset of the next `{{`, `{%` or `{#`.
fn find_open(source: &str, from: usize) -> Option<usize> {
    let bytes = source.as_bytes();
    (from..bytes.len().saturating_sub(1)).find(|&i| bytes[i] == b'{' && matches!(bytes[i + 1], b'{' | b'%' | b'#'))
}

/// The offset after the next `endraw` tag.
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
