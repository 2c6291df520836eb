//! Writing one model to several files of bounded size (section 10 of the format), as its payloads come.
//!
//! How many files there will be is known at the end, and so is what every header says about that. Files stay without a name
//! until then, with room before the blob for what is still to be written. Knows bytes, no encodings.

use super::directory::{HEAD, RECORD};
use super::envelope::{self, BLOB_ALIGN, Span};
use super::hash::hash64;
use super::header::Shard;
use super::shards::{MAX_COUNT, shard_path};
use super::writer::{Blob, Head, OwnedSections, aligned, not_the_output, publish, target, unwritten};
use super::{Sections, TensorInfo, TensorSpec, directory};
use crate::dtype::Size;
use crate::error::{Error, Result, bail};
use serde_json::{Map, Value, json};
use std::fs::OpenOptions;
use std::path::PathBuf;
use tempfile::TempPath;

/// Where the files of a split model go, and how large they become.
#[derive(Clone, Debug)]
pub struct Split {
    /// The directory of the files.
    pub dir: PathBuf,
    /// What their names begin with.
    pub base: String,
    /// The most bytes of a file. One that holds a single tensor may have more.
    pub max_bytes: u64,
    /// Files that are read meanwhile and must not be replaced.
    pub inputs: Vec<PathBuf>,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parts {
    /// The files, shard 1 first.
    pub paths: Vec<PathBuf>,
    /// Bytes of all of them.
    pub bytes: u64,
    /// How many have more bytes than was asked for.
    pub larger: usize,
}

/// Writes the tensors of a model, in order, to as many files as are needed. Masks, tokenizer, index and skills go to the
/// first. Dropped before [`SplitWriter::finish`] it leaves nothing behind.
pub struct SplitWriter {
    split: Split,
    /// Headers of shard 1 and of the others.
    headers: [Map<String, Value>; 2],
    sections: OwnedSections,
    by_pass: bool,
    infos: Vec<TensorInfo>,
    /// The least bytes of each payload.
    least: Vec<u64>,
    /// Bytes to keep for the two headers.
    room: [u64; 2],
    /// How many of `infos` are written.
    written: usize,
    /// How many files there will be, as far as anybody can tell.
    planned: u32,
    closed: Vec<Closed>,
    open: Option<Open>,
}

/// The file that is being written.
struct Open {
    blob: Blob,
    /// Its first tensor.
    first: usize,
    /// The most tensors for which its directory has room.
    most: usize,
}

/// A file that has all its tensors.
struct Closed {
    file: TempPath,
    tensors: std::ops::Range<usize>,
    data: Span,
}

impl SplitWriter {
    /// Starts to write the model that `header`, `tensors` and `sections` describe, as [`super::Writer::create`] takes them; each
    /// tensor with what is known of the size of its payload.
    ///
    /// Errors: as `Writer::create`; `Usage` for a limit of 0, more files than names can count, and a file that would replace
    /// one of the inputs, as soon as that is known.
    pub fn create(
        split: Split,
        header: Map<String, Value>,
        tensors: Vec<(TensorSpec, Size)>,
        sections: Sections,
        by_pass: bool,
    ) -> Result<SplitWriter> {
        if split.max_bytes == 0 {
            bail!(Usage, "files of 0 bytes hold no model");
        }
        let (specs, sizes): (Vec<TensorSpec>, Vec<Size>) = tensors.into_iter().unzip();
        let is_exact = sizes.iter().all(|size| matches!(size, Size::Exact(_)));
        let mut bare = header.clone();
        bare.retain(|key, _| !["skills", "tokenizer_config"].contains(&key.as_str()));
        let mut writer = SplitWriter {
            split,
            headers: [header, bare],
            sections: OwnedSections::of(sections),
            by_pass,
            infos: unwritten(specs)?,
            least: sizes
                .into_iter()
                .map(|(Size::Exact(bytes) | Size::AtLeast(bytes))| bytes)
                .collect(),
            room: [0; 2],
            written: 0,
            planned: 1,
            closed: Vec::new(),
            open: None,
        };
        // The longest that the headers can become.
        let last = Shard {
            no: MAX_COUNT,
            count: MAX_COUNT,
        };
        for main in [true, false] {
            let head = writer.head(main, last, u64::MAX, &writer.infos)?;
            writer.room[usize::from(!main)] = head.header.len() as u64;
        }
        let (mut files, mut next) = (0u64, 0);
        while next < writer.infos.len() {
            next += writer.fit(next, files == 0).0;
            files += 1;
        }
        writer.planned = writer.count(files.max(1))?;
        if is_exact {
            writer.check_inputs(writer.planned)?;
        }
        Ok(writer)
    }

    /// So many files, if that can be. Errors: `Usage`.
    fn count(&self, files: u64) -> Result<u32> {
        match u32::try_from(files) {
            Ok(count) if count <= MAX_COUNT => Ok(count),
            _ => bail!(
                Usage,
                "{files} files of at most {} bytes, a model has at most {MAX_COUNT}",
                self.split.max_bytes
            ),
        }
    }

    fn path(&self, no: usize, count: u32) -> PathBuf {
        let no = u32::try_from(no).unwrap_or(u32::MAX);
        shard_path(&self.split.dir, &self.split.base, Shard { no, count })
    }

    /// Errors: `Usage` when one of so many files would replace an input.
    fn check_inputs(&self, count: u32) -> Result<()> {
        for no in 1..=count as usize {
            let path = self.path(no, count);
            let inputs = self.split.inputs.iter();
            inputs.into_iter().try_for_each(|input| not_the_output(input, &path))?;
        }
        Ok(())
    }

    fn sections(&self, main: bool) -> Sections<'_> {
        match main {
            true => self.sections.borrowed(),
            false => Sections::default(),
        }
    }

