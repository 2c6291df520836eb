//! A safetensors file: the checked table of its tensors.
//!
//! The `safetensors` crate checks the header (sizes against shapes, order, holes, end of file); what it lets pass, namely
//! duplicate names, is refused here. Knows no tensor's meaning.

use crate::error::{Error, Kind, Result, bail};
use half::{bf16, f16};
use safetensors::SafeTensors;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

/// One tensor of a file.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// The name in the file.
    pub name: String,
    /// How its values are stored.
    pub dtype: safetensors::Dtype,
    /// Row-major shape.
    pub shape: Vec<u64>,
    /// Where its bytes lie in the file; checked to be inside it.
    pub range: Range<usize>,
}

/// How the values of a readable tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the format's own")]
pub enum Float {
    F32,
    F16,
    Bf16,
}

impl Tensor {
    /// How to read the values. Errors: `UnsupportedTensorType` for everything but F32, F16 and BF16.
    pub fn float(&self) -> Result<Float> {
        match self.dtype {
            safetensors::Dtype::F32 => Ok(Float::F32),
            safetensors::Dtype::F16 => Ok(Float::F16),
            safetensors::Dtype::BF16 => Ok(Float::Bf16),
            other => bail!(
                UnsupportedTensorType,
                "tensor '{}' has type {other:?}; readable are F32, F16 and BF16",
                self.name
            ),
        }
    }
}

impl Float {
    /// Bytes of one value.
    pub fn bytes(self) -> usize {
        match self {
            Float::F32 => 4,
            Float::F16 | Float::Bf16 => 2,
        }
    }

    /// Writes the values of `bytes` to `out`. Errors: `Bounds` when their numbers differ.
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) -> Result<()> {
        if Some(bytes.len()) != out.len().checked_mul(self.bytes()) {
            bail!(
                Bounds,
                "{} bytes do not hold {} {self:?} values",
                bytes.len(),
                out.len()
            );
        }
        let values = bytes.chunks_exact(self.bytes()).zip(out);
        match self {
            Float::F32 => values.for_each(|(b, value)| *value = f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
            Float::F16 => values.for_each(|(b, value)| *value = f16::from_le_bytes([b[0], b[1]]).to_f32()),
            Float::Bf16 => values.for_each(|(b, value)| *value = bf16::from_le_bytes([b[0], b[1]]).to_f32()),
        }
        Ok(())
    }
}

/// The tensors of the file `bytes`, in the order of their data.
///
/// Errors: `Parse` and `Bounds` for damage, `UnsupportedTensorType` for a type that the format does not know.
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
    let probe = |err: serde_json::Error| Error::new(Kind::Parse, format!("the safetensors header: {err}"));
    let Probes(types) = serde_json::from_slice(header).map_err(probe)?;
    for (name, probe) in &types {
        let known = |name: &str| safetensors::Dtype::deserialize(serde_json::Value::from(name)).is_ok();
        if let Some(dtype) = probe.dtype.as_deref().filter(|dtype| !known(dtype)) {
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

/// The header's entries with their type names, read only to refuse duplicates and unknown types by name.
struct Probes(HashMap<String, Probe>);

#[derive(Deserialize)]
struct Probe {
    dtype: Option<String>,
}

impl<'de> Deserialize<'de> for Probes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_map(ProbesVisitor)
    }
}

struct ProbesVisitor;

impl<'de> Visitor<'de> for ProbesVisitor {
    type Value = Probes;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Probes, A::Error> {
        let mut probes = HashMap::new();
        while let Some(name) = map.next_key::<String>()? {
            let probe = if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                Probe { dtype: None }
            } else {
                map.next_value()?
            };
            if let Some(name) = probes.insert(name.clone(), probe).map(|_| name) {
                return Err(serde::de::Error::custom(format!("'{name}' occurs twice")));
            }
        }
        Ok(Probes(probes))
    }
}
