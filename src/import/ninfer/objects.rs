//! Tensors of the network in objects.

use super::names::{
    DRAFT_HEAD, FROM_ROLES, FRONTEND, GATED, LAYERS, OUTSIDE, SIGNS, TEXT, WHOLE, WIDTHS, is_gated, numbered, roles,
    rows_of,
};
use crate::dtype::Dtype;
use crate::error::{Error, Result, bail, error};
use crate::format::ninfer::{Format, Ninfer, Object, RowSplit, Tensor};
use crate::format::{Arch, MappedFile};
use crate::import::family::Family;
use crate::import::gathered::{Form, Gathered, Piece};
use crate::import::matrix::{Found, Matrix};
use crate::import::roles::{CONVOLUTION, Dim, LAYER_PREFIX};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Rows of an object.
#[derive(Clone)]
struct Part<'a> {
    object: &'a Object,
    tensor: &'a Tensor,
    rows: Range<u64>,
}

/// Rows by layer, part of the layer, and role.
type Parts<'a> = BTreeMap<(u64, &'static str, &'static str), Part<'a>>;

/// The objects of a file.
pub(super) struct Objects<'a> {
    pub file: &'a Arc<MappedFile>,
    pub directory: &'a Ninfer,
}

impl<'a> Objects<'a> {
    /// The tensors of the language model under the container's names. Objects of the language model that are unknown keep
    /// theirs, which the binder refuses.
    ///
    /// Errors: `Parse` for rows that are not those of the roles, `MissingTensor` for a role that a tensor lacks,
    /// `UnsupportedTensorType` for one tensor in several formats.
    pub fn tensors(&self, family: &Family, arch: &Arch) -> Result<Found> {
        let mut found = Found::new();
        let mut parts = Parts::new();
        for object in &self.directory.objects {
            let name = object.name.as_str();
            if !name.starts_with(TEXT) || name.starts_with(DRAFT_HEAD) || name == SIGNS || name == WIDTHS {
                continue;
            }
            let Some(tensor) = &object.tensor else {
                bail!(UnsupportedModel, "resource '{name}' is no part of the language model");
            };
            let layer = name.strip_prefix(LAYERS).and_then(numbered);
            let whole = match layer {
                Some((layer, rest)) => {
                    let known = WHOLE.iter().find(|(own, _)| *own == rest);
                    known.map(|(_, name)| format!("{LAYER_PREFIX}{layer}.{name}"))
                }
                None => OUTSIDE
                    .iter()
                    .find(|(own, _)| *own == name)
                    .map(|(_, name)| (*name).to_owned()),
            };
            if let Some(whole) = whole {
                let matrix = self.whole(object, tensor, whole.ends_with(CONVOLUTION))?;
                // Names of objects are unique, and so are these.
                found.insert(whole, matrix);
            } else if let Some((layer, rest)) = layer
                && let Some((group, roles)) = roles(rest)
            {
                split(object, tensor, arch, (layer, group), roles, &mut parts)?;
            } else {
                found.insert(name.to_owned(), self.whole(object, tensor, false)?);
            }
        }
        self.join(family, arch, parts, &mut found)?;
        Ok(found)
    }

    /// One note for each group of objects that are not used: its name and their number.
    pub fn left_out(&self) -> Vec<String> {
        let used = [
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "chat_template.json",
            "generation_config.json",
        ];
        let mut groups: BTreeMap<&str, usize> = BTreeMap::new();
        for object in &self.directory.objects {
            let name = object.name.as_str();
            let group = match name.strip_prefix(FRONTEND) {
                Some(resource) if used.contains(&resource) => continue,
                _ if name.starts_with(DRAFT_HEAD) => DRAFT_HEAD,
                _ if name.starts_with(TEXT) => continue,
                _ => name.split_inclusive('/').next().unwrap_or(name),
            };
            *groups.entry(group).or_default() += 1;
        }
        let note = |(group, count)| format!("objects '{group}*' are left out: {count}");
        groups.into_iter().map(note).collect()
    }

