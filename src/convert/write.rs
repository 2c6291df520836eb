//! Writes a described source: every tensor gets a type, is encoded from the mapped file and written.

use super::bits::Bits;
use super::keep::{self, Kept};
use super::loss::{self, Loss};
use super::model::Model;
use super::options::{Event, Options, Report, Target};
use super::plan::{self, Plan};
use super::rotation;
use crate::dtype::Dtype;
use crate::dtype::encode::{Settings, encode_with};
use crate::error::{Error, Result, bail};
use crate::format::TensorSpec;
use crate::format::cmf::{Sections, WrittenFiles};
use crate::import::Tensor;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::HashSet;
use std::ops::ControlFlow;
use std::path::Path;

/// Writes `model`, which was read from `src`. `progress` may end it; then no file is left.
///
/// Errors: those of [`convert`](super::convert).
pub(super) fn write(
    model: Model,
    src: &Path,
    target: Target,
    options: &Options,
    progress: &mut dyn FnMut(Event) -> ControlFlow<()>,
) -> Result<(Report, WrittenFiles)> {
    let Model {
        mut header,
        vocab,
        container,
        tensors,
        dropped,
        mut notes,
        files: _,
    } = model;
    if let Some(first) = dropped.first().filter(|_| options.strict) {
        bail!(
            UnsupportedModel,
            "{} of the source's tensors would be left out, and strict conversion forbids that; the first is {first}",
            dropped.len()
        );
    }
    let (tensors, unrotated) = match (rotation::stated(&header)?, options.quant) {
        (None, _) => (tensors, HashSet::new()),
        (Some(rotation), None) => {
            rotation::check(&rotation, &tensors)?;
            (tensors, HashSet::new())
        }
        (Some(rotation), Some(_)) => {
            rotation::remove(&mut header);
            rotation::undone(&rotation, tensors)?
        }
    };
    let tensors = plan::order(tensors);
    let mut plan = Plan::of(&tensors, options, progress)?;
    notes.append(&mut plan.notes);
    check_vbit_options(&tensors, &plan, options)?;
    describe(&mut header, src, quant_type(&tensors, &plan, options));
    let spec = |(tensor, &dtype): (&Tensor, &Dtype)| TensorSpec {
        name: tensor.name.clone(),
        dtype,
        shape: tensor.data.shape.clone(),
    };
    let specs = tensors.iter().zip(&plan.dtypes).map(spec).collect();
    let sections = Sections {
        vocab: vocab.as_deref(),
        masks: container.as_ref().and_then(|container| container.masks_section()),
        index: None,
    };
    let by_pass = container.as_ref().is_some_and(|container| container.has_loop_masks());
    let mut output = target.create(header, specs, sections, by_pass)?;
    let mut report = Report {
        dropped,
        notes,
        ..Report::default()
    };
    let mut bits = Bits::default();
    for (index, (tensor, &dtype)) in tensors.iter().zip(&plan.dtypes).enumerate() {
        let name = tensor.name.as_str();
        let named = |err: Error| err.context(format!("tensor '{name}'"));
        tensor.data.intact().map_err(named)?;
        let again = dtype.has_row_widths() && (options.mean_bits.is_some() || options.router_stats.is_some());
        let (payload, loss) = match tensor.data.copied(dtype)?.filter(|_| !again) {
            Some(payload) => (Cow::Borrowed(payload), Loss::default()),
            None => {
                let widths = bits.of(index, &tensors, &plan, options)?;
                encode(tensor, dtype, plan.kept[index], widths.as_deref()).map_err(named)?
            }
        };
        output.write(&payload)?;
        loss::add(&mut report.groups, tensor, dtype, payload.len(), loss);
        if tensor.data.shape.len() > 1 {
            let share = match loss.is_none() {
                _ if unrotated.contains(name) => Some(&mut report.unrotated),
                _ if tensor.data.quantised().is_none() => None,
                true => Some(&mut report.kept),
                false => Some(&mut report.again),
            };
            if let Some(share) = share {
                share.add(tensor.data.source_bytes()?, payload.len(), loss);
            }
        }
        tensor.data.release();
        let event = Event::Tensor {
            done: index + 1,
            total: tensors.len(),
            name,
        };
        if progress(event).is_break() {
            bail!(Interrupted, "the conversion was cancelled");
        }
    }
    let parts = output.finish()?;
    report.tensors = tensors.len();
    report.bytes = parts.bytes;
    Ok((report, parts))
}

