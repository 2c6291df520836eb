//! `shard`: one model in several files of bounded size (section 10 of the format).

use super::compact;
use super::rewrite::{Part, Plan, Work, keep};
use super::{Progress, Written};
use crate::container::{Container, MAX_SHARDS, Sections, Shard, base_name, shard_path};
use crate::convert::{Event, Options, Report, convert};
use crate::dtype::Size;
use crate::error::{Error, Kind, Result, bail};
use serde_json::{Map, Value, json};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// A weight blob starts at a multiple of this.
const BLOB_ALIGN: u64 = 4096;
/// Payloads start at multiples of this.
const TENSOR_ALIGN: u64 = 64;
/// Bytes of an envelope, of a directory's head and of its records.
const ENVELOPE: u64 = 128;
const DIRECTORY: u64 = 16;
const RECORD: u64 = 56;

/// Splits the model at `model` into files of at most `max_bytes`, tensors in directory order; a tensor that is larger than
/// that gets a file of its own. Masks, tokenizer, index and skills go to the first.
///
/// `out` is a directory that is there, where the files are named after the model, or what their names begin with. They get
/// their names when all of them are whole, the first one last. Returns their paths.
///
/// Errors: as [`compact::compact`]; `Usage` for more files than names can count, and for a limit of 0.
pub fn shard(model: &Path, max_bytes: u64, out: &Path, progress: Progress) -> Result<(Vec<PathBuf>, Written)> {
    let (dir, base) = target(model, out)?;
    let model = Container::open(model)?;
    into(&model, &[&model], max_bytes, (&dir, &base), progress)
}

/// Converts the model at `src` as [`convert`] does, to several files. Needs room for the whole model twice.
///
/// Errors: those of converting and of [`shard`].
pub fn convert_to_shards(
    src: &Path,
    out: &Path,
    max_bytes: u64,
    options: &Options,
    converting: &mut dyn FnMut(Event) -> ControlFlow<()>,
    splitting: Progress,
) -> Result<(Report, Vec<PathBuf>)> {
    let (dir, base) = target(src, out)?;
    let place = if dir.as_os_str().is_empty() {
        Path::new(".")
    } else {
        &dir
    };
    let temporary = tempfile::Builder::new()
        .prefix(".cmf-")
        .tempdir_in(place)
        .map_err(|err| Error::io(place, &err))?;
    let whole = temporary.path().join("whole.cmf");
    let mut report = convert(src, &whole, options, converting)?;
    let whole = Container::open(&whole)?;
    // Only a container can be among the results; it was opened a moment ago.
    let source = Container::open(src).ok();
    let inputs: Vec<&Container> = source.iter().collect();
    let (paths, written) = into(&whole, &inputs, max_bytes, (&dir, &base), splitting)?;
    report.bytes = written.bytes;
    Ok((report, paths))
}

fn into(
    model: &Container,
    inputs: &[&Container],
    max_bytes: u64,
    (dir, base): (&Path, &str),
    progress: Progress,
) -> Result<(Vec<PathBuf>, Written)> {
    let whole = compact::plan(model)?;
    let parts = whole.source_bytes();
    let counts = split(&whole, max_bytes)?;
    let count = counts.len() as u32;
    let tensors = whole.parts.len();
    let first = whole.header.clone();
    let mut bare = whole.header;
    bare.retain(|key, _| !["skills", "tokenizer_config"].contains(&key.as_str()));

    let paths: Vec<PathBuf> = (1..=count)
        .map(|no| shard_path(dir, base, Shard { no, count }))
        .collect();
    for input in inputs {
        paths.iter().try_for_each(|path| keep(input, path))?;
    }
    let mut work = Work::new(parts, progress);
    let mut rest = whole.parts.into_iter();
    let mut files = Vec::with_capacity(counts.len());
    for (no, (path, tensors)) in (1..).zip(paths.iter().zip(counts)) {
        let main = no == 1;
        let mut header = if main { first.clone() } else { bare.clone() };
        header.insert("shard".into(), json!({"no": no, "count": count}));
        let plan = Plan {
            header,
            parts: rest.by_ref().take(tensors).collect(),
            sections: if main { whole.sections } else { Sections::default() },
            by_pass: main && whole.by_pass,
        };
        files.push(plan.write(path, &mut work)?);
    }
    // Without the first the others are no model, and say so.
    files.reverse();
    let mut bytes = 0;
    for file in files {
        bytes += file.publish()?;
    }
    let written = Written {
        tensors,
        bytes,
        notes: Vec::new(),
    };
    Ok((paths, written))
}

