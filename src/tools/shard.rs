//! `shard`: one model in several files of bounded size (section 10 of the format).

use super::compact;
use super::{Progress, Written};
use crate::container::{Container, Parts, Split, SplitWriter, base_name};
use crate::convert::{Event, Options, Report, Target, convert_to};
use crate::dtype::Size;
use crate::error::{Error, Kind, Result, bail};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

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
    let plan = compact::plan(&model)?;
    let tensors = plan.parts.iter();
    let mut writer = SplitWriter::create(
        Split {
            dir,
            base,
            max_bytes,
            inputs: model.shard_paths().to_vec(),
        },
        plan.header.clone(),
        tensors
            .map(|part| (part.spec.clone(), Size::Exact(part.source_bytes())))
            .collect(),
        plan.sections,
        plan.by_pass,
    )?;
    plan.each(progress, &mut |payload, stored| writer.write(payload, stored))?;
    let parts = writer.finish()?;
    let written = Written {
        tensors: plan.parts.len(),
        bytes: parts.bytes,
        notes: larger(&parts, max_bytes).into_iter().collect(),
    };
    Ok((parts.paths, written))
}

/// Converts the model at `src` as [`crate::convert::convert`] does, to several files as [`shard`] makes them. Each is written
/// once: no room is needed beyond that of the result.
///
/// Errors: those of converting and of [`shard`].
pub fn convert_to_shards(
    src: &Path,
    out: &Path,
    max_bytes: u64,
    options: &Options,
    progress: &mut dyn FnMut(Event) -> ControlFlow<()>,
) -> Result<(Report, Vec<PathBuf>)> {
    let (dir, base) = target(src, out)?;
    let split = Split {
        dir,
        base,
        max_bytes,
        inputs: Vec::new(),
    };
    let (mut report, parts) = convert_to(src, Target::Several(split), options, progress)?;
    report.notes.extend(larger(&parts, max_bytes));
    Ok((report, parts.paths))
}

/// What there is to say of files that are larger than they should be.
fn larger(parts: &Parts, max_bytes: u64) -> Option<String> {
    let larger = parts.larger;
    (larger > 0).then(|| {
        let files = parts.paths.len();
        format!("{larger} of {files} files have more than {max_bytes} bytes: what is in them cannot be divided")
    })
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
