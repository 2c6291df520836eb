//! safetensors files: the checked table of their tensors.
//!
//! The `safetensors` crate checks the header: sizes against shapes, order, gaps and the end of the file. It accepts duplicate
//! names, which are refused here.

use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result, bail};
use crate::format::json;
use safetensors::SafeTensors;
use serde::Deserialize;
use serde_json::Value;
use std::ops::Range;

/// The key of the header's entry that is no tensor.
const METADATA: &str = "__metadata__";

/// One tensor of a file.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// The name in the file.
    pub name: String,
    /// How its values are stored.
    pub dtype: safetensors::Dtype,
    /// Row-major shape.
    pub shape: Vec<u64>,
    /// The byte range in the file, checked to be inside it.
    pub range: Range<usize>,
}

impl Tensor {
    /// The type of the values. Errors: `UnsupportedTensorType` for everything but F32, F16 and BF16.
    pub fn element(&self) -> Result<Dtype> {
        match self.dtype {
            safetensors::Dtype::F32 => Ok(Dtype::F32),
            safetensors::Dtype::F16 => Ok(Dtype::F16),
            safetensors::Dtype::BF16 => Ok(Dtype::Bf16),
            other => bail!(
                UnsupportedTensorType,
                "tensor '{}' has type {other:?}; readable are F32, F16 and BF16",
                self.name
            ),
        }
    }
}

/// The tensors of the file `bytes`, in the order of their data.
///
/// Errors: `Parse` and `Bounds` for a damaged file, `UnsupportedTensorType` for an unknown type.
pub fn parse(bytes: &[u8]) -> Result<Vec<Tensor>> {
    let length = bytes.first_chunk().map(|length: &[u8; 8]| u64::from_le_bytes(*length));
    let Some(length) = length else {
        bail!(
            Bounds,
            "a safetensors file starts with 8 bytes of header length, this one has {} bytes",
            bytes.len()
        );
    };
    let header = usize::try_from(length)
        .ok()
        .and_then(|length| length.checked_add(8))
        .and_then(|end| bytes.get(8..end));
    let Some(header) = header else {
        bail!(
            Bounds,
            "the safetensors header of {length} bytes does not fit the file of {} bytes",
            bytes.len()
        );
    };
    for (name, entry) in json::parse_object(header, "the safetensors header")? {
        let dtype = entry.get("dtype").and_then(Value::as_str);
        let known = |name: &str| safetensors::Dtype::deserialize(Value::from(name)).is_ok();
        if let Some(dtype) = dtype.filter(|dtype| name != METADATA && !known(dtype)) {
            bail!(
                UnsupportedTensorType,
                "tensor '{name}' has type '{dtype}'; readable are F32, F16 and BF16"
            );
        }
    }
    let (_, table) = SafeTensors::read_metadata(bytes)
        .map_err(|err| Error::new(Kind::Parse, format!("the safetensors header: {err}")))?;
    let data = 8 + header.len();
    let mut tensors = Vec::new();
    for name in table.offset_keys() {
        let Some(info) = table.info(&name) else { continue };
        let (first, last) = info.data_offsets;
        let range = data
            .checked_add(first)
            .zip(data.checked_add(last))
            .map(|(first, last)| first..last);
        let Some(range) = range.filter(|range| range.end <= bytes.len()) else {
            bail!(Bounds, "tensor '{name}' lies past the end of the file");
        };
        let shape = info.shape.iter().map(|&dim| dim as u64).collect();
        tensors.push(Tensor {
            name,
            dtype: info.dtype,
            shape,
            range,
        });
    }
    Ok(tensors)
}
