//! Changing, adding and removing skills in place, exporting them as skill files and applying those (section 9 of the format).

use super::rewrite::{NewFile, NewTensor, Work, header_of};
use super::{Progress, TOOL, Written};
use crate::convert::{Options, convert};
use crate::dtype::Dtype;
use crate::dtype::encode::{encode, storage_dtype};
use crate::error::{Error, Kind, Result, bail};
use crate::format::cmf::{Appender, CmfContainer, Masks, NO_TASK, Sections, Selection, check_id, check_new_id};
use crate::format::json::without_nulls;
use crate::format::{TensorInfo, TensorSpec, base64, check_hash, hex, read_start};
use crate::source::{SkillView, Tensors};
use half::f16;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use std::path::Path;
use tempfile::TempDir;

/// Name, storage and task of a new skill.
#[derive(Clone, Debug, Default)]
pub struct New {
    /// The id.
    pub id: String,
    /// The name, for display.
    pub name: Option<String>,
    /// The type of its matrices; `None`: tensors of a CMF file keep their type, others get the type of the tensor that they
    /// replace.
    pub quant: Option<Dtype>,
    /// The task whose mask is used with it, [`NO_TASK`] for the full model; `None`: unspecified.
    pub input_mask_task: Option<String>,
}

/// Adds a skill to the model at `model`, in place: the tensors in which the model at `src` differs from its backbone.
///
/// `src` is a CMF file or a model that can be converted to one, of the same network. Tensors are compared as bytes, after
/// encoding in the type of the backbone's tensor. Until the last write the file remains the old model.
///
/// Errors: `Usage` for an invalid or existing id, a task without a mask, and if nothing differs; `MissingTensor` or
/// `UnsupportedModel` if the networks differ; `SkillFile` if either file is a skill file; those of
/// [`convert`](crate::convert::convert) and of [`Appender`].
pub fn add(model: &Path, src: &Path, new: &New, progress: Progress) -> Result<Written> {
    check_new_id(&new.id)?;
    let base = CmfContainer::open(model)?;
    runnable(&base)?;
    if base.skills().iter().any(|skill| skill.id == new.id) {
        bail!(Usage, "skill '{}' exists already", new.id);
    }
    match new.input_mask_task.as_deref() {
        None | Some(NO_TASK) => {}
        Some(task) => drop(base.masks().unwrap_or(&Masks::default()).find(task)?),
    }
    let prefix = format!("skill.{}.", new.id);
    if let Some(info) = base.infos().iter().find(|info| info.name.starts_with(&prefix)) {
        bail!(Usage, "tensor '{}' exists already", info.name);
    }
    let (source, temporary) = open_source(model, src, progress)?;
    runnable(&source)?;
    let backbone = SkillView::new(&base, base.skills(), None)?;
    let changed = SkillView::new(&source, source.skills(), None)?;
    same_network(&backbone, &changed)?;
    if base.header().arch.prism_hadamard != source.header().arch.prism_hadamard {
        bail!(
            UnsupportedFeature,
            "{}: its matrices are not rotated as those of the model",
            src.display()
        );
    }

    let mut file = Appender::open(&base.shard_paths()[0])?;
    let mut work = Work::new(changed.infos().iter().map(|info| info.nbytes).sum(), progress);
    let mut names = Vec::new();
    for (id, info) in backbone.infos().iter().enumerate() {
        // `same_network` has checked that it exists.
        let Some(other) = changed.find(&info.name) else {
            continue;
        };
        let from = &changed.infos()[other];
        let bytes = &changed.stored(other)?.bytes;
        if let Some(stored) = changed.stored_id(other) {
            let hash = source.payloads()[stored].hash;
            check_hash(format_args!("payload of tensor '{}'", info.name), bytes, Some(hash))?;
        }
        let stored = backbone.stored(id)?;
        let stored = replacement((info, &stored.bytes), (from, bytes), new.quant, temporary.is_some());
        let stored = stored.map_err(|err| err.context(format_args!("tensor '{}'", info.name)))?;
        if let Some((dtype, payload)) = stored {
            let tensor = TensorSpec {
                name: format!("{prefix}{}", info.name),
                dtype,
                shape: info.shape.clone(),
            };
            file.add(tensor, &payload)?;
            names.push(info.name.as_str());
        }
        backbone.release(id);
        changed.release(other);
        work.advance(from.nbytes)?;
    }
    if names.is_empty() {
        bail!(Usage, "{}: differs from the model in no tensor", src.display());
    }
    let file_name = src.file_name().map(|name| name.to_string_lossy().into_owned());
    let tensors = names.len();
    let record = json!({
        "id": new.id,
        "name": new.name,
        "layers": layers(&names),
        "input_mask_task": new.input_mask_task,
        "quality": null,
        "provenance": {"tool": format!("{TOOL} skill add"), "source": file_name, "tensors": tensors},
    });
    let mut header = file.header_json().clone();
    registry(&mut header)?.push(record);
    let mut notes = signature_note(&base);
    // The old file must not be mapped while its envelope changes.
    drop((backbone, changed));
    drop((base, source));
    notes.extend(temporary.iter().flat_map(|(_, notes)| notes).cloned());
    finish(file, header, &|_| false, tensors, notes)
}

