//! Writing a file: under a temporary name beside the target, renamed when it is whole. Knows bytes, no encodings.
//!
//! Header and directory lie before the blob, but hold checksums of what follows: their lengths are known from the start,
//! so room is left for them and they are written last.

use super::directory::{self, TENSOR_ALIGN};
use super::envelope::{self, BINARY_MASKS, BLOB_ALIGN, Envelope, LOOP_MASKS, QUANT_2F, SKILL_FILE, Span, TENSOR_DIR};
use super::hash::hash64;
use super::header::Header;
use super::masks::{MaskShape, Masks};
use super::{Arch, TensorInfo, index, json, payload, skills};
use crate::dtype::Dtype;
use crate::error::{Error, Result, bail};
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use tempfile::{NamedTempFile, TempPath};

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// The name, that of the source model.
    pub name: String,
    /// The element type.
    pub dtype: Dtype,
    /// One to six dimensions, row-major.
    pub shape: Vec<u64>,
}

/// The optional sections, verbatim.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sections<'a> {
    /// `tokenizer.json`.
    pub vocab: Option<&'a [u8]>,
    /// The masks section.
    pub masks: Option<&'a [u8]>,
    /// The sparse index. It speaks of the masks and has no meaning without them.
    pub index: Option<&'a [u8]>,
}

impl<'a> Sections<'a> {
    /// In the order in which they lie in a file.
    fn in_order(&self) -> [Option<&'a [u8]>; 3] {
        [self.masks, self.vocab, self.index]
    }

    /// Bytes of all of them.
    pub(super) fn len(&self) -> u64 {
        self.in_order()
            .into_iter()
            .flatten()
            .map(|bytes| bytes.len() as u64)
            .sum()
    }
}

/// Sections that are kept until a file is complete.
#[derive(Clone, Default)]
pub(super) struct OwnedSections {
    vocab: Option<Vec<u8>>,
    masks: Option<Vec<u8>>,
    index: Option<Vec<u8>>,
}

impl OwnedSections {
    pub fn of(sections: Sections) -> OwnedSections {
        OwnedSections {
            vocab: sections.vocab.map(<[u8]>::to_vec),
            masks: sections.masks.map(<[u8]>::to_vec),
            index: sections.index.map(<[u8]>::to_vec),
        }
    }

    pub fn borrowed(&self) -> Sections<'_> {
        Sections {
            vocab: self.vocab.as_deref(),
            masks: self.masks.as_deref(),
            index: self.index.as_deref(),
        }
    }
}

/// What is to become a directory, nothing written yet.
///
/// Errors: `Usage` for names or shapes that it cannot hold and for a name that is there twice.
pub(super) fn unwritten(tensors: Vec<TensorSpec>) -> Result<Vec<TensorInfo>> {
    let mut names = HashSet::new();
    for spec in &tensors {
        directory::check_writable(&spec.name, spec.dtype, &spec.shape)?;
        if !names.insert(spec.name.as_str()) {
            bail!(Usage, "tensor '{}' is to be written twice", spec.name);
        }
    }
    let info = |TensorSpec { name, dtype, shape }| TensorInfo {
        name,
        dtype,
        shape,
        offset: 0,
        nbytes: 0,
        hash: 0,
        shard: 0,
    };
    Ok(tensors.into_iter().map(info).collect())
}

/// What a file says about itself.
pub(super) struct Head {
    /// The text of the header.
    pub header: Vec<u8>,
    features: u32,
    arch: Arch,
}

impl Head {
    /// `header` holds `arch` and whatever else the file says; `format`, `version` and `section_hashes` are added.
    ///
    /// Errors: `Parse` for a header that could not be opened again; `Usage` for an empty section.
    pub fn new(header: Map<String, Value>, infos: &[TensorInfo], sections: Sections) -> Result<Head> {
        if sections.in_order().into_iter().flatten().any(<[u8]>::is_empty) {
            bail!(Usage, "a section without bytes cannot be written");
        }
        let header = complete(header, sections);
        let typed = Header::from_json(&header)?;
        skills::parse(&typed.skills, &typed.arch)?;
        let features = features(&typed, infos, sections);
        // The text as it will be read back.
        let header = Value::Object(header).to_string().into_bytes();
        json::parse_object(&header, "header")?;
        Ok(Head {
            header,
            features,
            arch: typed.arch,
        })
    }

