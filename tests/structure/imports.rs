//! Which file of a module imports which other one, read from `use` and from paths in the code.

use crate::source::{Source, word};
use std::collections::{BTreeMap, BTreeSet};

/// A module's path below the crate, as in `["lm", "lower"]`.
type Path = Vec<String>;

/// One name that a `use` brings into a file.
#[derive(Clone, Debug, PartialEq)]
struct Import {
    path: Path,
    /// The name in this file; `*` for all names.
    name: String,
    public: bool,
    at: usize,
}

struct File {
    /// Path in the repository.
    name: String,
    imports: Vec<Import>,
    /// Modules that it declares.
    children: BTreeSet<String>,
    /// Names of items that it defines.
    items: BTreeSet<String>,
    code: String,
}

/// A file, a line in it, and the file that the line imports from.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Edge {
    pub from: String,
    pub line: usize,
    pub to: String,
}

/// All files of a crate by module path.
pub struct Crate {
    files: BTreeMap<Path, File>,
}

impl Crate {
    /// The crate whose sources, by path in the repository, lie under `root`.
    pub fn new(root: &str, sources: &BTreeMap<String, Source>) -> Crate {
        let files = sources.iter().map(|(name, source)| {
            let inside = name.strip_prefix(root).unwrap_or(name).trim_start_matches('/');
            let inside = inside.strip_suffix(".rs").unwrap_or(inside);
            let mut path: Path = inside.split('/').map(str::to_owned).collect();
            if path.last().is_some_and(|last| last == "mod") || path == ["lib"] {
                path.pop();
            }
            let (imports, code) = imports(&source.code);
            let file = File {
                name: name.clone(),
                imports,
                children: declared(&code, &["mod"]).into_iter().collect(),
                items: declared(
                    &code,
                    &["fn", "struct", "enum", "trait", "const", "static", "type", "union"],
                )
                .into_iter()
                .collect(),
                code,
            };
            (path, file)
        });
        Crate { files: files.collect() }
    }

    /// Imports between files of the same top-level module. A parent that re-exports a name of a child and does not use it
    /// itself does not import the child; a file that imports the name from the parent imports the child.
    pub fn edges(&self) -> BTreeSet<Edge> {
        let mut edges = BTreeSet::new();
        for (own, file) in &self.files {
            let mut add = |path: &Path, at: usize, reexport: Option<&str>| {
                let Some(target) = self.resolve(own, path, 0) else {
                    return;
                };
                let same = !own.is_empty() && own.first() == target.first();
                let uses = |name: &str| match name {
                    "*" => self.files[&target].items.iter().any(|item| has_word(&file.code, item)),
                    name => has_word(&file.code, name),
                };
                let unused = target.starts_with(own) && reexport.is_some_and(|name| !uses(name));
                if target != *own && same && !unused {
                    edges.insert(Edge {
                        from: file.name.clone(),
                        line: file.code[..at].matches('\n').count() + 1,
                        to: self.files[&target].name.clone(),
                    });
                }
            };
            for Import { path, name, public, at } in &file.imports {
                add(path, *at, public.then_some(name));
            }
            for (path, at) in paths(file) {
                add(&path, at, None);
            }
        }
        edges
    }

    /// The module in which the thing at `path`, as written in the module `own`, is defined. None outside of the crate.
    fn resolve(&self, own: &Path, path: &[String], depth: usize) -> Option<Path> {
        let (first, mut rest) = path.split_first()?;
        let file = self.files.get(own)?;
        let mut base = match first.as_str() {
            "crate" => Vec::new(),
            "self" => own.clone(),
            "super" => own[..own.len().checked_sub(1)?].to_vec(),
            child if file.children.contains(child) => [own.as_slice(), &path[..1]].concat(),
            name if depth < 8 => {
                // A module that was imported by name.
                let import = file.imports.iter().find(|import| import.name == name)?;
                let module = self.resolve(own, &import.path, depth + 1)?;
                (module.last()? == name).then_some(module)?
            }
            _ => return None,
        };
        while let Some((first, more)) = rest.split_first() {
            match first.as_str() {
                "self" => {}
                "super" => drop(base.pop()?),
                name => {
                    let mut below = base.clone();
                    below.push(name.to_owned());
                    if !self.files.contains_key(&below) {
                        break;
                    }
                    base = below;
                }
            }
            rest = more;
        }
        let file = self.files.get(&base)?;
        let Some(name) = rest.first().filter(|name| *name != "*") else {
            return Some(base);
        };
        if depth >= 8 || file.items.contains(name) {
            return Some(base);
        }
        // A name that the module itself imports is defined elsewhere.
        let named = file.imports.iter().filter(|import| import.name == *name);
        let globs = file.imports.iter().filter(|import| import.name == "*");
        let from_globs = globs.filter_map(|import| {
            let module = self.resolve(&base, &import.path, depth + 1)?;
            self.files[&module].items.contains(name).then_some(module)
        });
        let found = named.filter_map(|import| self.resolve(&base, &import.path, depth + 1));
        found.chain(from_globs).next().or(Some(base))
    }
}

