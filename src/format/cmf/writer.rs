//! Writing a model to one file, or to several files of bounded size (section 10 of the format), payload by payload.
//!
//! Header and directory come before the blob but contain checksums of payloads, and every header contains the number of
//! files. So the files are temporary, with space before the blob for envelope, header and directory, which are written last.

use super::blob::{Blob, aligned};
use super::directory::{self, Entry, HEAD, RECORD};
use super::envelope::{self, BLOB_ALIGN, Span};
use super::head::{Head, unwritten};
use super::header::Shard;
use super::sections::{PerSection, Sections};
use super::shards::{MAX_COUNT, shard_path};
use crate::dtype::Size;
use crate::error::{Error, Result, bail};
use crate::format::hash::hash64;
use crate::format::output::{not_the_output, publish, target};
use crate::format::tensor::TensorSpec;
use serde_json::{Map, Value, json};
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use tempfile::TempPath;

/// Directory, names and sizes of a split model's files.
#[derive(Clone, Debug)]
pub struct SplitOptions {
    /// The directory of the files.
    pub dir: PathBuf,
    /// The base of their names.
    pub base: String,
    /// The most bytes per file. A file with a single tensor may have more.
    pub max_bytes: u64,
    /// Files that are being read and must not be replaced.
    pub inputs: Vec<PathBuf>,
}

/// The files that were written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenFiles {
    /// Their paths, shard 1 first.
    pub paths: Vec<PathBuf>,
    /// Bytes of all files.
    pub bytes: u64,
    /// How many files exceed the limit.
    pub larger: usize,
}

/// Writes the tensors of a model, in order, to one file or to as many as needed. Masks, tokenizer, index and skills go to the
/// first file. If dropped before [`CmfWriter::finish`], it leaves no files.
pub struct CmfWriter {
    place: Place,
    /// The headers of shard 1 and of the other shards.
    headers: [Map<String, Value>; 2],
    sections: PerSection<Vec<u8>>,
    loop_masks: bool,
    entries: Vec<Entry>,
    /// The minimum bytes of each payload.
    least: Vec<u64>,
    /// The maximum bytes of the two headers.
    header_bytes: [u64; 2],
    /// The number of `entries` written.
    written: usize,
    /// The expected number of files.
    planned: u32,
    closed: Vec<Closed>,
    open: Option<Open>,
}

enum Place {
    One(PathBuf),
    Several(SplitOptions),
}

/// The file being written.
struct Open {
    blob: Blob,
    /// The index of its first tensor.
    first: usize,
    /// The most tensors that the space for its directory allows.
    most: usize,
}

/// A file with all its tensors written.
struct Closed {
    file: TempPath,
    tensors: std::ops::Range<usize>,
    data: Span,
}

impl CmfWriter {
    /// Starts a file that replaces any regular file at `path` when finished. A link is kept and its target replaced.
    ///
    /// `header` has `arch` and any other members; `format`, `version` and `section_hashes` are added. `tensors` are all
    /// tensors, in the order in which their payloads will be written.
    ///
    /// Errors: `Parse` for a header that opening would refuse; `Usage` for names or shapes that the directory cannot hold,
    /// duplicate names, and empty sections; `Io`.
    pub fn create(
        path: &Path,
        header: Map<String, Value>,
        tensors: Vec<TensorSpec>,
        sections: Sections,
    ) -> Result<CmfWriter> {
        // A single file has no limit, so the sizes do not matter.
        let least = vec![0; tensors.len()];
        let mut writer = CmfWriter::new(Place::One(path.to_owned()), header, tensors, least, sections)?;
        writer.open = Some(writer.begin()?);
        Ok(writer)
    }

    /// As [`CmfWriter::create`], for several files; each tensor has the known size of its payload.
    ///
    /// Errors: as `create`; `Usage` for a limit of 0, for more files than names can number, and for a file that would
    /// replace an input, as soon as that is known.
    pub fn split(
        split: SplitOptions,
        header: Map<String, Value>,
        tensors: Vec<(TensorSpec, Size)>,
        sections: Sections,
    ) -> Result<CmfWriter> {
        if split.max_bytes == 0 {
            bail!(Usage, "the size limit is 0 bytes, expected at least 1");
        }
        let (specs, sizes): (Vec<TensorSpec>, Vec<Size>) = tensors.into_iter().unzip();
        let is_exact = sizes.iter().all(|size| matches!(size, Size::Exact(_)));
        let bytes = |(Size::Exact(bytes) | Size::AtLeast(bytes))| bytes;
        let least = sizes.into_iter().map(bytes).collect();
        let mut writer = CmfWriter::new(Place::Several(split), header, specs, least, sections)?;
        let (mut files, mut next) = (0u64, 0);
        while next < writer.entries.len() {
            next += writer.fit(next, files == 0).0;
            files += 1;
        }
        writer.planned = writer.count(files.max(1))?;
        if is_exact {
            writer.check_inputs(writer.planned)?;
        }
        Ok(writer)
    }