    /// The rows of a format in which tensors can be read. Errors: `Parse` for another format.
    pub fn words<T>(&self, name: &str, format: Format, read: impl Fn([u8; 4]) -> T) -> Result<Option<Vec<T>>> {
        let Some(object) = self.directory.find(name) else {
            return Ok(None);
        };
        match &object.tensor {
            Some(tensor) if tensor.format == format && tensor.shape.len() == 1 => {}
            _ => bail!(Parse, "object '{name}': expected a vector in format {}", format.name()),
        }
        self.file.check_length()?;
        let bytes = self.file.bytes().get(object.range.clone()).unwrap_or_default();
        Ok(Some(bytes.as_chunks().0.iter().map(|&word| read(word)).collect()))
    }

    /// An object as a tensor of its own.
    fn whole(&self, object: &Object, tensor: &Tensor, transposed: bool) -> Result<Matrix> {
        let shape = tensor.shape.clone();
        let (dtype, word) = match (dtype(tensor.format), word(tensor.format)) {
            (Ok(dtype), word) => (dtype, word),
            (Err(err), _) => return Ok(self.unreadable(object, shape, err)),
        };
        match (word, &shape[..]) {
            (Some(word), &[taps, channels]) if transposed => {
                let piece = Piece {
                    object: object.range.clone(),
                    form: Form::Columns(word),
                    rows: 0..channels as usize,
                };
                let gathered = Gathered::new(self.file, vec![piece], taps as usize * word);
                Ok(Matrix::gathered(vec![channels, 1, taps], gathered, dtype))
            }
            (Some(_), _) => Matrix::in_file(shape, self.file, object.range.clone(), Ok(dtype)),
            (None, _) => {
                let rows = 0..shape.first().copied().unwrap_or(0);
                self.rows(&[Part { object, tensor, rows }])
            }
        }
    }

    fn unreadable(&self, object: &Object, shape: Vec<u64>, err: Error) -> Matrix {
        Matrix::unreadable(shape, self.file, err.context(format_args!("object '{}'", object.name)))
    }

    /// A matrix of these rows, one below the other. All parts are parts of matrices.
    fn rows(&self, parts: &[Part]) -> Result<Matrix> {
        let Some(first) = parts.first() else {
            bail!(Internal, "a matrix of no parts");
        };
        let (format, cols) = (first.tensor.format, first.tensor.shape.last().copied().unwrap_or(0));
        if let Some(other) = parts
            .iter()
            .find(|part| part.tensor.format != format || part.tensor.shape.last() != Some(&cols))
        {
            bail!(
                UnsupportedTensorType,
                "objects '{}' and '{}' have parts of one tensor, and differ in format or width",
                first.object.name,
                other.object.name
            );
        }
        let rows = parts.iter().map(|part| part.rows.end - part.rows.start).sum();
        let shape = vec![rows, cols];
        let dtype = match dtype(format) {
            Ok(dtype) => dtype,
            Err(err) => return Ok(self.unreadable(first.object, shape, err)),
        };
        if let Some(word) = word(format) {
            let row_bytes = cols as usize * word;
            if let [part] = parts {
                let range = part.rows.start as usize * row_bytes..part.rows.end as usize * row_bytes;
                let start = first.object.range.start;
                return Matrix::in_file(shape, self.file, start + range.start..start + range.end, Ok(dtype));
            }
            let pieces = parts.iter().map(|part| part.piece(Form::Rows)).collect();
            return Ok(Matrix::gathered(
                shape,
                Gathered::new(self.file, pieces, row_bytes),
                dtype,
            ));
        }
        if !cols.is_multiple_of(128) {
            let err = error!(
                UnsupportedModel,
                "rows of {cols} columns in format {} are no whole blocks of 128",
                format.name()
            );
            return Ok(self.unreadable(first.object, shape, err));
        }
        let mut row_bytes = 0;
        let pieces = parts.iter().map(|part| {
            let planes = RowSplit::new(format, part.tensor.shape[0], cols);
            let planes =
                planes.ok_or_else(|| error!(Internal, "object '{}' has no planes of rows", part.object.name))?;
            row_bytes = planes.block_row_bytes();
            Ok(part.piece(Form::Planes(planes)))
        });
        let pieces = pieces.collect::<Result<Vec<_>>>()?;
        Ok(Matrix::gathered(
            shape,
            Gathered::new(self.file, pieces, row_bytes),
            dtype,
        ))
    }

