//! Ternary models in another file format, without loss: GGUF files as `.ninfer` files, and back.
//!
//! `gguf` and `ninfer` write a file from an imported model. The file is read again before it gets its name, and compared:
//! what a format cannot state is an error.

mod compare;
mod gguf;
mod ninfer;
mod steps;
mod values;

use super::loss::{self, Loss};
use super::options::Report;
use crate::error::{Error, Kind, Result, bail};
use crate::format::{not_the_output, publish, target, temporary_beside};
use crate::import::{self, Format, MTP_PREFIX, Model};
use std::path::Path;
use steps::{Progress, Steps};
use values::is_ternary;

/// The formats in which ternary models are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// A GGUF file.
    Gguf,
    /// A `.ninfer` file.
    Ninfer,
}

impl Exchange {
    /// The format that the name of an output asks for, by its extension.
    pub fn of(out: &Path) -> Option<Exchange> {
        let extension = out.extension()?.to_str()?.to_ascii_lowercase();
        match extension.as_str() {
            "gguf" => Some(Exchange::Gguf),
            "ninfer" => Some(Exchange::Ninfer),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Exchange::Gguf => "GGUF",
            Exchange::Ninfer => ".ninfer",
        }
    }

    fn open(self, path: &Path) -> Result<Model> {
        match self {
            Exchange::Gguf => import::gguf(path),
            Exchange::Ninfer => import::ninfer(path),
        }
    }
}

/// Writes the ternary model at `src`, a GGUF or a `.ninfer` file, to `out` in the format `to`: the same codes and scales, the
/// same values of everything else. `progress` may end it; then no file is left. `strict`: whether a tensor that would be left
/// out is an error.
///
/// Errors: `UnsupportedModel` for a model without ternary weights, and with the member of its description that the format cannot
/// state; `UnsupportedFeature` for a rotation that it cannot state; `UnsupportedTensorType` for weights that it cannot hold;
/// `Tokenizer` for a tokenizer that it cannot state; `Usage` when `out` is an input; those of reading.
pub fn exchange(src: &Path, out: &Path, to: Exchange, strict: bool, progress: Progress) -> Result<Report> {
    let mut model = match Format::of(src)? {
        Format::Gguf => import::gguf(src)?,
        Format::Ninfer => import::ninfer(src)?,
        Format::HuggingFace | Format::Cmf => bail!(
            UnsupportedFeature,
            "{}: {} files are written from GGUF and .ninfer files",
            src.display(),
            to.name()
        ),
    };
    model.files.iter().try_for_each(|file| not_the_output(file, out))?;
    if !model.tensors.iter().any(is_ternary) {
        bail!(
            UnsupportedModel,
            "{}: expected weights of type PQ2_0 or PTQ1_0, found none: only ternary models are written as {} files",
            src.display(),
            to.name()
        );
    }
    leave_out_draft_head(&mut model);
    if let Some(first) = model.dropped.first().filter(|_| strict) {
        bail!(
            UnsupportedModel,
            "{} of the source's tensors would be left out, and strict conversion forbids that; the first is {first}",
            model.dropped.len()
        );
    }
    let steps = Steps::new(model.tensors.len(), progress);
    let out = target(out)?;
    let file = temporary_beside(&out)?;
    let bytes = match to {
        Exchange::Gguf => gguf::write(file.path(), &model, &steps)?,
        Exchange::Ninfer => ninfer::write(file.path(), &model, &steps)?,
    };
    let mut report = Report {
        bytes,
        ..Report::default()
    };
    let lost = |err: Error| {
        Error::new(
            Kind::Internal,
            format!("the written file cannot be read: {}", err.message),
        )
    };
    let written = to.open(file.path()).map_err(lost)?;
    report.notes = compare::all_kept(&model, &written, to.name())?;
    summarise(&mut report, &written)?;
    report.dropped = model.dropped;
    report.notes.extend(model.notes);
    publish(file.into_temp_path(), &out)?;
    Ok(report)
}

/// Neither format has a place for the draft head of the other.
fn leave_out_draft_head(model: &mut Model) {
    let dropped = &mut model.dropped;
    model.tensors.retain(|tensor| {
        let is_kept = !tensor.name.starts_with(MTP_PREFIX);
        if !is_kept {
            dropped.push(format!("{}: draft heads are not converted", tensor.name));
        }
        is_kept
    });
    model.arch.mtp = None;
}

/// Counts the tensors of a file.
fn summarise(report: &mut Report, written: &Model) -> Result<()> {
    report.tensors = written.tensors.len();
    for tensor in &written.tensors {
        let bytes = tensor.data.nbytes()?;
        loss::add(&mut report.groups, tensor, tensor.data.dtype()?, bytes, Loss::default());
        if is_ternary(tensor) {
            report.kept.add(bytes, bytes, Loss::default());
        }
    }
    Ok(())
}
