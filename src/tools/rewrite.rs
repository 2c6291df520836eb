//! A new file out of tensors of others: what all tools that write whole files share.

use super::Progress;
use crate::container::not_the_output;
use crate::container::{Container, Sections, TensorId, TensorInfo, TensorSpec, Tensors, Writer, hash64};
use crate::error::{Result, bail};
use serde_json::{Map, Value};
use std::path::Path;

/// Makes a new payload of an old one.
pub(super) type Change<'a> = Box<dyn Fn(&[u8]) -> Result<Vec<u8>> + 'a>;

/// Takes a payload, and its checksum where it is what was stored.
pub(super) type Put<'a> = &'a mut dyn FnMut(&[u8], Option<u64>) -> Result<()>;

/// One tensor of the result and where it comes from.
pub(super) struct Part<'a> {
    pub spec: TensorSpec,
    pub from: &'a dyn Tensors,
    pub id: TensorId,
    /// `None`: the payload is copied.
    pub change: Option<Change<'a>>,
}

impl<'a> Part<'a> {
    /// The tensor as it is.
    pub fn copy(from: &'a dyn Tensors, id: TensorId, info: &TensorInfo) -> Part<'a> {
        Part {
            spec: spec(info),
            from,
            id,
            change: None,
        }
    }

    /// Bytes that are read for it.
    pub fn source_bytes(&self) -> u64 {
        self.from.infos().get(self.id).map_or(0, |info| info.nbytes)
    }

    /// Hands the payload to `put`. Errors: those of `put`; `HashMismatch`.
    fn write(&self, put: Put) -> Result<()> {
        let bytes = self.from.bytes(self.id)?;
        let stored = self.from.infos().get(self.id).map_or(0, |info| info.hash);
        match &self.change {
            None => put(bytes, Some(stored))?,
            Some(change) => {
                intact(&self.spec.name, bytes, stored)?;
                let payload = change(bytes).map_err(|err| err.context(format_args!("tensor '{}'", self.spec.name)))?;
                put(&payload, None)?;
            }
        }
        self.from.release(self.id);
        Ok(())
    }
}

/// What a new file is made of.
pub(super) struct Plan<'a> {
    pub header: Map<String, Value>,
    pub parts: Vec<Part<'a>>,
    pub sections: Sections<'a>,
    /// Whether the masks have rows for every pass.
    pub by_pass: bool,
}

impl Plan<'_> {
    /// Bytes that are read for all of it.
    fn source_bytes(&self) -> u64 {
        self.parts.iter().map(Part::source_bytes).sum()
    }

    /// Writes one whole file that replaces none of the `inputs`. Returns its length.
    pub fn write_one(&self, inputs: &[&Container], out: &Path, progress: Progress) -> Result<u64> {
        for input in inputs {
            keep(input, out)?;
        }
        let specs = self.parts.iter().map(|part| part.spec.clone()).collect();
        let mut writer = Writer::create(out, self.header.clone(), specs, self.sections)?;
        if self.by_pass && self.sections.masks.is_some() {
            writer = writer.with_loop_masks()?;
        }
        self.each(progress, &mut |payload, stored| match stored {
            Some(stored) => writer.copy(payload, stored),
            None => writer.write(payload),
        })?;
        writer.finish()
    }

    /// Hands every payload to `put`, in order. Errors: those of [`Part::write`]; `Usage` when the work is to end.
    pub fn each(&self, progress: Progress, put: Put) -> Result<()> {
        let mut work = Work::new(self.source_bytes(), progress);
        for part in &self.parts {
            part.write(put)?;
            work.advance(part.source_bytes())?;
        }
        Ok(())
    }
}

/// How far the work is.
pub(super) struct Work<'a> {
    done: u64,
    total: u64,
    progress: Progress<'a>,
}

impl<'a> Work<'a> {
    pub fn new(total: u64, progress: Progress<'a>) -> Work<'a> {
        Work {
            done: 0,
            total,
            progress,
        }
    }

    /// So many bytes more are done. Errors: `Interrupted` when the work is to end.
    pub fn advance(&mut self, bytes: u64) -> Result<()> {
        self.done += bytes;
        match (self.progress)(self.done, self.total).is_break() {
            true => bail!(Interrupted, "cancelled"),
            false => Ok(()),
        }
    }
}

/// The same tensor, to be written.
pub(super) fn spec(info: &TensorInfo) -> TensorSpec {
    TensorSpec {
        name: info.name.clone(),
        dtype: info.dtype,
        shape: info.shape.clone(),
    }
}

/// Errors: `Usage` when `out` is one of the files of `input`.
fn keep(input: &Container, out: &Path) -> Result<()> {
    input
        .shard_paths()
        .iter()
        .try_for_each(|path| not_the_output(path, out))
}

/// Errors: `HashMismatch` when bytes are not those that a checksum was made of.
pub(super) fn intact(name: &str, bytes: &[u8], stored: u64) -> Result<()> {
    let found = hash64(bytes);
    if found != stored {
        bail!(
            HashMismatch,
            "payload of tensor '{name}': stored {stored:016x}, found {found:016x}"
        );
    }
    Ok(())
}

/// The header of a model, without what describes its old files.
pub(super) fn header_of(model: &Container) -> Map<String, Value> {
    let mut header = model.header_json().clone();
    header.retain(|key, _| key != "shard");
    header
}

/// The member `name` of a JSON object, an object itself; made when it is not there.
pub(super) fn object<'a>(map: &'a mut Map<String, Value>, name: &str) -> Result<&'a mut Map<String, Value>> {
    let value = map.entry(name).or_insert(Value::Null);
    if value.is_null() {
        *value = Value::Object(Map::new());
    }
    match value {
        Value::Object(object) => Ok(object),
        other => bail!(
            Parse,
            "header.{name}: wanted an object, found {}",
            crate::container::json::kind_of(other)
        ),
    }
}