    /// Makes tensors of the rows of roles. Roles that are not used keep the name that they have in the file.
    fn join(&self, family: &Family, arch: &Arch, mut parts: Parts, found: &mut Found) -> Result<()> {
        let mut layers: Vec<u64> = parts.keys().map(|&(layer, ..)| layer).collect();
        layers.dedup();
        for layer in layers {
            for (name, group, roles) in FROM_ROLES {
                let is_gated = is_gated(name, family);
                let roles = if is_gated { GATED } else { roles };
                let object = |role: &str| format!("{LAYERS}{layer}/{group}/{role}");
                let present = |role: &&&str| parts.contains_key(&(layer, group, **role));
                let absent: Vec<_> = roles.iter().filter(|role| !present(role)).collect();
                if absent.len() == roles.len() {
                    continue;
                }
                if let Some(role) = absent.first() {
                    bail!(MissingTensor, "the source lacks '{}'", object(role));
                }
                let own = roles.iter().filter_map(|role| parts.remove(&(layer, group, *role)));
                let mut own: Vec<Part> = own.collect();
                if let [query, gate] = &own[..]
                    && is_gated
                {
                    own = interleaved(query, gate, arch.head_dim as u64);
                }
                found.insert(format!("{LAYER_PREFIX}{layer}.{name}"), self.rows(&own)?);
            }
        }
        for ((layer, group, role), part) in parts {
            found.insert(format!("{LAYERS}{layer}/{group}/{role}"), self.rows(&[part])?);
        }
        Ok(())
    }
}

impl Part<'_> {
    fn piece(&self, form: Form) -> Piece {
        Piece {
            object: self.object.range.clone(),
            form,
            rows: self.rows.start as usize..self.rows.end as usize,
        }
    }
}

/// The rows of the first head of `query`, the rows of its gate, those of the next head, and so on.
fn interleaved<'a>(query: &Part<'a>, gate: &Part<'a>, head_dim: u64) -> Vec<Part<'a>> {
    let heads = (query.rows.end - query.rows.start) / head_dim.max(1);
    let of_head = |part: &Part<'a>, head: u64| {
        let first = part.rows.start + head * head_dim;
        Part {
            rows: first..first + head_dim,
            ..part.clone()
        }
    };
    let heads = (0..heads).flat_map(|head| [of_head(query, head), of_head(gate, head)]);
    heads.collect()
}

/// Adds the rows of every role of an object to `parts`.
fn split<'a>(
    object: &'a Object,
    tensor: &'a Tensor,
    arch: &Arch,
    (layer, group): (u64, &'static str),
    roles: Vec<(&'static str, Dim)>,
    parts: &mut Parts<'a>,
) -> Result<()> {
    let name = &object.name;
    let ends = roles.iter().scan(0u64, |end, &(_, dim)| {
        *end = end.saturating_add(rows_of(arch, dim));
        Some(*end)
    });
    let ends: Vec<u64> = ends.collect();
    let all = ends.last().copied().unwrap_or(0);
    match tensor.shape[..] {
        [rows, _] if rows == all => {}
        _ => bail!(
            Parse,
            "object '{name}' has shape {:?}, the configuration says {all} rows",
            tensor.shape
        ),
    }
    let mut start = 0;
    for ((role, _), end) in roles.into_iter().zip(ends) {
        let part = Part {
            object,
            tensor,
            rows: start..end,
        };
        if parts.insert((layer, group, role), part).is_some() {
            bail!(
                Parse,
                "object '{name}': the rows of '{role}' occur twice in layer {layer}"
            );
        }
        start = end;
    }
    Ok(())
}

/// Bytes of a value, in formats that store values one by one.
fn word(format: Format) -> Option<usize> {
    match format {
        Format::Bf16 => Some(2),
        Format::Fp32 => Some(4),
        _ => None,
    }
}

/// The weight type of a format. Errors: `UnsupportedTensorType`.
fn dtype(format: Format) -> Result<Dtype> {
    match format {
        Format::Bf16 => Ok(Dtype::Bf16),
        Format::Fp32 => Ok(Dtype::F32),
        Format::Pq2_0 => Ok(Dtype::PQ2_0),
        Format::Ptq1_0 => Ok(Dtype::PTQ1_0),
        other => bail!(
            UnsupportedTensorType,
            "weights in format {}, supported: BF16, FP32, PQ2_0_G128, PTQ1_0_G128",
            other.name()
        ),
    }
}