/// Removes a skill from the registry and its tensors from the directory, in place. Their bytes stay until the file is
/// compacted.
///
/// Errors: `Usage` for an unknown id, and for a skill with tensors outside the first file; those of [`Appender`].
pub fn remove(model: &Path, id: &str) -> Result<Written> {
    let container = CmfContainer::open(model)?;
    runnable(&container)?;
    SkillView::new(&container, container.skills(), Some(id))?;
    let prefix = format!("skill.{id}.");
    let mut own: Vec<_> = container.infos().iter().zip(container.payloads()).collect();
    own.retain(|(info, _)| info.name.starts_with(&prefix));
    let tensors = own.len();
    if own.iter().any(|(_, payload)| payload.shard != 0) {
        bail!(
            Usage,
            "skill '{id}' has tensors outside the first file, which is the only one that can change; compact the model first"
        );
    }
    let (file, notes) = reopen(container)?;
    let mut header = file.header_json().clone();
    registry(&mut header)?.retain(|record| record.get("id").and_then(Value::as_str) != Some(id));
    finish(file, header, &|name| name.starts_with(&prefix), tensors, notes)
}

/// Sets the selection data of a skill. Its other members are unchanged.
///
/// Errors: `Usage` for an unknown skill; those of [`Appender`].
pub fn set_selection(model: &Path, id: &str, selection: &Selection) -> Result<Written> {
    let halves = |values: &[f32]| {
        let bytes = values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes());
        base64(&bytes.collect::<Vec<u8>>())
    };
    let record = json!({
        "metric": selection.metric,
        "phi_layer": selection.phi_layer,
        "mean": halves(&selection.mean),
        "basis": halves(&selection.basis),
        "rank": selection.rank,
    });
    amend(model, id, "selection", record)
}

/// Sets the quality of a skill: the perplexity of `text` without and with it. Each comes with the task whose mask was active,
/// [`NO_TASK`] for the full model. Errors: as [`set_selection`].
pub fn set_quality(
    model: &Path,
    id: &str,
    (backbone, backbone_task): (f64, &str),
    (overlaid, task): (f64, &str),
    text: &str,
) -> Result<Written> {
    let digest = Sha256::digest(text.as_bytes());
    let record = json!({
        "metric": "ppl", "backbone": backbone, "overlaid": overlaid, "dataset_sha256": hex(&digest),
        "backbone_task": backbone_task, "task": task,
    });
    amend(model, id, "quality", record)
}

/// Sets one member of a skill's record.
fn amend(model: &Path, id: &str, member: &str, value: Value) -> Result<Written> {
    let container = CmfContainer::open(model)?;
    SkillView::new(&container, container.skills(), Some(id))?;
    let (file, notes) = reopen(container)?;
    let mut header = file.header_json().clone();
    record_of(&mut header, id)?.insert(member.to_owned(), value);
    finish(file, header, &|_| false, 0, notes)
}

/// Closes a model and opens its first file for changes, with notes about the effect of changes.
fn reopen(model: CmfContainer) -> Result<(Appender, Vec<String>)> {
    let (path, notes) = (model.shard_paths()[0].clone(), signature_note(&model));
    // The old file must not be mapped while its envelope changes.
    drop(model);
    Ok((Appender::open(&path)?, notes))
}

/// Writes a changed header; the directory loses the tensors whose names are `removed`.
fn finish(
    file: Appender,
    header: Map<String, Value>,
    removed: &dyn Fn(&str) -> bool,
    tensors: usize,
    notes: Vec<String>,
) -> Result<Written> {
    let before = file.bytes_before();
    let bytes = file.finish(header, removed)?.saturating_sub(before);
    Ok(Written { tensors, bytes, notes })
}

