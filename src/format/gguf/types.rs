//! The tensor types of GGUF by number.

use crate::dtype::Dtype;
use crate::error::{Result, bail};

/// A number that two incompatible layouts use.
const Q2_0: u32 = 42;

/// The names of numbers that cannot be read, for error texts.
const OTHERS: [(u32, &str); 17] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (40, "NVFP4"),
    (41, "Q1_0"),
    (Q2_0, "Q2_0"),
];

/// The type with this number. Errors: `UnsupportedTensorType` with `tensor` and the type's name and number.
pub fn dtype(number: u32, tensor: &str) -> Result<Dtype> {
    if let Some(dtype) = Dtype::from_gguf(number) {
        return Ok(dtype);
    }
    let name = OTHERS
        .iter()
        .find(|(known, _)| *known == number)
        .map_or("an unknown type", |(_, name)| name);
    let hint = match number {
        Q2_0 => "; two layouts use this id, with blocks of 64 and of 128 weights, and the file does not say which",
        _ => "",
    };
    let readable = Dtype::all().filter(|dtype| dtype.gguf().is_some());
    let readable: Vec<_> = readable.map(|dtype| dtype.name().to_uppercase()).collect();
    bail!(
        UnsupportedTensorType,
        "tensor '{tensor}' has type {number} ({name}); readable are {}{hint}",
        readable.join(", ")
    );
}
