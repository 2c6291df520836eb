//! Growing a file in place (section 9 of the format): existing bytes never move.
//!
//! New payloads are appended, then a new directory, header and index. After a sync, the 128 bytes of the envelope are
//! replaced in one write. Before that write the file is the old model followed by unused bytes; after it, the new model.

use super::directory::{self, Entry, TENSOR_ALIGN};
use super::envelope::{Envelope, LOOP_MASKS, Span};
use super::file::CmfFile;
use super::head::Head;
use super::sections::PerSection;
use crate::error::{Error, Result, bail};
use crate::format::hash::hash64;
use crate::format::tensor::TensorSpec;
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;

/// What an [`Appender`] writes to: a file, or in tests a record of the operations.
pub trait Disk {
    /// Writes `bytes` at `offset`.
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Returns after everything written so far is on the disk.
    fn sync(&mut self) -> io::Result<()>;
    /// Shortens the file to `len` bytes.
    fn cut(&mut self, len: u64) -> io::Result<()>;
}

impl Disk for File {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.seek(SeekFrom::Start(offset))?;
        self.write_all(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }

    fn cut(&mut self, len: u64) -> io::Result<()> {
        self.set_len(len)
    }
}

/// Adds tensors to a file in place, or removes names from its directory. If dropped before [`Appender::finish`], it leaves
/// the file unchanged.
pub struct Appender<D: Disk = File> {
    old: CmfFile,
    disk: D,
    entries: Vec<Entry>,
    names: HashSet<String>,
    /// The end of the written bytes.
    end: u64,
    /// The end of the weight blob, which grows with every added tensor.
    data_end: u64,
    /// Whether dropping this value restores the old file.
    undo: bool,
}

impl Appender {
    /// Opens the file that is to grow.
    ///
    /// Errors: those of [`CmfContainer::open`](super::CmfContainer::open); `Io` if it cannot be written or another program is
    /// changing it.
    pub fn open(path: &Path) -> Result<Appender> {
        let io = |err: io::Error| Error::io(path, &err);
        let old = CmfFile::open(path)?;
        let disk = OpenOptions::new().read(true).write(true).open(path).map_err(io)?;
        match disk.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!(Io, "{}: another program is changing it", path.display()),
            Err(TryLockError::Error(err)) => return Err(io(err)),
        }
        // The file must not have changed between reading and locking it.
        if disk.metadata().map_err(io)?.len() != old.mapped.len() {
            bail!(Io, "{}: another program has changed it", path.display());
        }
        Appender::new(old, disk)
    }
}

impl<D: Disk> Appender<D> {
    fn new(mut old: CmfFile, disk: D) -> Result<Appender<D>> {
        let Span { off, len } = old.envelope.data;
        let Some(data_end) = off.checked_add(len) else {
            bail!(
                Bounds,
                "the end of the weight blob at {off:#x} with {len} bytes overflows"
            );
        };
        let entries = std::mem::take(&mut old.entries);
        Ok(Appender {
            names: entries.iter().map(|entry| entry.info.name.clone()).collect(),
            entries,
            end: old.mapped.len(),
            data_end,
            old,
            disk,
            undo: true,
        })
    }

    /// The current header.
    pub fn header_json(&self) -> &Map<String, Value> {
        &self.old.header_json
    }

    /// Bytes of the file before the change.
    pub fn bytes_before(&self) -> u64 {
        self.old.mapped.len()
    }

    fn put(&mut self, bytes: &[u8]) -> Result<Span> {
        let span = Span {
            off: self.end,
            len: bytes.len() as u64,
        };
        let written = self.disk.write_at(span.off, bytes);
        written.map_err(|err| Error::io(self.old.path(), &err))?;
        self.end += span.len;
        Ok(span)
    }

    /// Appends a tensor.
    ///
    /// Errors: `Usage` for a name or shape that the directory cannot hold, and for a name that exists; `Parse` for a length
    /// that type and shape do not allow; `Io`.
    pub fn add(&mut self, tensor: TensorSpec, payload: &[u8]) -> Result<()> {
        directory::check_writable(&tensor.name, tensor.dtype, &tensor.shape)?;
        let mut entry = Entry::unwritten(tensor);
        entry.check_length(payload)?;
        let name = &entry.info.name;
        if !self.names.insert(name.clone()) {
            bail!(Usage, "tensor '{name}' exists already");
        }
        let blob = self.old.envelope.data.off;
        // An empty weight blob may start past the end of the file.
        self.end = self.end.max(blob).next_multiple_of(TENSOR_ALIGN);
        let span = self.put(payload)?;
        self.data_end = self.end.next_multiple_of(TENSOR_ALIGN);
        entry.place(span.off - blob, span.len, hash64(payload));
        self.entries.push(entry);
        Ok(())
    }

