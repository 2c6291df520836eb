//! Verification of a whole model: every checksum, the structure of every payload, and that every weight is finite.

use super::container::CmfContainer;
use super::directory::Payload;
use super::file::{CmfFile, check_section};
use super::skills::{registered, replaced_by};
use crate::error::{Error, Result, bail};
use crate::format::hash::check_hash;
use crate::format::tensor::{TensorId, TensorInfo};
use rayon::prelude::*;
use std::collections::HashSet;
use std::path::Path;
use std::sync::mpsc;

/// The result of [`CmfContainer::verify`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyReport {
    /// Tensors checked.
    pub tensors: usize,
    /// Bytes of all files.
    pub bytes: u64,
    /// All failures: sections first, then skills, then tensors in directory order.
    pub failures: Vec<Failure>,
    /// Checks that were not possible because the file has no checksum.
    pub notes: Vec<String>,
}

/// A failed check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The section, the skill or the tensor.
    pub subject: String,
    /// The failure.
    pub error: Error,
}

impl Failure {
    /// Of a check of `file`.
    fn new(subject: &str, error: Error, file: &Path) -> Failure {
        Failure {
            subject: subject.to_owned(),
            error: error.context(file.display()),
        }
    }
}

impl VerifyReport {
    /// Whether there are no failures.
    pub fn ok(&self) -> bool {
        self.failures.is_empty()
    }
}

impl CmfContainer {
    /// Checks every byte that has a checksum and the inside of every payload.
    ///
    /// `progress` is called on the calling thread with the weight bytes checked so far and their total. The report lists
    /// everything that is wrong.
    pub fn verify(&self, progress: &mut dyn FnMut(u64, u64)) -> VerifyReport {
        let mut report = VerifyReport {
            tensors: self.infos().len(),
            bytes: self.file_bytes(),
            failures: Vec::new(),
            notes: Vec::new(),
        };
        for file in &self.files {
            sections(file, &mut report);
        }
        report.failures.extend(skill_failures(self));
        let total = self.infos().iter().map(|info| info.nbytes).sum();
        let (sender, receiver) = mpsc::channel();
        let failures = std::thread::scope(|scope| {
            let work = scope.spawn(move || tensors(self, &sender));
            let mut done = 0;
            // The loop ends when the worker drops its sender.
            for bytes in receiver {
                done += bytes;
                progress(done, total);
            }
            work.join()
        });
        match failures {
            Ok(failures) => report.failures.extend(failures),
            Err(panic) => std::panic::resume_unwind(panic),
        }
        report
    }
}

fn sections(file: &CmfFile, report: &mut VerifyReport) {
    if let Err(error) = file.mapped.check_length() {
        report.failures.push(Failure {
            subject: "file".into(),
            error,
        });
        return;
    }
    let envelope = &file.envelope;
    let always = [
        ("header", envelope.header, envelope.header_hash),
        ("directory", envelope.directory, envelope.directory_hash),
    ];
    // Checksums of absent sections are ignored: other writers leave stale ones.
    for (name, span, stored) in always.into_iter().chain(file.section_spans()) {
        if stored.is_none() {
            report.notes.push(format!("{}: no {name} hash", file.path().display()));
        }
        if let Err(error) = check_section(name, span, stored, file.mapped.bytes()) {
            report.failures.push(Failure::new(name, error, file.path()));
        }
    }
}

fn tensors(container: &CmfContainer, done: &mpsc::Sender<u64>) -> Vec<Failure> {
    let failure = |id: TensorId| {
        let info = &container.infos()[id];
        let result = tensor(container, id);
        container.release(id);
        // Sending fails only if the receiver is gone, which does not matter.
        let _ = done.send(info.nbytes);
        let path = &container.shard_paths()[container.payloads()[id].shard];
        let named = |err: Error| err.context(format_args!("tensor '{}'", info.name));
        result.err().map(|err| Failure::new(&info.name, named(err), path))
    };
    (0..container.infos().len())
        .into_par_iter()
        .filter_map(failure)
        .collect()
}

fn tensor(container: &CmfContainer, id: TensorId) -> Result<()> {
    let (info, Payload { offset, hash, .. }) = (&container.infos()[id], container.payloads()[id]);
    let payload = container.bytes(id)?;
    check_hash(format_args!("payload at {offset:#x}"), payload, Some(hash))?;
    check_weights(info, payload)
}

/// Checks the structure of a payload, and that its scales and weights are finite.
///
/// Errors: `Parse` for a payload that cannot be decoded; `NonFinite` with row and column.
pub(crate) fn check_weights(info: &TensorInfo, payload: &[u8]) -> Result<()> {
    let (rows, cols) = info.rows_cols();
    let decoder = info.dtype.decoder(payload, rows, cols)?;
    info.dtype.verify_scales(payload, rows, cols)?;
    let bad = (0..rows).into_par_iter().map_init(
        || vec![0f32; cols],
        |weights, row| {
            decoder.row(row, weights);
            weights
                .iter()
                .position(|weight| !weight.is_finite())
                .map(|col| (row, col, weights[col]))
        },
    );
    match bad.find_map_first(|found| found) {
        Some((row, col, value)) => bail!(NonFinite, "row {row}, column {col}: the weight is {value}"),
        None => Ok(()),
    }
}

/// Failures of a model's skills: missing masks, and tensors that do not match those they replace.
fn skill_failures(container: &CmfContainer) -> Vec<Failure> {
    let path = &container.shard_paths()[0];
    let ids: HashSet<&str> = container.skills().iter().map(|skill| skill.id.as_str()).collect();
    let masks = container.masks();
    // In a skill file, masks and replaced tensors may be those of its base.
    let is_skill = container.is_skill_file();
    let without_mask = container.skills().iter().filter_map(|skill| {
        let err = skill.mask_task(masks).err().filter(|_| !is_skill || masks.is_some())?;
        Some(Failure::new(&format!("skill '{}'", skill.id), err, path))
    });
    let infos = container.infos();
    let misplaced = infos.iter().filter(|_| !is_skill).filter_map(|info| {
        let (_, name) = registered(&ids, &info.name)?;
        let base = container.find(name).filter(|_| registered(&ids, name).is_none());
        let err = replaced_by(info, base.map(|base| (base, infos[base].shape.as_slice()))).err()?;
        Some(Failure::new(&info.name, err, path))
    });
    without_mask.chain(misplaced).collect()
}
