//! Writing a new file from tensors of existing models: shared by all tools that write whole files.

use super::{Progress, Written};
use crate::error::{Result, bail};
use crate::format::cmf::{CmfContainer, CmfWriter, Sections};
use crate::format::json::kind_of;
use crate::format::{TensorId, TensorSpec, check_hash, not_the_output};
use serde_json::{Map, Value};
use std::path::Path;

/// Computes a new payload from an old one.
pub(super) type Change<'a> = Box<dyn Fn(&[u8]) -> Result<Vec<u8>> + 'a>;

/// Receives a payload, with its stored checksum if it is a copy.
pub(super) type Put<'a> = &'a mut dyn FnMut(&[u8], Option<u64>) -> Result<()>;

/// A tensor of the new file and its origin.
pub(super) struct NewTensor<'a> {
    pub spec: TensorSpec,
    pub from: &'a CmfContainer,
    pub id: TensorId,
    /// `None`: the payload is copied.
    pub change: Option<Change<'a>>,
}

impl<'a> NewTensor<'a> {
    /// A copy of the tensor.
    pub fn copy(from: &'a CmfContainer, id: TensorId) -> NewTensor<'a> {
        NewTensor {
            spec: TensorSpec::from(&from.infos()[id]),
            from,
            id,
            change: None,
        }
    }

    /// Bytes to read for this tensor.
    pub fn source_bytes(&self) -> u64 {
        self.from.infos()[self.id].nbytes
    }

    /// Passes the payload to `put`. Errors: those of `put`; `HashMismatch`.
    fn write(&self, put: Put) -> Result<()> {
        let bytes = self.from.bytes(self.id)?;
        let stored = self.from.payloads()[self.id].hash;
        match &self.change {
            None => put(bytes, Some(stored))?,
            Some(change) => {
                let name = &self.spec.name;
                check_hash(format_args!("payload of tensor '{name}'"), bytes, Some(stored))?;
                let payload = change(bytes).map_err(|err| err.context(format_args!("tensor '{name}'")))?;
                put(&payload, None)?;
            }
        }
        self.from.release(self.id);
        Ok(())
    }
}

/// The contents of a new file.
pub(super) struct NewFile<'a> {
    pub header: Map<String, Value>,
    pub tensors: Vec<NewTensor<'a>>,
    pub sections: Sections<'a>,
    /// Whether masks have a row for every loop of every layer.
    pub per_loop: bool,
}

impl<'a> NewFile<'a> {
    /// A file with the tokenizer of a model, but without its masks.
    pub fn unmasked(
        model: &'a CmfContainer,
        header: Map<String, Value>,
        tensors: Vec<NewTensor<'a>>,
    ) -> Result<NewFile<'a>> {
        let (vocab, masks, index) = (model.sections()?.vocab, None, None);
        let sections = Sections { vocab, masks, index };
        Ok(NewFile {
            header,
            tensors,
            sections,
            per_loop: false,
        })
    }

    /// Bytes to read for all tensors.
    fn source_bytes(&self) -> u64 {
        self.tensors.iter().map(NewTensor::source_bytes).sum()
    }

    /// Writes the file to `out`. Errors: `Usage` if it would replace one of `inputs`; those of writing.
    pub fn write(
        &self,
        inputs: &[&CmfContainer],
        out: &Path,
        notes: Vec<String>,
        progress: Progress,
    ) -> Result<Written> {
        for path in inputs.iter().flat_map(|input| input.shard_paths()) {
            not_the_output(path, out)?;
        }
        let specs = self.tensors.iter().map(|tensor| tensor.spec.clone()).collect();
        let mut writer = CmfWriter::create(out, self.header.clone(), specs, self.sections)?;
        if self.per_loop && self.sections.masks.is_some() {
            writer = writer.with_loop_masks()?;
        }
        self.each(progress, &mut |payload, stored| writer.put(payload, stored))?;
        Ok(Written {
            tensors: self.tensors.len(),
            bytes: writer.finish()?.bytes,
            notes,
        })
    }

    /// Passes every payload to `put`, in order. Errors: those of [`NewTensor::write`]; `Interrupted` if `progress` cancels.
    pub fn each(&self, progress: Progress, put: Put) -> Result<()> {
        let mut work = Work::new(self.source_bytes(), progress);
        for tensor in &self.tensors {
            tensor.write(put)?;
            work.advance(tensor.source_bytes())?;
        }
        Ok(())
    }
}

/// The progress of a tool.
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

    /// Reports that `bytes` more bytes are done. Errors: `Interrupted` if the work is cancelled.
    pub fn advance(&mut self, bytes: u64) -> Result<()> {
        self.done += bytes;
        match (self.progress)(self.done, self.total).is_break() {
            true => bail!(Interrupted, "cancelled"),
            false => Ok(()),
        }
    }
}

/// The header of a model, without its shard number.
pub(super) fn header_of(model: &CmfContainer) -> Map<String, Value> {
    let mut header = model.header_json().clone();
    header.retain(|key, _| key != "shard");
    header
}

/// The object that is member `name` of `map`; created if absent. Errors: `Parse` if the member is not an object.
pub(super) fn object<'a>(map: &'a mut Map<String, Value>, name: &str) -> Result<&'a mut Map<String, Value>> {
    let value = map.entry(name).or_insert(Value::Null);
    if value.is_null() {
        *value = Value::Object(Map::new());
    }
    match value {
        Value::Object(object) => Ok(object),
        other => bail!(Parse, "header.{name}: expected an object, found {}", kind_of(other)),
    }
}