/// Writes a skill file: the tensors in which the model at `model`, with its skill `id` active, differs from the model at
/// `base`. If `model` has no skills, `id` names the new skill and the whole model is compared.
///
/// Errors: `Usage` if nothing differs or the base has several files; `UnsupportedModel` or `MissingTensor` if the networks
/// differ; `SkillFile` if either file is a skill file; `HashMismatch` for damage; `Io`.
pub fn export(model: &Path, id: &str, base: &Path, out: &Path, progress: Progress) -> Result<Written> {
    check_id(id)?;
    let (name, model, base) = (model.file_name(), CmfContainer::open(model)?, CmfContainer::open(base)?);
    runnable(&model)?;
    runnable(&base)?;
    if model.skills().iter().all(|skill| skill.id != id) {
        check_new_id(id)?;
    }
    // In a model with skills, an unknown id is a mistake.
    let specialist = SkillView::new(&model, model.skills(), (!model.skills().is_empty()).then_some(id))?;
    let backbone = SkillView::new(&base, base.skills(), None)?;
    same_network(&backbone, &specialist)?;
    if model.header().arch != base.header().arch {
        bail!(UnsupportedModel, "model and base are different networks (arch differs)");
    }
    let mut tensors = Vec::new();
    for (of_base, info) in backbone.infos().iter().enumerate() {
        let Some(other) = specialist.find(&info.name) else {
            continue;
        };
        let from = &specialist.infos()[other];
        if from.dtype != info.dtype || specialist.stored(other)?.bytes != backbone.stored(of_base)?.bytes {
            tensors.extend(specialist.stored_id(other).map(|stored| NewTensor {
                spec: TensorSpec::from(from),
                ..NewTensor::copy(&model, stored)
            }));
        }
        backbone.release(of_base);
        specialist.release(other);
    }
    let (own, bases) = (model.sections()?, base.sections()?);
    let masks = own.masks.filter(|_| own.masks != bases.masks);
    if tensors.is_empty() && masks.is_none() {
        bail!(Usage, "the model and its base have identical tensors");
    }
    let mut notes = Vec::new();
    if own.masks.is_none() && bases.masks.is_some() {
        notes.push("the base has masks, which are kept when the skill is applied; the model has none".to_owned());
    }
    let source = name.map(|name| name.to_string_lossy().into_owned());
    let record = exported_record(&model, id, &base, source, &tensors)?;
    let mut header = header_of(&model);
    header.insert("skills".into(), vec![Value::Object(record)].into());
    let file = NewFile {
        header,
        tensors,
        sections: Sections {
            masks,
            ..Sections::default()
        },
        per_loop: model.has_loop_masks(),
    };
    file.write(&[&model, &base], out, notes, progress)
}

/// The record of an exported skill: that of the model, if it has one, with members that name the base and the origin.
fn exported_record(
    model: &CmfContainer,
    id: &str,
    base: &CmfContainer,
    source: Option<String>,
    tensors: &[NewTensor],
) -> Result<Map<String, Value>> {
    let known = model.skills().iter().position(|skill| skill.id == id);
    let mut record = match known.and_then(|at| model.header().skills.get(at)) {
        Some(Value::Object(record)) => record.clone(),
        _ => Map::from_iter([("id".to_owned(), Value::from(id))]),
    };
    let names: Vec<&str> = tensors.iter().map(|tensor| tensor.spec.name.as_str()).collect();
    if !record.contains_key("layers") {
        record.insert("layers".into(), layers(&names).into());
    }
    let base_hash = format!("{:016x}", base.directory_hash()?);
    record.insert("base_dir_hash".into(), base_hash.into());
    record.insert("base_arch".into(), base.header().arch.arch_name.clone().into());
    let own_task = record.get("input_mask_task").and_then(Value::as_str);
    let default_task = model.masks().and_then(|masks| masks.default_task.as_deref());
    let task = Value::from(own_task.or(default_task).unwrap_or("general"));
    record.entry("task").or_insert(task);
    let provenance = json!({
        "tool": format!("{TOOL} skill export"),
        "cut_from": source,
        "tensors": tensors.len(),
        "made_by": record.get("provenance"),
    });
    record.insert("provenance".into(), without_nulls(&provenance));
    Ok(record)
}