    /// Turns the file into the new model, with the added tensors, without those that `drop` selects, and with this header.
    /// Returns its length in bytes.
    ///
    /// Errors: `Parse` for a header that opening would refuse, `HashMismatch` for a damaged optional section, `Io`.
    pub fn finish(mut self, header: Map<String, Value>, drop: &dyn Fn(&str) -> bool) -> Result<u64> {
        self.entries.retain(|entry| !drop(&entry.info.name));
        let old = self.old.envelope.clone();
        let sections = self.old.sections()?;
        let index = sections.index.map(<[u8]>::to_vec);
        let loop_masks = old.features & LOOP_MASKS != 0;
        let Head { header, features, .. } = Head::new(header, &self.entries, sections, loop_masks)?;
        let directory = directory::to_bytes(&self.entries);
        // The blob, with its padding, must end inside the file.
        self.end = self.end.max(self.data_end);
        let envelope = Envelope {
            features,
            directory: self.put(&directory)?,
            header: self.put(&header)?,
            sections: PerSection {
                index: index.map(|bytes| self.put(&bytes)).transpose()?,
                ..old.sections
            },
            data: Span {
                off: old.data.off,
                len: self.data_end - old.data.off,
            },
            header_hash: Some(hash64(&header)),
            directory_hash: Some(hash64(&directory)),
        };
        let io = |err: io::Error| Error::io(self.old.path(), &err);
        self.disk.sync().map_err(io)?;
        // From here on the file may be either model, and both are complete.
        self.undo = false;
        self.disk.write_at(0, &envelope.to_bytes()).map_err(io)?;
        self.disk.sync().map_err(io)?;
        Ok(self.end)
    }
}