    /// Declares that the masks have a row for every pass. Errors: as [`Writer::with_loop_masks`].
    pub fn set_loop_masks(&mut self, sections: Sections) -> Result<()> {
        if sections.masks.is_none() || self.arch.num_loops == 1 {
            bail!(
                Usage,
                "masks by pass need a masks section and a looped network, arch.num_loops is {}",
                self.arch.num_loops
            );
        }
        self.features |= LOOP_MASKS;
        Ok(())
    }

    /// Writes what lies behind the blob at `data`, then what lies before it, and waits until the disk has it. Returns the
    /// length of the file.
    ///
    /// Errors: `Parse` or `Bounds` for sections that could not be opened again, and when there is no room before the blob;
    /// `Io`, about `path`.
    pub fn seal(&self, path: &Path, file: &File, infos: &[TensorInfo], data: Span, sections: Sections) -> Result<u64> {
        let shape = MaskShape::of(&self.arch, self.features & LOOP_MASKS != 0);
        if let Some(masks) = sections.masks {
            Masks::parse(masks, shape)?;
        }
        if let Some(index) = sections.index {
            index::parse(index, &self.arch, shape.rows)?;
        }
        let directory = directory::to_bytes(infos);
        let header_end = envelope::LEN + self.header.len() as u64;
        if header_end + directory.len() as u64 > data.off {
            bail!(
                Bounds,
                "header and directory end at {}, the blob starts at {}",
                header_end + directory.len() as u64,
                data.off
            );
        }
        let mut end = data.off + data.len;
        let [masks, vocab, index] = sections.in_order().map(|section| {
            let span = Span {
                off: end,
                len: section?.len() as u64,
            };
            end += span.len;
            Some(span)
        });
        let envelope = Envelope {
            features: self.features,
            header: Span {
                off: envelope::LEN,
                len: self.header.len() as u64,
            },
            directory: Span {
                off: header_end,
                len: directory.len() as u64,
            },
            data,
            masks,
            vocab,
            index,
            header_hash: Some(hash64(&self.header)),
            directory_hash: Some(hash64(&directory)),
        };
        let write = |mut file: &File| {
            file.seek(SeekFrom::Start(data.off + data.len))?;
            for section in sections.in_order().into_iter().flatten() {
                file.write_all(section)?;
            }
            file.seek(SeekFrom::Start(0))?;
            for part in [&envelope.to_bytes()[..], &self.header, &directory] {
                file.write_all(part)?;
            }
            // Without tensors and sections nothing was written behind the hole before the blob.
            file.set_len(end)?;
            file.sync_all()
        };
        write(file).map_err(|err| Error::io(path, &err))?;
        Ok(end)
    }
}

/// A blob that grows behind room for what lies before it, in a file that has no name yet.
pub(super) struct Blob {
    path: PathBuf,
    out: BufWriter<NamedTempFile>,
    /// Where it is.
    pub data: Span,
}

impl Blob {
    /// In a file beside `path`, where errors say that it is. Errors: `Io`.
    pub fn create(path: &Path, data_off: u64) -> Result<Blob> {
        let mut out = BufWriter::new(temporary_beside(path)?);
        out.seek(SeekFrom::Start(data_off))
            .map_err(|err| Error::io(path, &err))?;
        Ok(Blob {
            path: path.to_owned(),
            out,
            data: Span { off: data_off, len: 0 },
        })
    }

    /// Bytes of the blob once so many more are written.
    pub fn len_with(&self, payload: u64) -> u64 {
        self.data.len.saturating_add(aligned(payload))
    }

    /// Writes the payload of `info`, and into that where it is.
    ///
    /// Errors: `Parse` for a length that type and shape do not allow; `HashMismatch` when the payload is not the one that
    /// `stored` was made of; `Io`.
    pub fn put(&mut self, info: &mut TensorInfo, payload: &[u8], stored: Option<u64>) -> Result<()> {
        payload::check_length(info.dtype, &info.shape, payload)
            .map_err(|err| err.context(format_args!("tensor '{}'", info.name)))?;
        let hash = hash64(payload);
        if let Some(stored) = stored.filter(|&stored| stored != hash) {
            bail!(
                HashMismatch,
                "payload of tensor '{}': stored {stored:016x}, found {hash:016x}",
                info.name
            );
        }
        info.offset = self.data.len;
        info.nbytes = payload.len() as u64;
        info.hash = hash;
        self.data.len = self.len_with(info.nbytes);
        let padding = [0; TENSOR_ALIGN as usize];
        let pad = (aligned(info.nbytes) - info.nbytes) as usize;
        let io = |err: std::io::Error| Error::io(&self.path, &err);
        self.out.write_all(payload).map_err(io)?;
        self.out.write_all(&padding[..pad]).map_err(io)
    }