/// The payload of a tensor, and how it differs from the source. Errors: those of reading and encoding.
fn encode<'a>(
    tensor: &'a Tensor,
    dtype: Dtype,
    kept: Option<Kept>,
    widths: Option<&[u8]>,
) -> Result<(Cow<'a, [u8]>, Loss)> {
    let payload = payload(tensor, dtype, kept, widths)?;
    if kept.is_some_and(Kept::writes_codes) {
        return Ok((Cow::Owned(payload), Loss::default()));
    }
    let loss = Loss::of(dtype, &payload, tensor.data.rows_cols(), &tensor.data.reader()?)?;
    Ok((Cow::Owned(payload), loss))
}

/// The payload of a tensor in a type; `widths` are those of its rows. Errors: those of reading and encoding.
pub(super) fn payload(tensor: &Tensor, dtype: Dtype, kept: Option<Kept>, widths: Option<&[u8]>) -> Result<Vec<u8>> {
    // The bytes of a text are the same in every type of weights.
    if let Some(text) = tensor.data.copied(dtype)?.filter(|_| dtype == Dtype::U8) {
        return Ok(text.to_vec());
    }
    if let Some(payload) = kept.map_or(Ok(None), |kept| keep::payload(tensor, kept))? {
        return Ok(payload);
    }
    let settings = Settings {
        widths,
        ..Settings::default()
    };
    let (rows, cols) = tensor.data.rows_cols();
    encode_with(dtype, rows, cols, &settings, &*tensor.data.reader()?)
}

/// Refuses options about the bits of vbit that no tensor can follow. Errors: `Usage`.
fn check_vbit_options(tensors: &[Tensor], plan: &Plan, options: &Options) -> Result<()> {
    if !(0..tensors.len()).any(|index| plan.chooses_widths(index)) {
        if let Some(mean) = options.mean_bits {
            bail!(Usage, "a mean of {mean} bits is asked for, and no tensor is to be vbit");
        }
        if options.router_stats.is_some() {
            bail!(
                Usage,
                "router statistics affect the bits of vbit only, and no tensor is to be vbit"
            );
        }
    }
    match &options.router_stats {
        Some(stats) => stats.check(tensors.iter().map(|tensor| tensor.name.as_str())),
        None => Ok(()),
    }
}

/// The type that describes the file: the one asked for, or the one of most weights if some keep their values.
fn quant_type(tensors: &[Tensor], plan: &Plan, options: &Options) -> Dtype {
    let some = plan.kept.iter().any(Option::is_some);
    let most = some.then(|| plan.most_common(tensors)).flatten();
    most.unwrap_or_else(|| options.quant())
}

/// Adds the type and the source to the header.
fn describe(header: &mut Map<String, Value>, src: &Path, quant: Dtype) {
    header.insert("quant_type".into(), quant.name().to_uppercase().into());
    let mut provenance = match header.remove("provenance") {
        Some(Value::Object(provenance)) => provenance,
        None | Some(Value::Null) => Map::new(),
        Some(other) => Map::from_iter([("source_provenance".to_owned(), other)]),
    };
    let tool = concat!("cmf-gpu ", env!("CARGO_PKG_VERSION"), " convert");
    let name = src.file_name().map(|name| name.to_string_lossy().into_owned());
    let quant = match quant.quant_name() {
        "" => quant.name(),
        name => name,
    };
    provenance.insert("tool".into(), tool.into());
    provenance.insert("source_model".into(), name.into());
    provenance.insert("weight_quant".into(), quant.into());
    header.insert("provenance".into(), provenance.into());
}
