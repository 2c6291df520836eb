//! The rooms of the source tree, read as text: which way dependencies point, and what may be said where.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Lines of the longest file.
const MAX_LINES: usize = 800;

/// What each room may use. A room that is not here is an error, so that a new one gets a line.
const ROOMS: &[(&str, &[&str])] = &[
    ("error", &[]),
    ("dtype", &["error"]),
    ("container", &["dtype", "error"]),
    ("kernel", &["dtype", "error"]),
    ("shader", &["dtype", "error", "kernel"]),
    ("sampling", &["error"]),
    ("text", &["container", "error"]),
    ("model", &["container", "dtype", "error"]),
    ("convert", &["container", "dtype", "error"]),
    ("tools", &["container", "convert", "dtype", "error"]),
    (
        "program",
        &["container", "dtype", "error", "kernel", "model", "sampling"],
    ),
    // Both executors know programs and bytes, and not each other.
    ("gpu", &["container", "dtype", "error", "kernel", "program", "shader"]),
    (
        "host",
        &["container", "dtype", "error", "kernel", "program", "sampling"],
    ),
    // Tensors only in the signature of an executor that its tests make up.
    ("session", &["container", "error", "program", "sampling"]),
    (
        "parity",
        &[
            "container",
            "dtype",
            "error",
            "gpu",
            "host",
            "kernel",
            "program",
            "sampling",
        ],
    ),
    ("routing", &["container", "error"]),
    ("synthetic", &["container", "dtype", "error"]),
];

/// Rooms that may use everything above them: the façade and the command line.
const FACADES: &[&str] = &["lib", "main", "cli", "engine", "options", "budget"];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Files under `dir` with this extension, by path relative to the repository.
fn files(dir: &str, extension: &str) -> BTreeMap<String, String> {
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

/// `src/gpu/exec.rs` and `src/gpu.rs` are in `gpu`.
fn room(file: &str) -> &str {
    let inside = file.strip_prefix("src/").unwrap();
    let first = inside.split('/').next().unwrap();
    first.strip_suffix(".rs").unwrap_or(first)
}

/// The code without its tests and comments, since tests may look further.
fn code(text: &str) -> String {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
    let lines = code.lines().map(|line| line.split("//").next().unwrap_or(""));
    lines.collect::<Vec<_>>().join("\n")
}

/// Rooms that a text names as `crate::room`, in braces too.
fn named_rooms(code: &str) -> Vec<String> {
    let mut rooms = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        let boundary = code[..at].chars().next_back();
        if boundary.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == '$') {
            continue;
        }
        let rest = &code[at + "crate::".len()..];
        let word = |text: &str| -> String { text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect() };
        match rest.strip_prefix('{') {
            None => rooms.push(word(rest)),
            Some(list) => {
                // Names at the outermost level of the braces.
                let mut depth = 0;
                let mut item = String::new();
                for c in list.chars() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => rooms.push(word(std::mem::take(&mut item).trim())),
                        c if depth == 0 => item.push(c),
                        _ => {}
                    }
                }
                rooms.push(word(item.trim()));
            }
        }
    }
    // Macros and items re-exported at the root count as the room they come from.
    rooms.retain(|room| !room.is_empty());
    rooms
        .into_iter()
        .map(|room| match room.as_str() {
            "Error" | "Kind" | "Result" | "bail" => "error".into(),
            _ => room,
        })
        .collect()
}

#[test]
fn names_are_read_from_paths_and_braces() {
    let code = "use crate::error::{Result, bail};\nuse crate::{gpu::{A, B}, kernel::C};\nlet x = crate::model::y(); my_crate::no";
    assert_eq!(named_rooms(code), ["error", "gpu", "kernel", "model"]);
}

#[test]
fn dependencies_point_one_way() {
    let rooms: BTreeMap<_, _> = ROOMS.iter().copied().collect();
    // The table itself has no cycle: a room uses only rooms whose own uses are all known before it.
    let mut known: Vec<&str> = Vec::new();
    for (room, uses) in ROOMS {
        for used in *uses {
            assert!(known.contains(used), "{room} stands before {used} in the table");
        }
        known.push(room);
    }
    let mut wrong = Vec::new();
    for (file, text) in files("src", "rs") {
        let own = room(&file);
        if FACADES.contains(&own) {
            continue;
        }
        let Some(may) = rooms.get(own) else {
            wrong.push(format!("{file}: no line for this room in the table"));
            continue;
        };
        for used in named_rooms(&code(&text)) {
            if used != own && !may.contains(&used.as_str()) {
                wrong.push(format!("{file} uses crate::{used}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Files whose code says `what` outside of the given places.
fn strays(what: &str, allowed: &[&str]) -> Vec<String> {
    let all = files("src", "rs").into_iter().chain(files("kernels-ref/src", "rs"));
    all.filter(|(file, text)| code(text).contains(what) && !allowed.iter().any(|place| file.starts_with(place)))
        .map(|(file, _)| file)
        .collect()
}

#[test]
fn some_things_are_said_in_one_room_only() {
    assert_eq!(strays("wgpu::", &["src/gpu/"]), [""; 0]);
    assert_eq!(strays("std::env", &["src/cli", "src/main.rs"]), [""; 0]);
    assert_eq!(strays("println!", &["src/cli", "src/main.rs"]), [""; 0]);
    assert_eq!(strays("process::exit", &["src/cli", "src/main.rs"]), [""; 0]);
    for word in ["unsafe {", "unsafe fn", "unsafe impl", "unsafe_code"] {
        assert_eq!(
            strays(word, &["src/container/", "src/gpu/", "kernels-ref/src/lib.rs"]),
            [""; 0]
        );
    }
    // The device room does say it: the test above looks at something.
    assert!(!strays("wgpu::", &[]).is_empty() && !strays("unsafe {", &[]).is_empty());
}

#[test]
fn unsafe_code_says_who_guarantees_what() {
    for (file, text) in files("src", "rs") {
        let lines: Vec<&str> = text.lines().collect();
        for (i, _) in lines.iter().enumerate().filter(|(_, line)| line.contains("unsafe {")) {
            let above = lines[i.saturating_sub(6)..i].join("\n");
            assert!(above.contains("// SAFETY:"), "{file}:{}: no SAFETY above", i + 1);
        }
    }
}

#[test]
fn stems_match() {
    let stem = |file: &String| Path::new(file).file_stem().unwrap().to_str().unwrap().to_string();
    let kernels: Vec<String> = files("shaders/op", "wgsl").keys().map(stem).collect();
    let catalogue: Vec<&str> = cmf_gpu::kernel::Kernel::ALL
        .iter()
        .map(|kernel| kernel.stem())
        .collect();
    assert!(kernels.iter().all(|kernel| catalogue.contains(&kernel.as_str())));
    assert_eq!(kernels.len(), catalogue.len());
    let decoders: Vec<String> = files("kernels-ref/src/dtype", "rs").keys().map(stem).collect();
    for dtype in cmf_gpu::dtype::Dtype::all() {
        assert!(
            decoders.iter().any(|stem| stem == dtype.name()),
            "no decoder file for {}",
            dtype.name()
        );
    }
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
                "{file} has {lines} lines, wanted at most {MAX_LINES}"
            );
        }
    }
}

#[test]
fn every_source_file_says_what_lives_there() {
    for (file, text) in files("src", "rs").into_iter().chain(files("kernels-ref/src", "rs")) {
        assert!(text.starts_with("//! "), "{file} does not begin with what lives there");
    }
}