    /// The path, and the file with everything that was written. Errors: `Io`.
    pub fn into_file(self) -> Result<(PathBuf, NamedTempFile)> {
        let path = self.path;
        let file = self.out.into_inner().map_err(|err| Error::io(&path, err.error()))?;
        Ok((path, file))
    }
}

/// Up to where a payload's padding goes.
pub(super) fn aligned(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(TENSOR_ALIGN).unwrap_or(u64::MAX)
}

/// Writes one file, tensor by tensor. Dropped before [`Writer::finish`] it leaves nothing behind.
pub struct Writer {
    blob: Blob,
    head: Head,
    sections: OwnedSections,
    infos: Vec<TensorInfo>,
    /// How many of `infos` are written.
    written: usize,
}

impl Writer {
    /// Starts a file that will appear at `path`, replacing a regular file that is there. A link stays one; the file that it
    /// leads to is replaced.
    ///
    /// `header` holds `arch` and whatever else the file says about itself; `format`, `version` and `section_hashes` are
    /// added here. `tensors` are all tensors, in the order in which their payloads will come.
    ///
    /// Errors: `Parse` for a header that could not be opened again; `Usage` for names or shapes the directory cannot
    /// hold, a name that is there twice, an empty section; `Io`.
    pub fn create(
        path: &Path,
        header: Map<String, Value>,
        tensors: Vec<TensorSpec>,
        sections: Sections,
    ) -> Result<Writer> {
        let infos = unwritten(tensors)?;
        let head = Head::new(header, &infos, sections)?;
        let directory_len = directory::to_bytes(&infos).len() as u64;
        let data_off = (envelope::LEN + head.header.len() as u64 + directory_len).next_multiple_of(BLOB_ALIGN);
        Ok(Writer {
            blob: Blob::create(&target(path)?, data_off)?,
            head,
            sections: OwnedSections::of(sections),
            infos,
            written: 0,
        })
    }

    /// Declares that the masks have a row for every pass over the stack, instead of one a layer.
    ///
    /// Errors: `Usage` without masks, or when `arch.num_loops` is 1.
    pub fn with_loop_masks(mut self) -> Result<Writer> {
        self.head.set_loop_masks(self.sections.borrowed())?;
        Ok(self)
    }

    /// Writes the payload of the next tensor.
    ///
    /// Errors: `Usage` when every tensor is written, `Parse` for a length that type and shape do not allow, `Io`.
    pub fn write(&mut self, payload: &[u8]) -> Result<()> {
        self.put(payload, None)
    }

    /// Writes the payload of the next tensor, of which a checksum is known.
    ///
    /// Errors: as [`Writer::write`]; `HashMismatch` when the payload is not the one that `hash` was made of.
    pub fn copy(&mut self, payload: &[u8], hash: u64) -> Result<()> {
        self.put(payload, Some(hash))
    }

    fn put(&mut self, payload: &[u8], stored: Option<u64>) -> Result<()> {
        let count = self.infos.len();
        let Some(info) = self.infos.get_mut(self.written) else {
            bail!(Usage, "all {count} tensors are written");
        };
        self.blob.put(info, payload, stored)?;
        self.written += 1;
        Ok(())
    }

    /// Completes the file and gives it its name. Returns its length in bytes.
    ///
    /// Errors: `Usage` when tensors are missing, `Parse` or `Bounds` for sections that could not be opened again, `Io`. After
    /// an error nothing is left.
    pub fn finish(self) -> Result<u64> {
        if let Some(missing) = self.infos.get(self.written) {
            bail!(
                Usage,
                "{} of {} tensors are written, '{}' is next",
                self.written,
                self.infos.len(),
                missing.name
            );
        }
        let data = self.blob.data;
        let (path, file) = self.blob.into_file()?;
        let sections = self.sections.borrowed();
        let bytes = self.head.seal(&path, file.as_file(), &self.infos, data, sections)?;
        publish(file.into_temp_path(), &path)?;
        Ok(bytes)
    }
}

