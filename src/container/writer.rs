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
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

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

/// Writes one file, tensor by tensor. Dropped before [`Writer::finish`] it leaves nothing behind.
pub struct Writer {
    path: PathBuf,
    out: BufWriter<NamedTempFile>,
    header: Vec<u8>,
    features: u32,
    arch: Arch,
    data: Span,
    masks: Option<Vec<u8>>,
    vocab: Option<Vec<u8>>,
    index: Option<Vec<u8>>,
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
        let mut names = HashSet::new();
        for spec in &tensors {
            directory::check_writable(&spec.name, spec.dtype, &spec.shape)?;
            if !names.insert(spec.name.as_str()) {
                bail!(Usage, "tensor '{}' is to be written twice", spec.name);
            }
        }
        let empty = |section: Option<&[u8]>| section.is_some_and(<[u8]>::is_empty);
        if [sections.masks, sections.vocab, sections.index].into_iter().any(empty) {
            bail!(Usage, "a section without bytes cannot be written");
        }
        let infos: Vec<TensorInfo> = tensors
            .into_iter()
            .map(|TensorSpec { name, dtype, shape }| TensorInfo {
                name,
                dtype,
                shape,
                offset: 0,
                nbytes: 0,
                hash: 0,
                shard: 0,
            })
            .collect();
        let header = complete(header, sections);
        let typed = Header::from_json(&header)?;
        skills::parse(&typed.skills, &typed.arch)?;
        let features = features(&typed, &infos, sections);
        // The text as it will be read back.
        let header = Value::Object(header).to_string().into_bytes();
        json::parse_object(&header, "header")?;
        let directory_len = directory::to_bytes(&infos).len() as u64;
        let data_off = (envelope::LEN + header.len() as u64 + directory_len).next_multiple_of(BLOB_ALIGN);

        let path = &target(path)?;
        let io = |err: std::io::Error| Error::io(path, &err);
        let mut out = BufWriter::new(temporary_beside(path)?);
        out.seek(SeekFrom::Start(data_off)).map_err(io)?;
        Ok(Writer {
            path: path.to_owned(),
            out,
            header,
            features,
            arch: typed.arch,
            data: Span { off: data_off, len: 0 },
            masks: sections.masks.map(<[u8]>::to_vec),
            vocab: sections.vocab.map(<[u8]>::to_vec),
            index: sections.index.map(<[u8]>::to_vec),
            infos,
            written: 0,
        })
    }

    /// Declares that the masks have a row for every pass over the stack, instead of one a layer.
    ///
    /// Errors: `Usage` without masks, or when `arch.num_loops` is 1.
    pub fn with_loop_masks(mut self) -> Result<Writer> {
        if self.masks.is_none() || self.arch.num_loops == 1 {
            bail!(
                Usage,
                "masks by pass need a masks section and a looped network, arch.num_loops is {}",
                self.arch.num_loops
            );
        }
        self.features |= LOOP_MASKS;
        Ok(self)
    }

    /// Writes the payload of the next tensor.
    ///
    /// Errors: `Usage` when every tensor is written, `Parse` for a length that type and shape do not allow, `Io`.
    pub fn write(&mut self, payload: &[u8]) -> Result<()> {
        self.put_payload(payload, None)
    }

    /// Writes the payload of the next tensor, of which a checksum is known.
    ///
    /// Errors: as [`Writer::write`]; `HashMismatch` when the payload is not the one that `hash` was made of.
    pub fn copy(&mut self, payload: &[u8], hash: u64) -> Result<()> {
        self.put_payload(payload, Some(hash))
    }

    fn put_payload(&mut self, payload: &[u8], stored: Option<u64>) -> Result<()> {
        let count = self.infos.len();
        let Some(info) = self.infos.get_mut(self.written) else {
            bail!(Usage, "all {count} tensors are written");
        };
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
        self.written += 1;
        self.data.len = (self.data.len + payload.len() as u64).next_multiple_of(TENSOR_ALIGN);
        let padding = [0; TENSOR_ALIGN as usize];
        let pad = payload.len().next_multiple_of(TENSOR_ALIGN as usize) - payload.len();
        let io = |err: std::io::Error| Error::io(&self.path, &err);
        self.out.write_all(payload).map_err(io)?;
        self.out.write_all(&padding[..pad]).map_err(io)
    }

    /// Completes the file and gives it its name. Returns its length in bytes.
    ///
    /// Errors: `Usage` when tensors are missing, `Parse` or `Bounds` for sections that could not be opened again, `Io`. After
    /// an error nothing is left.
    pub fn finish(self) -> Result<u64> {
        self.complete()?.publish()
    }

    /// Completes the file, which still has its temporary name: several that belong together get theirs at the end.
    ///
    /// Errors: as [`Writer::finish`].
    pub fn complete(mut self) -> Result<Whole> {
        if let Some(missing) = self.infos.get(self.written) {
            bail!(
                Usage,
                "{} of {} tensors are written, '{}' is next",
                self.written,
                self.infos.len(),
                missing.name
            );
        }
        let shape = MaskShape::of(&self.arch, self.features & LOOP_MASKS != 0);
        if let Some(masks) = &self.masks {
            Masks::parse(masks, shape)?;
        }
        if let Some(index) = &self.index {
            index::parse(index, &self.arch, shape.rows)?;
        }
        let directory = directory::to_bytes(&self.infos);
        let mut end = self.data.off + self.data.len;
        let mut place = |section: &Option<Vec<u8>>| {
            let bytes = section.as_ref()?;
            let span = Span {
                off: end,
                len: bytes.len() as u64,
            };
            end += span.len;
            Some(span)
        };
        let (masks, vocab, index) = (place(&self.masks), place(&self.vocab), place(&self.index));
        let header_end = envelope::LEN + self.header.len() as u64;
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
            data: self.data,
            masks,
            vocab,
            index,
            header_hash: Some(hash64(&self.header)),
            directory_hash: Some(hash64(&directory)),
        };
        self.put(&envelope.to_bytes(), &directory, end)
            .map_err(|err| Error::io(&self.path, &err))?;
        let path = self.path;
        let file = self.out.into_inner().map_err(|err| Error::io(&path, err.error()))?;
        Ok(Whole { path, file, bytes: end })
    }

    /// Writes what lies behind the blob, then what lies before it, and waits until the disk has it.
    fn put(&mut self, envelope: &[u8], directory: &[u8], end: u64) -> std::io::Result<()> {
        for section in [&self.masks, &self.vocab, &self.index].into_iter().flatten() {
            self.out.write_all(section)?;
        }
        self.out.seek(SeekFrom::Start(0))?;
        self.out.write_all(envelope)?;
        self.out.write_all(&self.header)?;
        self.out.write_all(directory)?;
        self.out.flush()?;
        let file = self.out.get_ref().as_file();
        // Without tensors and sections nothing was written behind the hole before the blob.
        file.set_len(end)?;
        file.sync_all()
    }
}

/// A file that is written and safe on the disk, but does not have its name yet. Dropped it leaves nothing behind.
pub struct Whole {
    path: PathBuf,
    file: NamedTempFile,
    bytes: u64,
}

impl Whole {
    /// Gives the file its name, replacing a regular file that has it. Returns its length in bytes. Errors: `Io`.
    pub fn publish(self) -> Result<u64> {
        let Whole { path, file, bytes } = self;
        file.persist(&path).map_err(|err| Error::io(&path, &err.error))?;
        sync_directory(&path)?;
        Ok(bytes)
    }
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