/// The `use` declarations of a file, and the code without them.
fn imports(code: &str) -> (Vec<Import>, String) {
    let (mut found, mut rest) = (Vec::new(), code.to_owned());
    for (at, _) in code.match_indices("use ") {
        let before = &code[..at];
        let line = before.rsplit('\n').next().unwrap_or("").trim();
        if !(line.is_empty() || line.starts_with("pub") || line.ends_with(['{', '}', ';'])) {
            continue;
        }
        let end = code[at..].find(';').map_or(code.len(), |length| at + length);
        let tree: String = code[at + 4..end].split_whitespace().collect::<Vec<_>>().join(" ");
        let mut names = Vec::new();
        flatten(&tree, &[], &mut names);
        let public = line.starts_with("pub");
        found.extend(names.into_iter().map(|(path, name)| Import { path, name, public, at }));
        let blank: String = code[at..end]
            .bytes()
            .map(|b| if b == b'\n' { '\n' } else { ' ' })
            .collect();
        rest.replace_range(at..end, &blank);
    }
    (found, rest)
}

/// The paths of a use tree with the names that they get.
fn flatten(tree: &str, prefix: &[String], found: &mut Vec<(Path, String)>) {
    let tree = tree.trim().trim_start_matches("::");
    if let Some(open) = tree.find('{') {
        let parts = tree[..open].split("::").map(str::trim).filter(|part| !part.is_empty());
        let prefix: Path = prefix.iter().cloned().chain(parts.map(str::to_owned)).collect();
        let inner = tree[open + 1..].trim_end().trim_end_matches('}');
        // `trim_end_matches` may take the braces of an inner group: give them back.
        let missing = inner.matches('{').count() - inner.matches('}').count();
        let inner = format!("{inner}{}", "}".repeat(missing));
        let (mut depth, mut begin) = (0, 0);
        for (i, c) in inner.char_indices().chain([(inner.len(), ',')]) {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    flatten(&inner[begin..i], &prefix, found);
                    begin = i + 1;
                }
                _ => {}
            }
        }
    } else if !tree.is_empty() {
        let (path, alias) = tree.split_once(" as ").unwrap_or((tree, ""));
        let parts = path.split("::").map(|part| part.trim().to_owned());
        let mut path: Path = prefix.iter().cloned().chain(parts).collect();
        if path.last().is_some_and(|last| last == "self") && path.len() > 1 {
            path.pop();
        }
        let name = if alias.is_empty() {
            path[path.len() - 1].clone()
        } else {
            alias.trim().to_owned()
        };
        found.push((path, name));
    }
}

/// Names that follow one of these keywords.
fn declared(code: &str, keywords: &[&str]) -> Vec<String> {
    let mut names = Vec::new();
    for keyword in keywords {
        for (at, _) in code.match_indices(&format!("{keyword} ")) {
            let inside = code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
            let name = word(code[at + keyword.len()..].trim_start());
            if !inside && !name.is_empty() {
                names.push(name.to_owned());
            }
        }
    }
    names
}

/// Whether a text has this identifier in it.
fn has_word(code: &str, name: &str) -> bool {
    let mut found = code.match_indices(name);
    let part = |c: char| c.is_alphanumeric() || c == '_';
    found.any(|(at, _)| !code[..at].ends_with(part) && !code[at + name.len()..].starts_with(part))
}

/// Paths in the code that begin with `crate`, `self`, `super` or a declared module.
fn paths(file: &File) -> Vec<(Path, usize)> {
    let code = &file.code;
    let mut found = Vec::new();
    let mut past = 0;
    for (at, _) in code.match_indices("::") {
        if at < past {
            continue;
        }
        let begin = code[..at]
            .rfind(|c: char| !c.is_alphanumeric() && c != '_')
            .map_or(0, |i| i + 1);
        let mut path = vec![code[begin..at].to_owned()];
        let mut end = at;
        while code[end..].starts_with("::") {
            let next = word(&code[end + 2..]);
            if next.is_empty() {
                break;
            }
            path.push(next.to_owned());
            end += 2 + next.len();
        }
        past = end;
        let first = path[0].as_str();
        if ["crate", "self", "super"].contains(&first) || file.children.contains(first) {
            found.push((path, begin));
        }
    }
    found
}

