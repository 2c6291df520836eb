//! The structure of the source tree, read as text: which way dependencies point, sizes, and what may be used where.
//!
//! A list of exceptions names what is still to be changed. An entry that is no longer needed fails the test as well, so that
//! the lists only shrink.

mod imports;
mod source;

use cmf_gpu::op::Kernel;
use imports::{Crate, cycles, shortest};
use source::{files, functions, sources};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Lines of the longest file.
const MAX_LINES: usize = 800;

/// Lines of the longest function.
const MAX_FUNCTION_LINES: usize = 150;

/// Functions that are longer.
const LONG_FUNCTIONS: &[(&str, &str)] = &[
    ("tests/container/malformed.rs", "directory"),
    ("tests/container/malformed_header.rs", "arch_values"),
];

/// Modules whose files import each other in circles.
const CYCLES: &[&str] = &[];

/// All environment variables that the program reads. A configuration file holds other settings.
const ENVIRONMENT: &[&str] = &[
    "CMF_GPU_DEVICE",
    "CMF_GPU_CTX",
    "CMF_GPU_KV",
    "CMF_GPU_VRAM_MB",
    "CMF_GPU_MODEL",
    "CMF_GPU_API_KEY",
    "CMF_GPU_CONFIG",
    "CMF_GPU_LOG",
];

/// Files that read other environment variables.
const OTHER_ENVIRONMENT: &[&str] = &[];

/// Files of the library with command-line flags in their texts.
const FLAGS_IN_TEXTS: &[&str] = &[];

/// The modules that each module may use. A module without a line is an error.
const MODULES: &[(&str, &[&str])] = &[
    ("error", &[]),
    ("dtype", &["error"]),
    ("format", &["dtype", "error"]),
    ("import", &["dtype", "error", "format"]),
    ("source", &["dtype", "error", "format", "import"]),
    ("sampling", &["error"]),
    ("text", &["error"]),
    ("convert", &["dtype", "error", "format", "import", "source", "text"]),
    ("tools", &["convert", "dtype", "error", "format", "source"]),
    ("model", &["dtype", "error", "source"]),
    ("op", &["dtype", "error", "sampling"]),
    ("shader", &["dtype", "op"]),
    // A graph knows no network.
    ("graph", &["dtype", "error", "op", "source"]),
    ("lm", &["dtype", "error", "graph", "model", "op", "sampling", "source"]),
    ("image", &["dtype", "error", "graph", "lm", "model", "op", "source"]),
    // The executors do not know each other.
    ("gpu", &["dtype", "error", "graph", "op", "shader", "source"]),
    ("host", &["dtype", "error", "graph", "op", "source"]),
    (
        "parity",
        &[
            "dtype", "error", "gpu", "graph", "host", "lm", "op", "sampling", "source",
        ],
    ),
    ("routing", &["error", "source"]),
    ("synthetic", &["dtype", "error", "source"]),
];

/// Modules that may use all of these: the public API and the command line.
const FACADES: &[&str] = &["lib", "main", "cli", "engine", "options", "notice", "budget"];

/// `src/gpu/exec.rs` and `src/gpu.rs` are in `gpu`.
fn module(file: &str) -> &str {
    let inside = file.strip_prefix("src/").unwrap();
    let first = inside.split('/').next().unwrap();
    first.strip_suffix(".rs").unwrap_or(first)
}

/// Modules that a text names as `crate::module`, in braces too.
fn named_modules(code: &str) -> Vec<String> {
    let mut modules = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        let boundary = code[..at].chars().next_back();
        if boundary.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == '$') {
            continue;
        }
        let rest = &code[at + "crate::".len()..];
        match rest.strip_prefix('{') {
            None => modules.push(source::word(rest).to_owned()),
            Some(list) => {
                // Names at the outermost level of the braces.
                let mut depth = 0;
                let mut item = String::new();
                for c in list.chars() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => modules.push(source::word(std::mem::take(&mut item).trim()).to_owned()),
                        c if depth == 0 => item.push(c),
                        _ => {}
                    }
                }
                modules.push(source::word(item.trim()).to_owned());
            }
        }
    }
    modules.retain(|module| !module.is_empty());
    // Names that lib.rs exports from the module `error`.
    for module in &mut modules {
        if ["Error", "Kind", "Result", "bail"].contains(&module.as_str()) {
            *module = "error".into();
        }
    }
    modules
}