/// Writes the model that results from applying the skill file `skill` to the model at `base`. `force` accepts another base
/// than the one that the skill was exported against, with unpredictable quality.
///
/// Errors: `SkillFile` if `skill` is not a skill file, names another base, or if the base is a skill file; `MissingTensor` or
/// `UnsupportedModel` for a tensor that the base does not have or has in another shape; `Usage` if the base has a skill of
/// the same id; `Parse` for a skill whose task has no mask in either file; `HashMismatch` for damage; `Io`.
pub fn apply(base: &Path, skill: &Path, out: &Path, force: bool, progress: Progress) -> Result<Written> {
    let (base, skill) = (CmfContainer::open(base)?, CmfContainer::open(skill)?);
    runnable(&base)?;
    if !skill.header().has_bound_skill() {
        bail!(SkillFile, "{}: not a skill file", skill.shard_paths()[0].display());
    }
    let mut notes = Vec::new();
    match force {
        true => notes.push("whether the skill belongs to this base was not checked".to_owned()),
        false => check_base(&base, &skill)?,
    }
    let header = applied_header(&base, &skill)?;
    check_replaced(&base, &skill)?;
    let masks = skill.masks().or(base.masks());
    for record in skill.skills() {
        if let Some(task) = record.mask_task(masks)? {
            notes.push(format!(
                "skill '{}' uses the mask of task '{task}', which becomes active with the skill",
                record.id
            ));
        }
    }
    let tensor = |(id, info): (usize, &TensorInfo)| match skill.find(&info.name) {
        Some(other) => NewTensor::copy(&skill, other),
        None => NewTensor::copy(&base, id),
    };
    let (bases, own) = (base.sections()?, skill.sections()?);
    let (masks, index, per_loop) = match own.masks {
        // The base's index refers to the base's masks.
        Some(masks) => (Some(masks), None, skill.has_loop_masks()),
        None => (bases.masks, bases.index, base.has_loop_masks()),
    };
    let file = NewFile {
        header,
        tensors: base.infos().iter().enumerate().map(tensor).collect(),
        sections: Sections {
            vocab: bases.vocab,
            masks,
            index,
        },
        per_loop,
    };
    file.write(&[&base, &skill], out, notes, progress)
}

/// Checks that a skill file names `base`. Errors: `SkillFile`.
fn check_base(base: &CmfContainer, skill: &CmfContainer) -> Result<()> {
    for record in skill.skills() {
        let Some(wanted) = record.base_dir_hash else { continue };
        let found = base.directory_hash()?;
        if found != wanted {
            bail!(
                SkillFile,
                "skill '{}' belongs to another base: expected directory hash {wanted:016x}, found {found:016x}",
                record.id
            );
        }
    }
    Ok(())
}

/// Checks that the base has the tensors that a skill file replaces. Errors: `MissingTensor`, `UnsupportedModel`.
fn check_replaced(base: &CmfContainer, skill: &CmfContainer) -> Result<()> {
    for TensorInfo { name, shape, .. } in skill.infos() {
        let Some(id) = base.find(name) else {
            bail!(
                MissingTensor,
                "the skill replaces '{name}', which the base does not have"
            );
        };
        let found = &base.infos()[id].shape;
        if found != shape {
            bail!(
                UnsupportedModel,
                "the skill replaces '{name}' with shape {shape:?}, the base has {found:?}"
            );
        }
    }
    Ok(())
}

/// The header of `base` with the records of a skill file, which no longer name a base. Errors: `Usage` for an existing id.
fn applied_header(base: &CmfContainer, skill: &CmfContainer) -> Result<Map<String, Value>> {
    let mut header = header_of(base);
    let records = registry(&mut header)?;
    for (record, typed) in skill.header().skills.iter().zip(skill.skills()) {
        if base.skills().iter().any(|known| known.id == typed.id) {
            bail!(Usage, "the base already has a skill '{}'", typed.id);
        }
        let mut record = record.clone();
        if let Value::Object(members) = &mut record {
            members.shift_remove("base_dir_hash");
        }
        records.push(record);
    }
    Ok(header)
}

/// Errors: `SkillFile`.
fn runnable(model: &CmfContainer) -> Result<()> {
    if model.is_skill_file() {
        bail!(
            SkillFile,
            "{}: this is a skill file, expected a model",
            model.shard_paths()[0].display()
        );
    }
    Ok(())
}

/// A temporary directory, and the notes of the conversion into it.
type Temporary = (TempDir, Vec<String>);

/// Opens the source of a skill. A model in another format is first converted to a CMF file with f32 weights, in a temporary
/// directory beside `model`.
fn open_source(model: &Path, src: &Path, progress: Progress) -> Result<(CmfContainer, Option<Temporary>)> {
    if src.is_file() && read_start(src, 3)? == b"CMF" {
        return Ok((CmfContainer::open(src)?, None));
    }
    let parent = model.parent().filter(|parent| !parent.as_os_str().is_empty());
    let dir = tempfile::Builder::new()
        .prefix(".cmf-")
        .tempdir_in(parent.unwrap_or(Path::new(".")))
        .map_err(|err| Error::io(model, &err))?;
    let out = dir.path().join("source.cmf");
    // Rotated matrices stay in their basis.
    let mut options = Options::keeping();
    options.overrides.push(("*".into(), Dtype::F32));
    let report = convert(src, &out, &options, &mut |_| progress(0, 1))?;
    Ok((CmfContainer::open(&out)?, Some((dir, report.dropped))))
}

