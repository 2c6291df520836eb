//! The same model in other files: `compact` joins it in one canonical file, `shard` splits it into several of bounded size
//! (section 10 of the format).

use super::rewrite::{NewFile, NewTensor, header_of};
use super::{Progress, Written};
use crate::convert::{Event, Options, Report, Target, convert_to};
use crate::dtype::Size;
use crate::error::{Error, Kind, Result, bail};
use crate::format::cmf::{CmfContainer, CmfWriter, SplitOptions, WrittenFiles, base_name};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// Writes the model at `model` to `out`: sections in canonical order, tensors in directory order, payloads unchanged.
///
/// Errors: those of [`CmfContainer::open`]; `HashMismatch` for damage; `SkillFile` for a skill file that names no base;
/// `Usage` if `out` is an input; `Io`.
pub fn compact(model: &Path, out: &Path, progress: Progress) -> Result<Written> {
    let model = CmfContainer::open(model)?;
    let file = whole(&model)?;
    file.write(&[&model], out, Vec::new(), progress)
}

/// The file that copies the whole model.
pub(super) fn whole(model: &CmfContainer) -> Result<NewFile<'_>> {
    if model.is_skill_file() && !model.header().has_bound_skill() {
        bail!(
            SkillFile,
            "the file is marked as a skill file, but no record names its base"
        );
    }
    Ok(NewFile {
        header: header_of(model),
        tensors: (0..model.infos().len()).map(|id| NewTensor::copy(model, id)).collect(),
        sections: model.sections()?,
        per_loop: model.has_loop_masks(),
    })
}

/// Splits the model at `model` into files of at most `max_bytes`, tensors in directory order. A larger tensor gets a file of
/// its own. Masks, tokenizer, index and skills go to the first file.
///
/// `out` is an existing directory, in which the files are named after the model, or a path that their names begin with. The
/// files are renamed to their paths when all are complete, shard 1 last. Returns their paths.
///
/// Errors: as [`compact`]; `Usage` for more files than names can number, and for a limit of 0.
pub fn shard(model: &Path, max_bytes: u64, out: &Path, progress: Progress) -> Result<(Vec<PathBuf>, Written)> {
    let mut options = split_options(model, max_bytes, out)?;
    let model = CmfContainer::open(model)?;
    options.inputs = model.shard_paths().to_vec();
    let file = whole(&model)?;
    let stored = |tensor: &NewTensor| (tensor.spec.clone(), Size::Exact(tensor.source_bytes()));
    let stored = file.tensors.iter().map(stored).collect();
    let mut writer = CmfWriter::split(options, file.header.clone(), stored, file.sections)?;
    if file.per_loop && file.sections.masks.is_some() {
        writer = writer.with_loop_masks()?;
    }
    file.each(progress, &mut |payload, stored| writer.put(payload, stored))?;
    let files = writer.finish()?;
    let written = Written {
        tensors: file.tensors.len(),
        bytes: files.bytes,
        notes: larger(&files, max_bytes).into_iter().collect(),
    };
    Ok((files.paths, written))
}

/// Converts the model at `src` to several files, without writing a single file first.
///
/// Errors: those of [`crate::convert::convert`] and of [`shard`].
pub fn convert_to_shards(
    src: &Path,
    out: &Path,
    max_bytes: u64,
    options: &Options,
    progress: &mut dyn FnMut(Event) -> ControlFlow<()>,
) -> Result<(Report, Vec<PathBuf>)> {
    let split = split_options(src, max_bytes, out)?;
    let (mut report, files) = convert_to(src, Target::Several(split), options, progress)?;
    report.notes.extend(larger(&files, max_bytes));
    Ok((report, files.paths))
}

/// A note about files that exceed the limit.
fn larger(written: &WrittenFiles, max_bytes: u64) -> Option<String> {
    let larger = written.larger;
    (larger > 0).then(|| {
        let files = written.paths.len();
        format!("{larger} of {files} files have more than {max_bytes} bytes, because tensors are not divided")
    })
}

/// The options for files in the directory and with the names that `out` determines.
fn split_options(model: &Path, max_bytes: u64, out: &Path) -> Result<SplitOptions> {
    let nameless = |path: &Path| {
        let message = format!("{}: expected a path with a file name", path.display());
        Error::new(Kind::Usage, message)
    };
    let options = |dir: &Path, base: &str| SplitOptions {
        dir: dir.to_owned(),
        base: base.to_owned(),
        max_bytes,
        inputs: Vec::new(),
    };
    if out.is_dir() {
        let base = base_name(model).ok_or_else(|| nameless(model))?;
        return Ok(options(out, &base));
    }
    if out.as_os_str().as_encoded_bytes().ends_with(b"/") {
        bail!(Io, "{}: no such directory", out.display());
    }
    let name = out.file_name().and_then(|name| name.to_str());
    let base = name.map(|name| name.strip_suffix(".cmf").unwrap_or(name));
    let base = base.filter(|base| !base.is_empty()).ok_or_else(|| nameless(out))?;
    Ok(options(out.parent().unwrap_or(Path::new("")), base))
}
