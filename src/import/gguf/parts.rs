//! The files that make up a GGUF model: one, or the parts of a split one.
//!
//! The name of any part gives those of all: `NAME-00002-of-00003.gguf` is the second of three. The first has the metadata.

use crate::error::{Result, bail};
use crate::format::MappedFile;
use crate::format::gguf::{Gguf, Metadata, Rotation, Tensor};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// All files of a model, open and checked, in order; never empty.
pub(super) struct Parts {
    first: Part,
    rest: Vec<Part>,
}

struct Part {
    file: Arc<MappedFile>,
    gguf: Gguf,
}

/// A part's description of the whole model.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Split {
    /// The number of this part, from 0.
    number: u64,
    count: u64,
    /// Tensors of all parts together.
    tensors: Option<u64>,
}

impl Parts {
    /// Opens the file at `path` and the other parts beside it, if there are any.
    ///
    /// Errors: those of a malformed file; `ShardMismatch` names the part that is missing or belongs to another model.
    pub fn open(path: &Path) -> Result<Parts> {
        let named = Part::open(path)?;
        let Some(split) = named.split()? else {
            return Ok(Parts {
                first: named,
                rest: Vec::new(),
            });
        };
        let part = |number: u64| -> Result<Part> {
            let beside = sibling(path, split, number)?;
            if !beside.is_file() {
                bail!(
                    ShardMismatch,
                    "{}: part {} of {} is missing",
                    beside.display(),
                    number + 1,
                    split.count
                );
            }
            let part = Part::open(&beside)?;
            match part.split()? {
                Some(found) if found == (Split { number, ..split }) => Ok(part),
                _ => bail!(
                    ShardMismatch,
                    "{}: this is not part {} of {} of the same model",
                    beside.display(),
                    number + 1,
                    split.count
                ),
            }
        };
        let parts = Parts {
            first: part(0)?,
            rest: (1..split.count).map(part).collect::<Result<_>>()?,
        };
        let found = parts.tensors().count();
        match split.tensors {
            Some(wanted) if wanted != found as u64 => bail!(
                ShardMismatch,
                "{}: the parts have {found} tensors, split.tensors.count says {wanted}",
                path.display()
            ),
            _ => Ok(parts),
        }
    }

    fn all(&self) -> impl Iterator<Item = &Part> {
        std::iter::once(&self.first).chain(&self.rest)
    }

    /// The files.
    pub fn files(&self) -> Vec<PathBuf> {
        self.all().map(|part| part.file.path().to_owned()).collect()
    }

    /// The metadata of the model.
    pub fn metadata(&self) -> &Metadata {
        &self.first.gguf.metadata
    }

    /// The rotation of the weights, if the metadata state one. Errors: those of [`Rotation::read`].
    pub fn rotation(&self) -> Result<Option<Rotation>> {
        let find = |name: &str| self.find(name).map(|(_, tensor)| tensor);
        Rotation::read(self.metadata(), self.bytes(), &find)
    }

    /// The bytes of the file with the metadata, which its lists refer to.
    pub fn bytes(&self) -> &[u8] {
        self.first.file.bytes()
    }

    /// Every tensor with its file.
    pub fn tensors(&self) -> impl Iterator<Item = (&Arc<MappedFile>, &Tensor)> {
        self.all()
            .flat_map(|part| part.gguf.tensors.iter().map(|tensor| (&part.file, tensor)))
    }

    /// The tensor called `name`.
    pub fn find(&self, name: &str) -> Option<(&Arc<MappedFile>, &Tensor)> {
        self.all().find_map(|part| Some((&part.file, part.gguf.find(name)?)))
    }
}

impl Part {
    fn open(path: &Path) -> Result<Part> {
        let file = MappedFile::open(path)?;
        let gguf = Gguf::parse(file.bytes()).map_err(|err| err.context(path.display()))?;
        Ok(Part {
            file: Arc::new(file),
            gguf,
        })
    }

    /// `None` for a file that is a whole model. Errors: `Parse` for numbers out of range.
    fn split(&self) -> Result<Option<Split>> {
        let metadata = &self.gguf.metadata;
        let (count, number) = (metadata.unsigned("split.count")?, metadata.unsigned("split.no")?);
        let Some(count) = count else {
            if let Some(key) = ["split.no", "split.tensors.count"]
                .into_iter()
                .find(|key| metadata.has(key))
            {
                bail!(
                    Parse,
                    "{}: the metadata have '{key}', but not 'split.count', the number of parts",
                    self.file.path().display()
                );
            }
            return Ok(None);
        };
        if count <= 1 {
            return Ok(None);
        }
        match number.filter(|&number| number < count && count <= u64::from(u16::MAX)) {
            Some(number) => Ok(Some(Split {
                number,
                count,
                tensors: metadata.unsigned("split.tensors.count")?,
            })),
            None => bail!(
                Parse,
                "{}: split.no is {number:?} and split.count is {count}",
                self.file.path().display()
            ),
        }
    }
}

/// The path of part `number`. Errors: `ShardMismatch` when the name of `path` does not fit its own number.
fn sibling(path: &Path, split: Split, number: u64) -> Result<PathBuf> {
    let ending = |number: u64| format!("-{:05}-of-{:05}.gguf", number + 1, split.count);
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    match name.strip_suffix(&ending(split.number)) {
        Some(stem) => Ok(path.with_file_name(format!("{stem}{}", ending(number)))),
        None => bail!(
            ShardMismatch,
            "{}: part {} of a split model is called NAME{}",
            path.display(),
            split.number + 1,
            ending(split.number)
        ),
    }
}