/// Gives a complete file its name, replacing a regular file that has it. Errors: `Io`.
pub(super) fn publish(file: TempPath, path: &Path) -> Result<()> {
    file.persist(path).map_err(|err| Error::io(path, &err.error))?;
    sync_directory(path)
}

/// `header` with the members that every file has.
pub(super) fn complete(header: Map<String, Value>, sections: Sections) -> Map<String, Value> {
    let mut complete = Map::new();
    complete.insert("format".into(), "cmf".into());
    complete.insert("version".into(), 2.into());
    let ours = ["format", "version", "section_hashes"];
    complete.extend(header.into_iter().filter(|(key, _)| !ours.contains(&key.as_str())));
    let named = [
        ("masks", sections.masks),
        ("vocab", sections.vocab),
        ("index", sections.index),
    ];
    let hashes: Map<String, Value> = named
        .into_iter()
        .filter_map(|(name, bytes)| Some((name.to_owned(), format!("{:016x}", hash64(bytes?)).into())))
        .collect();
    if !hashes.is_empty() {
        complete.insert("section_hashes".into(), hashes.into());
    }
    complete
}

pub(super) fn features(header: &Header, infos: &[TensorInfo], sections: Sections) -> u32 {
    let two_fields = |info: &TensorInfo| matches!(info.dtype, Dtype::Vbit | Dtype::Q82f | Dtype::VbitRo);
    let bits = [
        (BINARY_MASKS, sections.masks.is_some()),
        (QUANT_2F, infos.iter().any(two_fields)),
        (SKILL_FILE, header.has_bound_skill()),
    ];
    bits.into_iter()
        .filter(|(_, set)| *set)
        .fold(TENSOR_DIR, |features, (bit, _)| features | bit)
}

/// The path at which an output is written: where a link leads, so that the link stays one.
///
/// Errors: `Io` for a link that leads nowhere.
pub fn target(path: &Path) -> Result<PathBuf> {
    if !std::fs::symlink_metadata(path).is_ok_and(|meta| meta.is_symlink()) {
        return Ok(path.to_owned());
    }
    path.canonicalize()
        .map_err(|err| Error::io(path, &err).context("the output is a link that leads nowhere"))
}

/// A file in the directory of `path`, where renaming is atomic; it is removed when dropped.
///
/// Errors: `Io` for a path that is there and no regular file (a rename would replace a device), and the system's.
pub fn temporary_beside(path: &Path) -> Result<NamedTempFile> {
    if path.file_name().is_none() {
        bail!(Usage, "{}: no name for a file", path.display());
    }
    // A rename would replace a device, or fail late on a directory.
    if std::fs::metadata(path).is_ok_and(|meta| !meta.is_file()) {
        bail!(Io, "{}: is there and no regular file", path.display());
    }
    let mut builder = tempfile::Builder::new();
    builder.prefix(".cmf-").suffix(".partial");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // What the umask leaves of it, as for any new file.
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    // Without the temporary name, which says nothing.
    let failed = |err: std::io::Error| Error::io(path, &err.kind().into());
    builder.tempfile_in(parent(path)).map_err(failed)
}

/// Refuses to replace what is being read.
///
/// Errors: `Usage` when `out` is `input`, under whatever name.
pub fn not_the_output(input: &Path, out: &Path) -> Result<()> {
    let same = out
        .canonicalize()
        .ok()
        .is_some_and(|out| input.canonicalize().is_ok_and(|input| input == out));
    if same {
        bail!(Usage, "{}: the output would replace an input", out.display());
    }
    Ok(())
}

fn parent(path: &Path) -> &Path {
    path.parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// Makes the rename itself last.
fn sync_directory(path: &Path) -> Result<()> {
    #[cfg(unix)]
    std::fs::File::open(parent(path))
        .and_then(|dir| dir.sync_all())
        .map_err(|err| Error::io(path, &err))?;
    #[cfg(not(unix))]
    let _ = path;
    Ok(())
}