impl<D: Disk> Drop for Appender<D> {
    fn drop(&mut self) {
        if self.undo && self.end > self.old.mapped.len() {
            // If the tail cannot be removed, it does no harm.
            let _ = self.disk.cut(self.old.mapped.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::format::cmf::{CmfContainer, CmfWriter, Sections};
    use serde_json::json;
    use std::cell::RefCell;
    use std::rc::Rc;

    #[derive(Clone)]
    enum Op {
        Write(u64, Vec<u8>),
        Sync,
        Cut(u64),
    }

    /// Records the operations, and fails operation number `fails`.
    struct Recorder {
        ops: Rc<RefCell<Vec<Op>>>,
        fails: usize,
    }

    impl Recorder {
        fn record(&self, op: Op) -> io::Result<()> {
            let mut ops = self.ops.borrow_mut();
            if ops.len() == self.fails {
                return Err(io::Error::other("the disk is full"));
            }
            ops.push(op);
            Ok(())
        }
    }

    impl Disk for Recorder {
        fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
            self.record(Op::Write(offset, bytes.to_vec()))
        }

        fn sync(&mut self) -> io::Result<()> {
            self.record(Op::Sync)
        }

        fn cut(&mut self, len: u64) -> io::Result<()> {
            self.ops.borrow_mut().push(Op::Cut(len));
            Ok(())
        }
    }

    fn header() -> Map<String, Value> {
        let header = json!({"arch": {
            "arch_name": "sample", "hidden_size": 64, "intermediate_size": 128, "num_layers": 1, "num_attention_heads": 4,
            "num_kv_heads": 2, "head_dim": 16, "vocab_size": 32, "layer_types": ["FullAttention"], "rms_norm_eps": 1e-6
        }});
        header.as_object().unwrap().clone()
    }

    fn spec(name: &str) -> TensorSpec {
        TensorSpec {
            name: name.into(),
            dtype: Dtype::F16,
            shape: vec![3],
        }
    }

    /// A file with one tensor and an index.
    fn old(path: &Path) -> Vec<u8> {
        let sections = Sections {
            vocab: Some(b"{\"v\":1}"),
            masks: None,
            index: Some(&[0; 8]),
        };
        let mut writer = CmfWriter::create(path, header(), vec![spec("t")], sections).unwrap();
        writer.write(&[1; 6]).unwrap();
        writer.finish().unwrap();
        std::fs::read(path).unwrap()
    }

    fn grow(path: &Path, fails: usize) -> (Result<u64>, Vec<Op>) {
        let ops = Rc::new(RefCell::new(Vec::new()));
        let disk = Recorder {
            ops: ops.clone(),
            fails,
        };
        let mut growth = Appender::new(CmfFile::open(path).unwrap(), disk).unwrap();
        let mut header = header();
        header.insert("skills".into(), json!([{"id": "s"}]));
        let result = growth
            .add(spec("skill.s.t"), &[2; 6])
            .and_then(|()| growth.add(spec("u"), &[3; 6]))
            .and_then(|()| growth.finish(header, &|_| false));
        let ops = ops.borrow().clone();
        (result, ops)
    }

    fn apply(file: &mut Vec<u8>, op: &Op, most: usize) {
        match op {
            Op::Write(at, bytes) => {
                let at = *at as usize;
                let bytes = &bytes[..bytes.len().min(most)];
                file.resize(file.len().max(at + bytes.len()), 0);
                file[at..at + bytes.len()].copy_from_slice(bytes);
            }
            Op::Sync => {}
            Op::Cut(len) => file.truncate(*len as usize),
        }
    }

    /// The tensors of a valid file.
    fn tensors(path: &Path, file: &[u8]) -> Vec<(String, Vec<u8>)> {
        std::fs::write(path, file).unwrap();
        let container = CmfContainer::open(path).unwrap();
        let report = container.verify(&mut |_, _| ());
        assert!(report.ok(), "{:?}", report.failures);
        assert_eq!(container.tokenizer_json(), Some(&b"{\"v\":1}"[..]));
        assert_eq!(container.index().map(<[_]>::len), Some(0));
        let infos = container.infos().iter().enumerate();
        infos
            .map(|(id, info)| (info.name.clone(), container.bytes(id).unwrap().to_vec()))
            .collect()
    }

    #[test]
    fn an_interruption_at_any_moment_leaves_the_old_or_the_new_model() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("old.cmf"), dir.path().join("cut.cmf"));
        let before = old(&path);
        let was = tensors(&other, &before);
        let (result, ops) = grow(&path, usize::MAX);
        result.unwrap();
        // Everything except the envelope is appended and synced before the envelope changes.
        let [tail @ .., Op::Sync, Op::Write(0, envelope), Op::Sync] = ops.as_slice() else {
            panic!("wrong order of {} operations", ops.len())
        };
        assert_eq!(envelope.len(), 128);
        assert!(
            tail.iter()
                .all(|op| matches!(op, Op::Write(at, _) if *at >= before.len() as u64))
        );
        // Interrupted within any of the appending writes, or with any one of them not on the disk.
        for done in 0..tail.len() {
            let Op::Write(_, bytes) = &tail[done] else { continue };
            for len in (0..=bytes.len()).step_by(5) {
                let mut file = before.clone();
                tail[..done].iter().for_each(|op| apply(&mut file, op, usize::MAX));
                apply(&mut file, &tail[done], len);
                assert_eq!(tensors(&other, &file), was, "write {done}, byte {len}");
            }
            let mut file = before.clone();
            tail.iter()
                .enumerate()
                .filter(|(i, _)| *i != done)
                .for_each(|(_, op)| apply(&mut file, op, usize::MAX));
            assert_eq!(tensors(&other, &file), was, "without write {done}");
        }
        let mut file = before.clone();
        ops.iter().for_each(|op| apply(&mut file, op, usize::MAX));
        assert_eq!(file[128..before.len()], before[128..], "earlier bytes never move");
        let now = tensors(&other, &file);
        assert_eq!(now[..1], was[..]);
        assert_eq!(
            now[1..],
            [("skill.s.t".to_owned(), vec![2; 6]), ("u".to_owned(), vec![3; 6])]
        );
    }

    #[test]
    fn a_failing_disk_leaves_the_old_model() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("old.cmf"), dir.path().join("cut.cmf"));
        let before = old(&path);
        let was = tensors(&other, &before);
        let (_, all) = grow(&path, usize::MAX);
        for fails in 0..all.len() {
            let (result, ops) = grow(&path, fails);
            let mut file = before.clone();
            ops.iter().for_each(|op| apply(&mut file, op, usize::MAX));
            assert!(result.unwrap_err().message.contains("the disk is full"));
            // The last operation syncs the envelope, which is written by then.
            if fails + 1 < all.len() {
                assert_eq!(tensors(&other, &file), was, "operation {fails}");
            } else {
                assert_eq!(tensors(&other, &file).len(), 3);
            }
            if (1..all.len() - 2).contains(&fails) {
                assert_eq!(file, before, "the appended bytes are removed");
            }
        }
    }

    #[test]
    fn a_second_appender_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("old.cmf");
        let before = old(&path);
        let mut first = Appender::open(&path).unwrap();
        let err = Appender::open(&path).map(|_| ()).unwrap_err();
        assert!(err.message.contains("another program is changing it"), "{err}");
        assert!(
            first
                .add(spec("t"), &[1; 6])
                .unwrap_err()
                .message
                .contains("exists already")
        );
        first.add(spec("u"), &[1; 6]).unwrap();
        drop(first);
        assert_eq!(std::fs::read(&path).unwrap(), before);
    }
}