/// Checks that two sets of tensors have the same names and shapes. Errors: `MissingTensor`, `UnsupportedModel`.
fn same_network(base: &dyn Tensors, other: &dyn Tensors) -> Result<()> {
    for info in base.infos() {
        let Some(id) = other.find(&info.name) else {
            bail!(MissingTensor, "the other model lacks '{}'", info.name);
        };
        let found = &other.infos()[id].shape;
        if *found != info.shape {
            bail!(
                UnsupportedModel,
                "'{}' has shape {:?} here and {found:?} in the other model",
                info.name,
                info.shape
            );
        }
    }
    if let Some(extra) = other.infos().iter().find(|info| base.find(&info.name).is_none()) {
        bail!(
            UnsupportedModel,
            "the other model has '{}', which this one lacks",
            extra.name
        );
    }
    Ok(())
}

/// The type and payload that a skill stores for a tensor; `None` if the backbone's tensor is identical.
///
/// `imported`: the source was converted, so its type has no meaning.
fn replacement<'a>(
    (base, base_bytes): (&TensorInfo, &[u8]),
    (from, bytes): (&TensorInfo, &'a [u8]),
    quant: Option<Dtype>,
    imported: bool,
) -> Result<Option<(Dtype, Cow<'a, [u8]>)>> {
    let like_base = encoded(from, bytes, base.dtype)?;
    if *like_base == *base_bytes {
        return Ok(None);
    }
    let dtype = match quant {
        Some(quant) => storage_dtype(quant, &base.shape),
        None if imported => return Ok(Some((base.dtype, like_base))),
        None => from.dtype,
    };
    Ok(Some((dtype, encoded(from, bytes, dtype)?)))
}

/// A payload, encoded in another type if necessary.
fn encoded<'a>(info: &TensorInfo, bytes: &'a [u8], dtype: Dtype) -> Result<Cow<'a, [u8]>> {
    if info.dtype == dtype {
        return Ok(Cow::Borrowed(bytes));
    }
    let (rows, cols) = info.rows_cols();
    let decoder = info.dtype.decoder(bytes, rows, cols)?;
    let read = |first: usize, out: &mut [f32]| {
        for (row, weights) in (first..rows).zip(out.chunks_mut(cols)) {
            decoder.row(row, weights);
        }
        Ok(())
    };
    encode(dtype, rows, cols, &read).map(Cow::Owned)
}

/// The layers of the tensors with these names, ascending.
fn layers(names: &[&str]) -> Vec<u32> {
    let layer = |name: &&str| name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok();
    let mut layers: Vec<u32> = names.iter().filter_map(layer).collect();
    layers.sort_unstable();
    layers.dedup();
    layers
}

/// The skill records of a header, created if absent. Errors: `Parse` if the member is not an array.
fn registry(header: &mut Map<String, Value>) -> Result<&mut Vec<Value>> {
    let value = header.entry("skills").or_insert(Value::Null);
    if value.is_null() {
        *value = Value::Array(Vec::new());
    }
    value
        .as_array_mut()
        .ok_or_else(|| Error::new(Kind::Parse, "header.skills: expected an array"))
}

/// The record of a skill in a header. Errors: `Parse` if there is none.
pub(super) fn record_of<'h>(header: &'h mut Map<String, Value>, id: &str) -> Result<&'h mut Map<String, Value>> {
    let records = header.get_mut("skills").and_then(Value::as_array_mut);
    let mut records = records.into_iter().flatten().filter_map(Value::as_object_mut);
    records
        .find(|record| record.get("id").and_then(Value::as_str) == Some(id))
        .ok_or_else(|| Error::new(Kind::Parse, format!("header.skills: no record of skill '{id}'")))
}

/// A note if the model has a signature, which a change of the file invalidates.
fn signature_note(model: &CmfContainer) -> Vec<String> {
    let signature = super::sign::path_beside(&model.shard_paths()[0]);
    match signature.exists() {
        true => vec![format!(
            "{}: no longer valid for the changed file; sign it again",
            signature.display()
        )],
        false => Vec::new(),
    }
}