    /// What a file says about itself.
    fn head(&self, main: bool, shard: Shard, set: u64, infos: &[TensorInfo]) -> Result<Head> {
        let mut header = self.headers[usize::from(!main)].clone();
        let Shard { no, count } = shard;
        header.insert(
            "shard".into(),
            json!({"no": no, "count": count, "set": format!("{set:016x}")}),
        );
        let sections = self.sections(main);
        let mut head = Head::new(header, infos, sections)?;
        if main && self.by_pass && sections.masks.is_some() {
            head.set_loop_masks(sections)?;
        }
        Ok(head)
    }

    /// How many tensors from `first` on can be in one file, at least one, and where its blob starts.
    fn fit(&self, first: usize, main: bool) -> (usize, u64) {
        let mut head = envelope::LEN + self.room[usize::from(!main)] + HEAD;
        let blob_at = |head: u64| head.checked_next_multiple_of(BLOB_ALIGN).unwrap_or(u64::MAX);
        let (mut blob, mut count) = (0u64, 0);
        let extra = self.sections(main).len();
        for (info, &least) in self.infos.iter().zip(&self.least).skip(first) {
            let record = RECORD + info.name.len() as u64;
            let grown = blob.saturating_add(aligned(least));
            let size = blob_at(head + record).saturating_add(grown).saturating_add(extra);
            if count > 0 && size > self.split.max_bytes {
                break;
            }
            head += record;
            blob = grown;
            count += 1;
        }
        (count, blob_at(head))
    }

    /// Writes the payload of the next tensor; `stored` is its checksum, where one is known.
    ///
    /// Errors: as [`super::Writer::write`] and [`super::Writer::copy`]; `Usage` for more files than names can count.
    pub fn write(&mut self, payload: &[u8], stored: Option<u64>) -> Result<()> {
        if self.written >= self.infos.len() {
            bail!(Usage, "all {} tensors are written", self.infos.len());
        }
        let extra = self.sections(self.closed.is_empty()).len();
        let is_full = self.open.as_ref().is_some_and(|open| {
            let bytes = open
                .blob
                .data
                .off
                .saturating_add(open.blob.len_with(payload.len() as u64));
            let tensors = self.written - open.first;
            tensors >= open.most || (tensors > 0 && bytes.saturating_add(extra) > self.split.max_bytes)
        });
        if is_full {
            self.close()?;
        }
        let mut open = match self.open.take() {
            Some(open) => open,
            None => self.begin()?,
        };
        let put = match self.infos.get_mut(self.written) {
            Some(info) => open.blob.put(info, payload, stored),
            None => Ok(()),
        };
        self.open = Some(open);
        self.written += 1;
        put
    }

    fn begin(&self) -> Result<Open> {
        let no = self.closed.len() + 1;
        let count = self.count((no as u64).max(u64::from(self.planned)))?;
        let (most, data_off) = self.fit(self.written, no == 1);
        Ok(Open {
            blob: Blob::create(&target(&self.path(no, count))?, data_off)?,
            first: self.written,
            most,
        })
    }

    fn close(&mut self) -> Result<()> {
        if let Some(open) = self.open.take() {
            let data = open.blob.data;
            let (_, file) = open.blob.into_file()?;
            self.closed.push(Closed {
                // Closed, so that there may be more files than a process may have open.
                file: file.into_temp_path(),
                tensors: open.first..self.written,
                data,
            });
        }
        Ok(())
    }

    /// Completes the files and gives them their names, the first one last: without it the others are no model, and say so.
    ///
    /// Errors: `Usage` when tensors are missing, and when a file would replace an input; `Parse` or `Bounds` for sections
    /// that could not be opened again; `Io`. After an error nothing is left.
    pub fn finish(mut self) -> Result<Parts> {
        if let Some(missing) = self.infos.get(self.written) {
            bail!(
                Usage,
                "{} of {} tensors are written, '{}' is next",
                self.written,
                self.infos.len(),
                missing.name
            );
        }
        if self.open.is_none() && self.closed.is_empty() {
            self.open = Some(self.begin()?);
        }
        self.close()?;
        let count = self.count(self.closed.len() as u64)?;
        self.check_inputs(count)?;
        let tensors = |closed: &Closed| self.infos.get(closed.tensors.clone()).unwrap_or_default();
        // What the whole is made of: files of another split or another model have another.
        let directories = self
            .closed
            .iter()
            .map(|closed| hash64(&directory::to_bytes(tensors(closed))));
        let set = hash64(&directories.flat_map(u64::to_le_bytes).collect::<Vec<u8>>());
        let (mut paths, mut bytes, mut larger) = (Vec::new(), 0, 0);
        for (no, closed) in (1..).zip(&self.closed) {
            let path = target(&self.path(no as usize, count))?;
            let main = no == 1;
            let head = self.head(main, Shard { no, count }, set, tensors(closed))?;
            let file = OpenOptions::new().write(true).open(&closed.file);
            let file = file.map_err(|err| Error::io(&path, &err))?;
            let len = head.seal(&path, &file, tensors(closed), closed.data, self.sections(main))?;
            bytes += len;
            larger += usize::from(len > self.split.max_bytes);
            paths.push(path);
        }
        let mut named: Vec<&PathBuf> = Vec::new();
        for (closed, path) in self.closed.into_iter().zip(&paths).rev() {
            if let Err(err) = publish(closed.file, path) {
                // Some of its files are no model; that they cannot be removed is not what went wrong.
                named.into_iter().for_each(|path| drop(std::fs::remove_file(path)));
                return Err(err);
            }
            named.push(path);
        }
        Ok(Parts { paths, bytes, larger })
    }
}
