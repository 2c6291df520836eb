//! Writing a file, under a temporary name that is renamed at the end.

use super::directory::{
    Identity, MAGIC, PAYLOAD_ALIGNMENT, PREFIX, RESOURCE_ENCODING, TENSOR_ALIGNMENT, Tensor, VERSION,
};
use crate::error::{Error, Kind, Result, bail};
use crate::format::output::{publish, target, temporary_beside};
use serde_json::json;
use std::collections::HashSet;
use std::io::{BufWriter, Write};
use std::path::Path;

/// An object to be written.
pub struct NewObject<'a> {
    /// The name.
    pub name: String,
    /// Shape and format; `None` for a resource.
    pub tensor: Option<Tensor>,
    /// Bytes of the payload.
    pub bytes: u64,
    /// Makes the payload. Called once, when its turn comes.
    pub payload: Box<dyn FnOnce() -> Result<Vec<u8>> + 'a>,
}

/// Writes a file of these objects, in this order, replacing a regular file at `path`. Returns its length in bytes.
///
/// Errors: `Internal` for objects that the format cannot hold and for payloads of another length than announced; `Io`; those
/// of the payloads. After an error no file is left.
pub fn write(path: &Path, identity: &Identity, objects: Vec<NewObject>) -> Result<u64> {
    let (directory, offsets) = directory(identity, &objects)?;
    let start = (PREFIX + directory.len() as u64).next_multiple_of(PAYLOAD_ALIGNMENT);
    let path = target(path)?;
    let file = temporary_beside(&path)?;
    let io = |err: std::io::Error| Error::io(&path, &err);
    let mut out = BufWriter::new(file);
    out.write_all(&MAGIC).map_err(io)?;
    out.write_all(&[VERSION]).map_err(io)?;
    out.write_all(&(directory.len() as u64).to_le_bytes()).map_err(io)?;
    out.write_all(&directory).map_err(io)?;
    let mut at = PREFIX + directory.len() as u64;
    for (object, offset) in objects.into_iter().zip(offsets) {
        let gap = (start + offset).saturating_sub(at);
        std::io::copy(&mut std::io::Read::take(std::io::repeat(0), gap), &mut out).map_err(io)?;
        let payload = (object.payload)()?;
        if payload.len() as u64 != object.bytes {
            let (name, bytes, found) = (object.name, object.bytes, payload.len());
            bail!(Internal, "object '{name}' has {found} bytes, expected {bytes}");
        }
        out.write_all(&payload).map_err(io)?;
        at += gap + object.bytes;
    }
    let file = out.into_inner().map_err(|err| io(err.into_error()))?;
    file.as_file().sync_all().map_err(io)?;
    publish(file.into_temp_path(), &path)?;
    Ok(at)
}

/// The text of the directory, and the offset of each object.
fn directory(identity: &Identity, objects: &[NewObject]) -> Result<(Vec<u8>, Vec<u64>)> {
    let mut names = HashSet::new();
    let mut entries = Vec::with_capacity(objects.len());
    let mut offsets = Vec::with_capacity(objects.len());
    let mut end = 0u64;
    for NewObject {
        name, tensor, bytes, ..
    } in objects
    {
        if name.is_empty() || *bytes == 0 || !names.insert(name) {
            bail!(Internal, "object '{name}' of {bytes} bytes is empty or occurs twice");
        }
        let offset = end.next_multiple_of(if tensor.is_some() { TENSOR_ALIGNMENT } else { 1 });
        entries.push(match tensor {
            Some(Tensor { shape, format }) => {
                let size = format.size(shape)?;
                if size != *bytes {
                    bail!(Internal, "tensor '{name}' of {bytes} bytes; layout requires {size}");
                }
                json!({
                    "name": name, "kind": "tensor", "shape": shape, "format": format.name(), "layout": format.layout(),
                    "offset": offset, "bytes": bytes
                })
            }
            None => json!({
                "name": name, "kind": "resource", "encoding": RESOURCE_ENCODING, "offset": offset, "bytes": bytes
            }),
        });
        offsets.push(offset);
        end = offset + bytes;
    }
    let root = json!({"identity": identity, "objects": entries});
    let text = serde_json::to_vec(&root);
    Ok((
        text.map_err(|err| Error::new(Kind::Internal, err.to_string()))?,
        offsets,
    ))
}