    fn new(
        place: Place,
        header: Map<String, Value>,
        tensors: Vec<TensorSpec>,
        least: Vec<u64>,
        sections: Sections,
    ) -> Result<CmfWriter> {
        let mut bare = header.clone();
        bare.retain(|key, _| !["skills", "tokenizer_config"].contains(&key.as_str()));
        let mut writer = CmfWriter {
            place,
            headers: [header, bare],
            sections: sections.map(|bytes| bytes.to_vec()),
            loop_masks: false,
            entries: unwritten(tensors)?,
            least,
            header_bytes: [0; 2],
            written: 0,
            planned: 1,
            closed: Vec::new(),
            open: None,
        };
        // The longest possible headers.
        let last = Shard {
            no: MAX_COUNT,
            count: MAX_COUNT,
        };
        for main in [true, false] {
            let head = writer.head(main, last, u64::MAX, &writer.entries)?;
            writer.header_bytes[usize::from(!main)] = head.header.len() as u64;
        }
        Ok(writer)
    }

    /// Declares that masks have a row for every loop of every layer, instead of one per layer.
    ///
    /// Errors: `Usage` without masks, or if `arch.num_loops` is 1.
    pub fn with_loop_masks(mut self) -> Result<CmfWriter> {
        self.loop_masks = true;
        self.head(true, Shard { no: 1, count: 1 }, 0, &self.entries)?;
        Ok(self)
    }

    /// Checks the number of files. Errors: `Usage`.
    fn count(&self, files: u64) -> Result<u32> {
        match u32::try_from(files) {
            Ok(count) if count <= MAX_COUNT => Ok(count),
            _ => bail!(
                Usage,
                "a limit of {} bytes makes {files} files, a model has at most {MAX_COUNT}",
                self.max_bytes()
            ),
        }
    }

    fn max_bytes(&self) -> u64 {
        match &self.place {
            Place::One(_) => u64::MAX,
            Place::Several(split) => split.max_bytes,
        }
    }

    fn path(&self, no: usize, count: u32) -> Result<PathBuf> {
        match &self.place {
            Place::One(path) => target(path),
            Place::Several(split) => {
                let no = u32::try_from(no).unwrap_or(u32::MAX);
                target(&shard_path(&split.dir, &split.base, Shard { no, count }))
            }
        }
    }

    /// Errors: `Usage` if one of `count` files would replace an input.
    fn check_inputs(&self, count: u32) -> Result<()> {
        let Place::Several(split) = &self.place else {
            return Ok(());
        };
        for no in 1..=count {
            let path = shard_path(&split.dir, &split.base, Shard { no, count });
            split.inputs.iter().try_for_each(|input| not_the_output(input, &path))?;
        }
        Ok(())
    }

