//! Latents as safetensors files with one f32 tensor, `latents [channels, height / 8, width / 8]`.

use cmf_gpu::image::Latents;
use cmf_gpu::{Error, Kind, Result};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use std::path::Path;

/// The tensor's name.
const NAME: &str = "latents";

/// Larger files are refused before they are read.
const MAX_BYTES: u64 = 1 << 30;

/// Reads latents. Errors: `Io`; `Parse` for a file without such a tensor.
pub fn read(path: &Path) -> Result<Latents> {
    let at = path.display();
    let io = |err: std::io::Error| Error::io(path, &err);
    let meta = std::fs::metadata(path).map_err(io)?;
    if !meta.is_file() || meta.len() > MAX_BYTES {
        let found = meta.len();
        let message = format!("{at}: expected a safetensors file of at most {MAX_BYTES} bytes, found {found}");
        return Err(Error::new(Kind::Io, message));
    }
    let bytes = std::fs::read(path).map_err(io)?;
    let parse = |what: &dyn std::fmt::Display| Error::new(Kind::Parse, format!("{at}: {what}"));
    let file = SafeTensors::deserialize(&bytes).map_err(|err| parse(&err))?;
    let tensor = file.tensor(NAME).map_err(|err| parse(&err))?;
    let (dtype, shape) = (tensor.dtype(), tensor.shape());
    let &[channels, height, width] = shape else {
        return Err(parse(&format_args!(
            "'{NAME}' has shape {shape:?}, expected [channels, height, width]"
        )));
    };
    if dtype != Dtype::F32 {
        return Err(parse(&format_args!("'{NAME}' is {dtype:?}, expected F32")));
    }
    let values = tensor.data().as_chunks().0.iter();
    Ok(Latents {
        channels,
        height,
        width,
        values: values.map(|bytes| f32::from_le_bytes(*bytes)).collect(),
    })
}

/// Writes latents. Errors: those of the file.
pub fn write(path: &Path, latents: &Latents) -> Result<(), SafeTensorError> {
    let bytes: Vec<u8> = latents.values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let shape = vec![latents.channels, latents.height, latents.width];
    let view = TensorView::new(Dtype::F32, shape, &bytes)?;
    safetensors::serialize_to_file([(NAME, view)], None, path)
}
