//! Tools that write files: the result is the same model, apart from the requested change.

mod copies;
mod experts;
mod neurons;
mod shards;
mod skills;

use super::fixture;
use cmf_gpu::format::TensorSpec;
use cmf_gpu::format::cmf::{CmfContainer, CmfWriter, Sections};
use cmf_gpu::source::{TensorInfo, Tensors};
use cmf_gpu::tools::diff::diff;
use serde_json::Value;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

pub fn interop(name: &str) -> PathBuf {
    fixture("interop").join(name)
}

pub fn go_on(_: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Opens a file that must verify without failures and notes.
pub fn sound(path: &Path) -> CmfContainer {
    let container = CmfContainer::open(path).unwrap();
    let report = container.verify(&mut |_, _| ());
    assert!(report.ok() && report.notes.is_empty(), "{report:?}");
    container
}

fn same(a: &Path, b: &Path) {
    let found = diff(&sound(a), &CmfContainer::open(b).unwrap()).unwrap();
    assert!(found.is_empty(), "{found:?}");
}

fn entries(dir: &Path) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

/// A writable copy of a fixture.
fn copy(dir: &TempDir, name: &str) -> PathBuf {
    let to = dir.path().join(name);
    std::fs::write(&to, std::fs::read(interop(name)).unwrap()).unwrap();
    to
}

fn payload(container: &CmfContainer, name: &str) -> Vec<u8> {
    let id = container.find(name).unwrap_or_else(|| panic!("{name}"));
    container.bytes(id).unwrap().to_vec()
}

/// The rows of a tensor.
fn weights(tensors: &dyn Tensors, name: &str) -> Vec<Vec<f32>> {
    let id = tensors.find(name).unwrap_or_else(|| panic!("{name}"));
    let stored = tensors.stored(id).unwrap();
    let (rows, cols) = stored.info.rows_cols();
    let decoder = stored.decoder().unwrap();
    let row = |row| {
        let mut weights = vec![0f32; cols];
        decoder.row(row, &mut weights);
        weights
    };
    (0..rows).map(row).collect()
}

/// Writes the model at `from` to `out`, with a changed header, optionally other masks, and more tensors.
fn rewritten(from: &Path, out: &Path, change: impl FnOnce(&mut Value), masks: Option<&[u8]>, more: &[More]) {
    let model = CmfContainer::open(from).unwrap();
    let mut header = Value::Object(model.header_json().clone());
    change(&mut header);
    let spec = |info: &TensorInfo| TensorSpec {
        name: info.name.clone(),
        dtype: info.dtype,
        shape: info.shape.clone(),
    };
    let specs = model
        .infos()
        .iter()
        .map(spec)
        .chain(more.iter().map(|more| more.0.clone()));
    let sections = Sections {
        masks: masks.or(model.masks_section()),
        vocab: model.tokenizer_json(),
        index: None,
    };
    let header = header.as_object().unwrap().clone();
    let mut writer = CmfWriter::create(out, header, specs.collect(), sections).unwrap();
    (0..model.infos().len()).for_each(|id| writer.write(model.bytes(id).unwrap()).unwrap());
    more.iter().for_each(|more| writer.write(&more.1).unwrap());
    writer.finish().unwrap();
}

/// A tensor and its payload.
type More = (TensorSpec, Vec<u8>);