/// Directory and base of the names.
fn target(model: &Path, out: &Path) -> Result<(PathBuf, String)> {
    let nameless = |path: &Path| Error::new(Kind::Usage, format!("{}: no name for files", path.display()));
    if out.is_dir() {
        return Ok((out.to_owned(), base_name(model).ok_or_else(|| nameless(model))?));
    }
    if out.as_os_str().as_encoded_bytes().ends_with(b"/") {
        bail!(Io, "{}: no such directory", out.display());
    }
    let name = out
        .file_name()
        .and_then(|name| name.to_str())
        .ok_or_else(|| nameless(out))?;
    let base = name.strip_suffix(".cmf").unwrap_or(name);
    if base.is_empty() {
        return Err(nameless(out));
    }
    let dir = out.parent().unwrap_or(Path::new(""));
    Ok((dir.to_owned(), base.to_owned()))
}

/// How many tensors go to each file, in order.
fn split(plan: &Plan, max_bytes: u64) -> Result<Vec<usize>> {
    if max_bytes == 0 {
        bail!(Usage, "files of 0 bytes hold no model");
    }
    let Sections { vocab, masks, index } = plan.sections;
    let sections: usize = [vocab, masks, index].into_iter().flatten().map(<[u8]>::len).sum();
    let header = header_bytes(&plan.header);
    // What a file has before its first tensor.
    let empty = (ENVELOPE + header + DIRECTORY, 0u64, sections as u64);
    let (mut head, mut blob, mut extra) = empty;
    let mut counts = vec![0];
    for part in &plan.parts {
        let (record, payload) = (RECORD + part.spec.name.len() as u64, bytes_of(part)?);
        let size = |head: u64, blob: u64, extra: u64| {
            (head + record).next_multiple_of(BLOB_ALIGN) + (blob + payload).next_multiple_of(TENSOR_ALIGN) + extra
        };
        let last = counts.len() - 1;
        if counts[last] > 0 && size(head, blob, extra) > max_bytes {
            // The sections are in the first file only.
            (head, blob, extra) = (empty.0, 0, 0);
            counts.push(0);
        }
        head += record;
        blob = (blob + payload).next_multiple_of(TENSOR_ALIGN);
        if let Some(count) = counts.last_mut() {
            *count += 1;
        }
    }
    if counts.len() as u64 > u64::from(MAX_SHARDS) {
        bail!(
            Usage,
            "{} files of at most {max_bytes} bytes, a model has at most {MAX_SHARDS}",
            counts.len()
        );
    }
    Ok(counts)
}

/// The most bytes that a header of these members takes once the file's own are added.
fn header_bytes(header: &Map<String, Value>) -> u64 {
    let mut full = header.clone();
    let hash = "0".repeat(16);
    full.insert("format".into(), "cmf".into());
    full.insert("version".into(), 2.into());
    full.insert("shard".into(), json!({"no": MAX_SHARDS, "count": MAX_SHARDS}));
    full.insert(
        "section_hashes".into(),
        json!({"masks": hash, "vocab": hash, "index": hash}),
    );
    Value::Object(full).to_string().len() as u64
}

fn bytes_of(part: &Part) -> Result<u64> {
    Ok(match part.spec.dtype.size(&part.spec.shape)? {
        Size::Exact(bytes) => bytes,
        Size::AtLeast(_) => part.source_bytes(),
    })
}
