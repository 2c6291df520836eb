//! Skills as files: adding and removing them in place, cutting them out and putting them back (section 9 of the format).

use super::rewrite::{Part, Plan, Work, header_of, intact};
use super::{Progress, Written};
use crate::container::skills::{check_id, check_new_id};
use crate::container::{Appender, Container, Masks, NO_TASK, Sections, SkillView, TensorInfo, TensorSpec, Tensors};
use crate::convert::{Options, convert};
use crate::dtype::Dtype;
use crate::dtype::encode::{encode, storage_dtype};
use crate::error::{Error, Kind, Result, bail};
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::ops::ControlFlow;
use std::path::Path;
use tempfile::TempDir;

const TOOL: &str = concat!("cmf-gpu ", env!("CARGO_PKG_VERSION"));

/// What a new skill is called and how it is stored.
#[derive(Clone, Debug, Default)]
pub struct New {
    /// Its id.
    pub id: String,
    /// Its name, for people.
    pub name: Option<String>,
    /// The type of its matrices; `None`: a container's tensors stay as they are, others get the type of what they replace.
    pub quant: Option<Dtype>,
    /// The task whose mask goes with it, [`NO_TASK`] for the full model; `None`: the skill leaves that open.
    pub input_mask_task: Option<String>,
}

/// Adds to the model at `model`, in place, the tensors in which the model at `src` differs from its backbone.
///
/// `src` is a container or what can be converted to one, of the same network. A tensor differs when its bytes do, once it is
/// in the type of the backbone's. Until the last write the file is the old model.
///
/// Errors: `Usage` for an id that is taken or no id, a task without a mask, and when nothing differs; `MissingTensor` or `UnsupportedModel` when
/// the two are not of one network; `SkillFile` when either is no model; those of converting and of writing in place.
pub fn add(model: &Path, src: &Path, new: &New, progress: Progress) -> Result<Written> {
    check_new_id(&new.id)?;
    let base = Container::open(model)?;
    runnable(&base)?;
    if base.skills().iter().any(|skill| skill.id == new.id) {
        bail!(Usage, "there is a skill '{}' already", new.id);
    }
    match new.input_mask_task.as_deref() {
        None | Some(NO_TASK) => {}
        Some(task) => drop(base.masks().unwrap_or(&Masks::default()).find(task)?),
    }
    let prefix = format!("skill.{}.", new.id);
    if let Some(info) = base.infos().iter().find(|info| info.name.starts_with(&prefix)) {
        bail!(Usage, "tensor '{}' is there already", info.name);
    }
    let (source, temporary) = open_source(model, src, progress)?;
    runnable(&source)?;
    let backbone = SkillView::new(&base, None)?;
    let changed = SkillView::new(&source, None)?;
    same_network(&backbone, &changed)?;

    let mut file = Appender::open(&base.shard_paths()[0])?;
    let mut work = Work::new(changed.infos().iter().map(|info| info.nbytes).sum(), progress);
    let mut names = Vec::new();
    for (id, info) in backbone.infos().iter().enumerate() {
        // `same_network` has looked.
        let Some(other) = changed.find(&info.name) else {
            continue;
        };
        let from = &changed.infos()[other];
        let bytes = changed.bytes(other)?;
        intact(&info.name, bytes, from.hash)?;
        let stored = replacement(
            (info, backbone.bytes(id)?),
            (from, bytes),
            new.quant,
            temporary.is_some(),
        );
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
    let mut record = Map::new();
    record.insert("id".into(), new.id.clone().into());
    record.insert("name".into(), new.name.clone().into());
    record.insert("layers".into(), layers(&names).into());
    record.insert("input_mask_task".into(), new.input_mask_task.clone().into());
    record.insert("quality".into(), Value::Null);
    let file_name = src.file_name().map(|name| name.to_string_lossy().into_owned());
    record.insert(
        "provenance".into(),
        json!({"tool": format!("{TOOL} skill add"), "source": file_name, "tensors": names.len()}),
    );
    let mut header = file.header_json().clone();
    registry(&mut header)?.push(record.into());
    let tensors = names.len();
    let mut notes = signature_note(&base);
    // Nothing reads the old file while its envelope changes.
    drop((backbone, changed));
    drop((base, source));
    let before = file.bytes_before();
    let bytes = file.finish(header, &|_| false)?;
    notes.extend(temporary.map(|(_, notes)| notes).unwrap_or_default());
    Ok(Written {
        tensors,
        bytes: bytes.saturating_sub(before),
        notes,
    })
}

/// Takes a skill out of the registry and its tensors out of the directory, in place. Their bytes stay until the file is
/// compacted.
///
/// Errors: `Usage` for an id that is not there, and for a skill with tensors in another file than the first of several; those
/// of writing in place.
pub fn remove(model: &Path, id: &str) -> Result<Written> {
    let container = Container::open(model)?;
    runnable(&container)?;
    SkillView::new(&container, Some(id))?;
    let prefix = format!("skill.{id}.");
    let own = |info: &&TensorInfo| info.name.starts_with(&prefix);
    let tensors = container.infos().iter().filter(own).count();
    if container.infos().iter().filter(own).any(|info| info.shard != 0) {
        bail!(
            Usage,
            "skill '{id}' has tensors in other files than the first, which is the one that changes; compact the model first"
        );
    }
    let notes = signature_note(&container);
    let path = container.shard_paths()[0].clone();
    drop(container);
    let file = Appender::open(&path)?;
    let mut header = file.header_json().clone();
    registry(&mut header)?.retain(|record| record.get("id").and_then(Value::as_str) != Some(id));
    let before = file.bytes_before();
    let bytes = file.finish(header, &|name| name.starts_with(&prefix))?;
    Ok(Written {
        tensors,
        bytes: bytes.saturating_sub(before),
        notes,
    })
}

/// Writes a skill file: what turns the model at `base` into the one at `model` with its skill `id` active, or, where it has
/// no such skill, into the whole of it.
///
/// Errors: `Usage` when nothing differs, or the base is in several files; `UnsupportedModel` or `MissingTensor` when the two
/// are not of one network; `SkillFile` when either is no model; `HashMismatch` for damage; `Io`.
pub fn export(model: &Path, id: &str, base: &Path, out: &Path, progress: Progress) -> Result<Written> {
    check_id(id)?;
    let (name, model, base) = (model.file_name(), Container::open(model)?, Container::open(base)?);
    runnable(&model)?;
    runnable(&base)?;
    let known = model.skills().iter().position(|skill| skill.id == id);
    if known.is_none() {
        check_new_id(id)?;
    }
    // An unknown name is the model's own difference only where it cannot be a mistake for one of its skills.
    let specialist = SkillView::new(&model, (!model.skills().is_empty()).then_some(id))?;
    let backbone = SkillView::new(&base, None)?;
    same_network(&backbone, &specialist)?;
    if model.header().arch != base.header().arch {
        bail!(
            UnsupportedModel,
            "the base describes another network than the model (arch differs)"
        );
    }
    let mut parts = Vec::new();
    for (of_base, info) in backbone.infos().iter().enumerate() {
        let Some(other) = specialist.find(&info.name) else {
            continue;
        };
        let from = &specialist.infos()[other];
        if from.dtype != info.dtype || specialist.bytes(other)? != backbone.bytes(of_base)? {
            parts.push(Part::copy(&specialist, other, from));
        }
        backbone.release(of_base);
        specialist.release(other);
    }
    let (own, bases) = (model.sections()?, base.sections()?);
    let masks = own.masks.filter(|_| own.masks != bases.masks);
    if parts.is_empty() && masks.is_none() {
        bail!(Usage, "the model differs from its base in no tensor");
    }
    let mut notes = Vec::new();
    if own.masks.is_none() && bases.masks.is_some() {
        notes.push("the base has masks, which stay when the skill is applied; the model has none".to_owned());
    }

    let mut record = match known.and_then(|at| model.header().skills.get(at)) {
        Some(Value::Object(record)) => record.clone(),
        _ => Map::from_iter([("id".to_owned(), Value::from(id))]),
    };
    let names: Vec<&str> = parts.iter().map(|part| part.spec.name.as_str()).collect();
    if !record.contains_key("layers") {
        record.insert("layers".into(), layers(&names).into());
    }
    record.insert(
        "base_dir_hash".into(),
        format!("{:016x}", base.directory_hash()?).into(),
    );
    record.insert("base_arch".into(), base.header().arch.arch_name.clone().into());
    let own_task = record.get("input_mask_task").and_then(Value::as_str);
    let default_task = model.masks().and_then(|masks| masks.default_task.as_deref());
    let task = Value::from(own_task.or(default_task).unwrap_or("general"));
    record.entry("task").or_insert(task);
    let provenance = json!({
        "tool": format!("{TOOL} skill export"),
        "cut_from": name.map(|name| name.to_string_lossy().into_owned()),
        "tensors": parts.len(),
        "made_by": record.get("provenance"),
    });
    record.insert("provenance".into(), crate::container::json::without_nulls(&provenance));
    let mut header = header_of(&model);
    header.insert("skills".into(), vec![Value::Object(record)].into());
    let plan = Plan {
        header,
        parts,
        sections: Sections {
            masks,
            ..Sections::default()
        },
        by_pass: model.has_loop_masks(),
    };
    let bytes = plan.write_one(&[&model, &base], out, progress)?;
    Ok(Written {
        tensors: plan.parts.len(),
        bytes,
        notes,
    })
}

/// Writes the model that the skill file `skill` makes of the model at `base`. `force` accepts another base than the one the
/// skill was cut against; what comes out is then anybody's guess.
///
/// Errors: `SkillFile` for a file that is no skill, another base, or a base that is a skill; `MissingTensor` or
/// `UnsupportedModel` for a tensor that the base does not have, or in another shape; `Usage` when the base has a skill of
/// that id; `Parse` for a skill that goes with a mask that neither has; `HashMismatch` for damage; `Io`.
pub fn apply(base: &Path, skill: &Path, out: &Path, force: bool, progress: Progress) -> Result<Written> {
    let (base, skill) = (Container::open(base)?, Container::open(skill)?);
    runnable(&base)?;
    if !skill.header().has_bound_skill() {
        bail!(SkillFile, "{}: no skill file", skill.shard_paths()[0].display());
    }
    let mut notes = Vec::new();
    for record in skill.skills() {
        let Some(wanted) = record.base_dir_hash.filter(|_| !force) else {
            continue;
        };
        let found = base.directory_hash()?;
        if found != wanted {
            bail!(
                SkillFile,
                "skill '{}' was cut against another base: it wants one with directory hash {wanted:016x}, this one has \
                 {found:016x}",
                record.id
            );
        }
    }
    if force {
        notes.push("whether the skill belongs to this base was not checked".to_owned());
    }
    let mut header = header_of(&base);
    let records = registry(&mut header)?;
    for (record, typed) in skill.header().skills.iter().zip(skill.skills()) {
        if base.skills().iter().any(|known| known.id == typed.id) {
            bail!(Usage, "the base has a skill '{}' already", typed.id);
        }
        let mut record = record.clone();
        if let Value::Object(members) = &mut record {
            members.shift_remove("base_dir_hash");
        }
        records.push(record);
    }
    for info in skill.infos() {
        let Some(id) = base.find(&info.name) else {
            bail!(
                MissingTensor,
                "the skill replaces '{}', which the base does not have",
                info.name
            );
        };
        let shape = &base.infos()[id].shape;
        if *shape != info.shape {
            bail!(
                UnsupportedModel,
                "the skill replaces '{}' with shape {:?}, the base has {shape:?}",
                info.name,
                info.shape
            );
        }
    }
    let masks = skill.masks().or(base.masks());
    for record in skill.skills() {
        if let Some(task) = record.mask_task(masks)? {
            notes.push(format!(
                "skill '{0}' goes with the task '{task}': --skill {0} brings it, and so does --task {task}",
                record.id
            ));
        }
    }
    let part = |(id, info): (usize, &TensorInfo)| match skill.find(&info.name) {
        Some(other) => Part::copy(&skill, other, &skill.infos()[other]),
        None => Part::copy(&base, id, info),
    };
    let (bases, own) = (base.sections()?, skill.sections()?);
    let (masks, index, by_pass) = match own.masks {
        // The base's index speaks of the base's masks.
        Some(masks) => (Some(masks), None, skill.has_loop_masks()),
        None => (bases.masks, bases.index, base.has_loop_masks()),
    };
    let plan = Plan {
        header,
        parts: base.infos().iter().enumerate().map(part).collect(),
        sections: Sections {
            vocab: bases.vocab,
            masks,
            index,
        },
        by_pass,
    };
    let bytes = plan.write_one(&[&base, &skill], out, progress)?;
    Ok(Written {
        tensors: plan.parts.len(),
        bytes,
        notes,
    })
}

/// Errors: `SkillFile`.
fn runnable(model: &Container) -> Result<()> {
    if model.is_skill_file() {
        bail!(
            SkillFile,
            "{}: a skill file, wanted a model",
            model.shard_paths()[0].display()
        );
    }
    Ok(())
}

/// A directory and what a conversion into it said.
type Temporary = (TempDir, Vec<String>);

/// The source as a container; what is none becomes one of 32-bit weights beside the model, which goes with its directory.
fn open_source(model: &Path, src: &Path, progress: Progress) -> Result<(Container, Option<Temporary>)> {
    let is_container = src.is_file() && starts_with_magic(src)?;
    if is_container {
        return Ok((Container::open(src)?, None));
    }
    let parent = model.parent().filter(|parent| !parent.as_os_str().is_empty());
    let dir = tempfile::Builder::new()
        .prefix(".cmf-")
        .tempdir_in(parent.unwrap_or(Path::new(".")))
        .map_err(|err| Error::io(model, &err))?;
    let out = dir.path().join("source.cmf");
    let report = convert(
        src,
        &out,
        &Options::new(Dtype::F32),
        &mut |_| match progress(0, 1).is_break() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        },
    )?;
    Ok((Container::open(&out)?, Some((dir, report.dropped))))
}