/// The sets of files that import each other in a circle.
pub fn cycles(edges: &BTreeSet<Edge>) -> Vec<BTreeSet<String>> {
    let mut next: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for edge in edges {
        next.entry(&edge.from).or_default().insert(&edge.to);
    }
    let reached = |start: &str| -> BTreeSet<String> {
        let (mut seen, mut todo) = (BTreeSet::new(), vec![start]);
        while let Some(file) = todo.pop() {
            for to in next.get(file).into_iter().flatten() {
                if seen.insert((*to).to_owned()) {
                    todo.push(to);
                }
            }
        }
        seen
    };
    let all: BTreeMap<&str, BTreeSet<String>> = next.keys().map(|file| (*file, reached(file))).collect();
    let mut found: Vec<BTreeSet<String>> = Vec::new();
    for (file, reached) in &all {
        let circle: BTreeSet<String> = reached
            .iter()
            .filter(|to| all.get(to.as_str()).is_some_and(|back| back.contains(*file)))
            .cloned()
            .collect();
        if !circle.is_empty() && !found.contains(&circle) {
            found.push(circle);
        }
    }
    found
}

/// The shortest circle of imports within a set of files.
pub fn shortest(circle: &BTreeSet<String>, edges: &BTreeSet<Edge>) -> Vec<Edge> {
    let inside: Vec<&Edge> = edges
        .iter()
        .filter(|edge| circle.contains(&edge.from) && circle.contains(&edge.to))
        .collect();
    let from = |start: &String| -> Option<Vec<Edge>> {
        let mut ways: Vec<Vec<&Edge>> = inside
            .iter()
            .filter(|edge| edge.from == *start)
            .map(|edge| vec![*edge])
            .collect();
        let mut seen = BTreeSet::new();
        while !ways.is_empty() {
            let mut longer = Vec::new();
            for way in ways {
                let last = &way[way.len() - 1].to;
                if last == start {
                    return Some(way.into_iter().cloned().collect());
                }
                if seen.insert(last) {
                    let more = inside.iter().filter(|edge| edge.from == *last);
                    longer.extend(more.map(|edge| [way.as_slice(), &[*edge]].concat()));
                }
            }
            ways = longer;
        }
        None
    };
    circle.iter().filter_map(from).min_by_key(Vec::len).unwrap_or_default()
}

#[cfg(test)]
fn edges_of(files: &[(&str, &str)]) -> Vec<(String, String)> {
    let sources = files
        .iter()
        .map(|(name, text)| (format!("src/{name}"), Source::new(text)));
    let edges = Crate::new("src", &sources.collect()).edges();
    let short = |name: &str| name.strip_prefix("src/").unwrap().to_owned();
    edges.iter().map(|edge| (short(&edge.from), short(&edge.to))).collect()
}

#[test]
fn imports_are_found_in_uses_and_in_paths() {
    let lib = ("lib.rs", "pub mod a;\npub mod b;");
    let found = edges_of(&[
        lib,
        (
            "a/mod.rs",
            "mod x;\nmod y;\npub use x::X;\nstruct Own;\nfn f() { y::g() }",
        ),
        (
            "a/x.rs",
            "use super::{Own, y::{self, Y as Z}};\nuse crate::b::B;\npub struct X;",
        ),
        ("a/y.rs", "use super::X;\npub struct Y;\npub fn g() { super::x::h() }"),
        ("b.rs", "pub struct B;\nuse std::fmt;"),
    ]);
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    // The re-export of X is no import of x.rs; who takes X from there imports x.rs.
    assert_eq!(
        found,
        [
            pair("a/mod.rs", "a/y.rs"),
            pair("a/x.rs", "a/mod.rs"),
            pair("a/x.rs", "a/y.rs"),
            pair("a/y.rs", "a/x.rs"),
            pair("a/y.rs", "a/x.rs"),
        ]
    );
}

#[test]
fn circles_are_found_and_trees_are_none() {
    let edge = |from: &str, to: &str| Edge {
        from: from.into(),
        line: 1,
        to: to.into(),
    };
    let tree: BTreeSet<Edge> = [edge("a", "b"), edge("a", "c"), edge("b", "c")].into();
    assert!(cycles(&tree).is_empty());
    let mut circle = tree.clone();
    circle.extend([edge("c", "d"), edge("d", "b"), edge("d", "a")]);
    let found = cycles(&circle);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].len(), 4);
    let way = shortest(&found[0], &circle);
    assert_eq!(way.len(), 3);
    assert_eq!(way[0].from, way[2].to);
}
