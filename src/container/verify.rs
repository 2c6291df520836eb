//! Checking a whole model: every checksum, the structure of every payload, every weight a finite number.

use super::cmf::{CmfFile, Container, check_hash};
use super::hash::hash64;
use super::{TensorId, Tensors, skills};
use crate::dtype::Dtype;
use crate::error::{Error, Result, bail};
use half::f16;
use rayon::prelude::*;
use std::sync::mpsc;

/// What [`Container::verify`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyReport {
    /// Tensors checked.
    pub tensors: usize,
    /// Bytes of all files.
    pub bytes: u64,
    /// Everything that is wrong: sections first, then skills, then tensors in directory order.
    pub failures: Vec<Failure>,
    /// What could not be checked because the file lacks it.
    pub notes: Vec<String>,
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The section, the skill or the tensor.
    pub subject: String,
    /// What is wrong with it.
    pub error: Error,
}

impl VerifyReport {
    /// Whether nothing is wrong.
    pub fn ok(&self) -> bool {
        self.failures.is_empty()
    }
}

pub(super) fn verify(container: &Container, progress: &mut dyn FnMut(u64, u64)) -> VerifyReport {
    let mut report = VerifyReport {
        tensors: container.infos().len(),
        bytes: container.file_bytes(),
        failures: Vec::new(),
        notes: Vec::new(),
    };
    for file in &container.files {
        sections(file, &mut report);
    }
    let skills = skills::unsound(container).into_iter();
    report.failures.extend(skills.map(|(subject, error)| Failure {
        subject,
        error: error.context(container.shard_paths()[0].display()),
    }));
    let total = container.infos().iter().map(|info| info.nbytes).sum();
    let (sender, receiver) = mpsc::channel();
    let failures = std::thread::scope(|scope| {
        let work = scope.spawn(move || tensors(container, &sender));
        let mut done = 0;
        // Ends when the work is over and its sender gone.
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

fn sections(file: &CmfFile, report: &mut VerifyReport) {
    let path = file.path().display();
    if let Err(error) = file.mapped.check_length() {
        report.failures.push(Failure {
            subject: "file".into(),
            error,
        });
        return;
    }
    let envelope = &file.envelope;
    let hashes = &file.header.section_hashes;
    let all = [
        ("header", Some(envelope.header), envelope.header_hash),
        ("directory", Some(envelope.directory), envelope.directory_hash),
        ("masks", envelope.masks, hashes.masks),
        ("vocab", envelope.vocab, hashes.vocab),
        ("index", envelope.index, hashes.index),
    ];
    for (name, span, stored) in all {
        // Checksums of absent sections are left over from another file and mean nothing.
        let Some(span) = span else { continue };
        if stored.is_none() {
            report.notes.push(format!("{path}: no {name} hash"));
        }
        if let Err(error) = check_hash(name, span, stored, file.mapped.bytes()) {
            report.failures.push(Failure {
                subject: name.into(),
                error: error.context(&path),
            });
        }
    }
}

fn tensors(container: &Container, done: &mpsc::Sender<u64>) -> Vec<Failure> {
    let failure = |id: TensorId| {
        let info = &container.infos()[id];
        let result = tensor(container, id);
        container.release(id);
        // Only the progress display can have gone away.
        let _ = done.send(info.nbytes);
        result.err().map(|err| Failure {
            subject: info.name.clone(),
            error: err.context(format_args!(
                "{}: tensor '{}'",
                container.shard_paths()[info.shard].display(),
                info.name
            )),
        })
    };
    (0..container.infos().len())
        .into_par_iter()
        .filter_map(failure)
        .collect()
}

fn tensor(container: &Container, id: TensorId) -> Result<()> {
    let info = &container.infos()[id];
    let payload = container.bytes(id)?;
    let found = hash64(payload);
    if found != info.hash {
        bail!(
            HashMismatch,
            "payload at {:#x}: stored {:016x}, found {found:016x}",
            info.offset,
            info.hash
        );
    }
    let (rows, cols) = info.rows_cols();
    let decoder = info.dtype.decoder(payload, rows, cols)?;
    if info.dtype == Dtype::Q4tp {
        ladders(payload, rows, cols)?;
    }
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
        Some((row, col, value)) => bail!(NonFinite, "row {row}, column {col}: a weight of {value}"),
        None => Ok(()),
    }
}

/// A row's ladder of q4tp scales must be finite at both ends, also where no code takes them there: a device computes
/// code·scale in f32, where 0·∞ is not 0.
fn ladders(payload: &[u8], rows: usize, cols: usize) -> Result<()> {
    let start = rows * (cols / 32) * 16;
    for (row, ladder) in payload[start..][..rows * 4].as_chunks::<4>().0.iter().enumerate() {
        let [lo, step] = [[ladder[0], ladder[1]], [ladder[2], ladder[3]]].map(|half| f16::from_le_bytes(half).to_f32());
        if ![lo, lo + 31.0 * step].iter().all(|rung| rung.exp2().is_finite()) {
            bail!(NonFinite, "row {row}: scales 2^({lo} + code·{step}) are not finite");
        }
    }
    Ok(())
}