    fn sections(&self, main: bool) -> Sections<'_> {
        match main {
            true => self.sections.map(Vec::as_slice),
            false => Sections::default(),
        }
    }

    /// The head of a file.
    fn head(&self, main: bool, shard: Shard, set: u64, entries: &[Entry]) -> Result<Head> {
        let mut header = self.headers[usize::from(!main)].clone();
        let Shard { no, count } = shard;
        if matches!(self.place, Place::Several(_)) {
            let shard = json!({"no": no, "count": count, "set": format!("{set:016x}")});
            header.insert("shard".into(), shard);
        }
        Head::new(header, entries, self.sections(main), main && self.loop_masks)
    }

    /// The number of tensors from `first` on that one file can hold, at least one, and where its blob starts.
    fn fit(&self, first: usize, main: bool) -> (usize, u64) {
        let mut head = envelope::LEN + self.header_bytes[usize::from(!main)] + HEAD;
        let blob_at = |head: u64| head.checked_next_multiple_of(BLOB_ALIGN).unwrap_or(u64::MAX);
        let (mut blob, mut count) = (0u64, 0);
        let extra = self.sections(main).len();
        for (entry, &least) in self.entries.iter().zip(&self.least).skip(first) {
            let record = RECORD + entry.info.name.len() as u64;
            let grown = blob.saturating_add(aligned(least));
            let size = blob_at(head + record).saturating_add(grown).saturating_add(extra);
            if count > 0 && size > self.max_bytes() {
                break;
            }
            head += record;
            blob = grown;
            count += 1;
        }
        (count, blob_at(head))
    }

    /// Writes the payload of the next tensor.
    ///
    /// Errors: `Usage` if every tensor is written, and for more files than names can number; `Parse` for a length that type
    /// and shape do not allow; `Io`.
    pub fn write(&mut self, payload: &[u8]) -> Result<()> {
        self.put(payload, None)
    }

    /// Writes the payload of the next tensor, after checking it against its checksum `stored`, if that is known.
    ///
    /// Errors: as [`CmfWriter::write`]; `HashMismatch`.
    pub fn put(&mut self, payload: &[u8], stored: Option<u64>) -> Result<()> {
        if self.written >= self.entries.len() {
            bail!(Usage, "all {} tensors are already written", self.entries.len());
        }
        let extra = self.sections(self.closed.is_empty()).len();
        let is_full = self.open.as_ref().is_some_and(|Open { blob, first, most }| {
            let bytes = blob.data.off.saturating_add(blob.len_with(payload.len() as u64));
            let tensors = self.written - first;
            tensors >= *most || (tensors > 0 && bytes.saturating_add(extra) > self.max_bytes())
        });
        if is_full {
            self.close()?;
        }
        let mut open = match self.open.take() {
            Some(open) => open,
            None => self.begin()?,
        };
        let put = open.blob.put(&mut self.entries[self.written], payload, stored);
        self.open = Some(open);
        self.written += usize::from(put.is_ok());
        put
    }

    fn begin(&self) -> Result<Open> {
        let no = self.closed.len() + 1;
        let count = self.count((no as u64).max(u64::from(self.planned)))?;
        let (most, data_off) = self.fit(self.written, no == 1);
        Ok(Open {
            blob: Blob::create(&self.path(no, count)?, data_off)?,
            first: self.written,
            most,
        })
    }

    fn close(&mut self) -> Result<()> {
        if let Some(open) = self.open.take() {
            let data = open.blob.data;
            self.closed.push(Closed {
                // Closed, because there may be more files than a process may have open.
                file: open.blob.into_file()?.into_temp_path(),
                tensors: open.first..self.written,
                data,
            });
        }
        Ok(())
    }

    /// Completes the files and renames them to their paths, shard 1 last, so that an incomplete set never opens. After an
    /// error no files are left.
    ///
    /// Errors: `Usage` if tensors are missing or a file would replace an input; `Parse` or `Bounds` for sections that opening
    /// would refuse; `Io`.
    pub fn finish(mut self) -> Result<WrittenFiles> {
        if let Some(missing) = self.entries.get(self.written) {
            bail!(
                Usage,
                "{} of {} tensors are written, '{}' is next",
                self.written,
                self.entries.len(),
                missing.info.name
            );
        }
        if self.open.is_none() && self.closed.is_empty() {
            self.open = Some(self.begin()?);
        }
        self.close()?;
        let count = self.count(self.closed.len() as u64)?;
        self.check_inputs(count)?;
        let tensors = |closed: &Closed| &self.entries[closed.tensors.clone()];
        // Identifies the set: shards of another split or another model have another value.
        let directories = self.closed.iter().map(|closed| directory::to_bytes(tensors(closed)));
        let hashes: Vec<u8> = directories.flat_map(|bytes| hash64(&bytes).to_le_bytes()).collect();
        let set = hash64(&hashes);
        let (mut paths, mut bytes, mut larger) = (Vec::new(), 0, 0);
        for (no, closed) in (1..).zip(&self.closed) {
            let path = self.path(no as usize, count)?;
            let main = no == 1;
            let head = self.head(main, Shard { no, count }, set, tensors(closed))?;
            let file = OpenOptions::new().write(true).open(&closed.file);
            let file = file.map_err(|err| Error::io(&path, &err))?;
            let len = head.seal(&path, &file, tensors(closed), closed.data, self.sections(main))?;
            bytes += len;
            larger += usize::from(len > self.max_bytes());
            paths.push(path);
        }
        let mut named: Vec<&PathBuf> = Vec::new();
        for (closed, path) in self.closed.into_iter().zip(&paths).rev() {
            if let Err(err) = publish(closed.file, path) {
                // A failure to remove the files is not the error to report.
                named.into_iter().for_each(|path| drop(std::fs::remove_file(path)));
                return Err(err);
            }
            named.push(path);
        }
        Ok(WrittenFiles { paths, bytes, larger })
    }
}