fn starts_with_magic(path: &Path) -> Result<bool> {
    use std::io::Read;
    let io = |err: std::io::Error| Error::io(path, &err);
    let mut start = Vec::new();
    let file = std::fs::File::open(path).map_err(io)?;
    file.take(3).read_to_end(&mut start).map_err(io)?;
    Ok(start == b"CMF")
}

/// Errors: `MissingTensor`, `UnsupportedModel`: the two sets must have the same names and shapes.
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

/// What a skill stores for a tensor; `None` when the backbone has the same.
///
/// `imported`: the source's own type means nothing, it was made here.
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

/// A payload in another type.
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

/// The layers that tensors belong to, ascending.
fn layers(names: &[&str]) -> Vec<u32> {
    let layer = |name: &&str| name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok();
    let mut layers: Vec<u32> = names.iter().filter_map(layer).collect();
    layers.sort_unstable();
    layers.dedup();
    layers
}

/// The registry in a header. Errors: `Parse` when something else is in its place.
fn registry(header: &mut Map<String, Value>) -> Result<&mut Vec<Value>> {
    let value = header.entry("skills").or_insert(Value::Null);
    if value.is_null() {
        *value = Value::Array(Vec::new());
    }
    value
        .as_array_mut()
        .ok_or_else(|| Error::new(Kind::Parse, "header.skills: wanted an array"))
}

/// A signature is one of the bytes before.
pub(super) fn signature_note(model: &Container) -> Vec<String> {
    let signature = super::sign::path_beside(&model.shard_paths()[0]);
    match signature.exists() {
        true => vec![format!(
            "{}: no longer fits the file, sign it again",
            signature.display()
        )],
        false => Vec::new(),
    }
}