/// Fails with the findings that are no exceptions, and with the exceptions that were not found.
fn check<T: Ord + std::fmt::Debug>(rule: &str, found: &BTreeMap<T, String>, exceptions: &[T]) {
    let new: Vec<_> = found.iter().filter(|(key, _)| !exceptions.contains(key)).collect();
    let new: String = new.iter().map(|(_, text)| format!("  {text}\n")).collect();
    assert!(new.is_empty(), "{rule}:\n{new}");
    let unused: Vec<_> = exceptions.iter().filter(|key| !found.contains_key(key)).collect();
    assert!(
        unused.is_empty(),
        "{rule}: delete these entries from the list of exceptions, nothing breaks the rule there any more: {unused:?}"
    );
}

#[test]
fn module_names_are_read_from_paths_and_braces() {
    let code =
        "use crate::error::{Result, bail};\nuse crate::{gpu::{A, B}, op::C};\nlet x = crate::model::y(); my_crate::no";
    assert_eq!(named_modules(code), ["error", "gpu", "op", "model"]);
}

#[test]
fn dependencies_between_modules_point_one_way() {
    let modules: BTreeMap<_, _> = MODULES.iter().copied().collect();
    // The table has no cycle: a module uses only modules above it.
    let mut above: Vec<&str> = Vec::new();
    for (module, uses) in MODULES {
        for used in *uses {
            assert!(above.contains(used), "{module} must be below {used} in the table");
        }
        above.push(module);
    }
    let mut wrong = Vec::new();
    for (file, source) in sources("src") {
        let own = module(&file);
        if FACADES.contains(&own) {
            continue;
        }
        let Some(may) = modules.get(own) else {
            wrong.push(format!("{file}: the table has no line for this module"));
            continue;
        };
        for used in named_modules(&source.code) {
            if used != own && !may.contains(&used.as_str()) {
                wrong.push(format!("{file} uses crate::{used}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn files_of_a_module_do_not_import_each_other_in_circles() {
    let mut found: BTreeMap<String, String> = BTreeMap::new();
    for root in ["src", "kernels-ref/src"] {
        let edges = Crate::new(root, &sources(root)).edges();
        assert!(edges.len() > 10, "{root}: {edges:?}");
        for circle in cycles(&edges) {
            let names: Vec<&str> = circle.iter().map(String::as_str).collect();
            let way = shortest(&circle, &edges).into_iter();
            let way: Vec<String> = way
                .map(|edge| format!("\n      {}:{} imports from {}", edge.from, edge.line, edge.to))
                .collect();
            let text = format!(
                "{} files: {}; the shortest circle:{}",
                names.len(),
                names.join(" "),
                way.concat()
            );
            let inside = names[0].strip_prefix(root).unwrap().trim_start_matches('/');
            let own = inside.split(['/', '.']).next().unwrap().to_owned();
            let texts = found.entry(own).or_default();
            texts.push_str(if texts.is_empty() { "" } else { "\n  " });
            texts.push_str(&text);
        }
    }
    let exceptions: Vec<String> = CYCLES.iter().map(|module| (*module).to_owned()).collect();
    check("import cycles", &found, &exceptions);
}

/// Files whose code contains `text` outside of the given places.
fn strays(text: &str, allowed: &[&str]) -> Vec<String> {
    let all = sources("src").into_iter().chain(sources("kernels-ref/src"));
    all.filter(|(file, source)| source.code.contains(text) && !allowed.iter().any(|place| file.starts_with(place)))
        .map(|(file, _)| file)
        .collect()
}

#[test]
fn only_certain_modules_use_the_device_the_environment_the_streams_and_unsafe_code() {
    assert_eq!(strays("wgpu::", &["src/gpu/"]), [""; 0]);
    assert_eq!(strays("std::env", &["src/cli", "src/main.rs"]), [""; 0]);
    assert_eq!(strays("println!", &["src/cli", "src/main.rs"]), [""; 0]);
    assert_eq!(strays("process::exit", &["src/cli", "src/main.rs"]), [""; 0]);
    for word in ["unsafe {", "unsafe fn", "unsafe impl", "unsafe_code"] {
        assert_eq!(
            strays(word, &["src/format/", "src/gpu/", "kernels-ref/src/lib.rs"]),
            [""; 0]
        );
    }
    // The search finds what it looks for.
    assert!(!strays("wgpu::", &[]).is_empty() && !strays("unsafe {", &[]).is_empty());
}

#[test]
fn the_program_reads_at_most_eight_environment_variables() {
    assert!(ENVIRONMENT.len() <= 8);
    let mut found: BTreeMap<String, String> = BTreeMap::new();
    for (file, source) in sources("src") {
        for (line, text) in &source.strings {
            for (at, prefix) in text.match_indices("CMF_GPU_") {
                let name = format!("{prefix}{}", source::word(&text[at + prefix.len()..]));
                if name != prefix && !ENVIRONMENT.contains(&name.as_str()) {
                    let texts = found.entry(file.clone()).or_insert_with(|| format!("{file}:"));
                    texts.push_str(&format!(" {name} (line {line})"));
                }
            }
        }
    }
    let exceptions: Vec<String> = OTHER_ENVIRONMENT.iter().map(|file| (*file).to_owned()).collect();
    check("environment variables outside of the list", &found, &exceptions);
}

/// Whether a text has a command-line flag in it.
fn names_a_flag(text: &str) -> bool {
    let mut found = text.match_indices("--");
    found.any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + 2..].chars().next();
        !before.is_some_and(|c| c.is_alphanumeric() || c == '-') && after.is_some_and(|c| c.is_ascii_lowercase())
    })
}

#[test]
fn texts_of_the_library_name_no_command_line_flags() {
    assert!(names_a_flag("a smaller --ctx would help") && !names_a_flag("a -- b --- c x--y --1"));
    let mut found: BTreeMap<String, String> = BTreeMap::new();
    for (file, source) in sources("src") {
        if ["cli", "main"].contains(&module(&file)) {
            continue;
        }
        for (line, text) in source.strings.iter().filter(|(_, text)| names_a_flag(text)) {
            let texts = found.entry(file.clone()).or_default();
            texts.push_str(&format!("{file}:{line}: {text} "));
        }
    }
    let exceptions: Vec<String> = FLAGS_IN_TEXTS.iter().map(|file| (*file).to_owned()).collect();
    check("command-line flags in texts of the library", &found, &exceptions);
}

#[test]
fn unsafe_code_states_its_guarantees() {
    for (file, text) in files("src", "rs") {
        let lines: Vec<&str> = text.lines().collect();
        for (i, _) in lines.iter().enumerate().filter(|(_, line)| line.contains("unsafe {")) {
            let above = lines[i.saturating_sub(6)..i].join("\n");
            assert!(
                above.contains("// SAFETY:"),
                "{file}:{}: no SAFETY comment above",
                i + 1
            );
        }
    }
}

#[test]
fn every_operator_has_a_shader_and_a_rust_file() {
    let stem = |file: &String| Path::new(file).file_stem().unwrap().to_str().unwrap().to_string();
    let shaders: BTreeSet<String> = files("shaders/op", "wgsl").keys().map(stem).collect();
    let operators: BTreeSet<String> = Kernel::ALL.iter().map(|kernel| kernel.spec().name.to_owned()).collect();
    assert_eq!(shaders, operators);
    // The Rust file has the same name.
    let rust: BTreeSet<String> = files("src/op", "rs").keys().map(stem).collect();
    assert!(rust.is_superset(&operators), "{:?}", operators.difference(&rust));
}

#[test]
fn no_file_is_too_long() {
    let trees = [
        ("src", "rs"),
        ("kernels-ref", "rs"),
        ("tests", "rs"),
        ("shaders", "wgsl"),
    ];
    for (dir, extension) in trees {
        for (file, text) in files(dir, extension) {
            let lines = text.lines().count();
            assert!(
                lines <= MAX_LINES,
                "{file} has {lines} lines, at most {MAX_LINES} are allowed"
            );
        }
    }
}

#[test]
fn no_function_is_too_long() {
    let mut found = BTreeMap::new();
    for (file, source) in ["src", "kernels-ref/src", "tests"].iter().flat_map(|dir| sources(dir)) {
        for (name, line, lines) in functions(&source.code) {
            if lines > MAX_FUNCTION_LINES {
                let text = format!("{file}:{line}: {name} has {lines} lines, at most {MAX_FUNCTION_LINES} are allowed");
                found.insert((file.clone(), name), text);
            }
        }
    }
    let exceptions: Vec<_> = LONG_FUNCTIONS
        .iter()
        .map(|(file, name)| ((*file).to_owned(), (*name).to_owned()))
        .collect();
    check("long functions", &found, &exceptions);
}

#[test]
fn every_source_file_begins_with_its_contents() {
    for (file, text) in files("src", "rs").into_iter().chain(files("kernels-ref/src", "rs")) {
        assert!(
            text.starts_with("//! "),
            "{file} does not begin with a comment on its contents"
        );
    }
}
