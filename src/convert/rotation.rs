//! Rotated matrices: kept in their basis, or multiplied back. They are never written as plain ones.

use crate::error::{Error, Kind, Result, bail};
use crate::format::hadamard::Hadamard;
use crate::import::Tensor;
use serde_json::{Map, Value};
use std::collections::HashSet;

/// The member of `arch` that states a rotation.
const MEMBER: &str = "prism_hadamard";

/// The rotation that a header states. Errors: `Parse`.
pub(super) fn stated(header: &Map<String, Value>) -> Result<Option<Hadamard>> {
    let stated = header.get("arch").and_then(|arch| arch.get(MEMBER));
    match stated.filter(|stated| !stated.is_null()) {
        None => Ok(None),
        Some(stated) => serde_json::from_value(stated.clone())
            .map(Some)
            .map_err(|err| Error::new(Kind::Parse, format!("arch.{MEMBER}: {err}"))),
    }
}

/// Removes the statement from a header.
pub(super) fn remove(header: &mut Map<String, Value>) {
    if let Some(Value::Object(arch)) = header.get_mut("arch") {
        arch.remove(MEMBER);
    }
}

/// Checks that a file can state the rotation of these tensors.
///
/// Errors: `UnsupportedFeature` if rotated matrices are parts of other tensors, or have columns in an order of their own.
pub(super) fn check(rotation: &Hadamard, tensors: &[Tensor]) -> Result<()> {
    all_found(rotation, tensors)?;
    match tensors
        .iter()
        .find(|tensor| is_rotated(rotation, tensor) && tensor.data.has_tiled_columns())
    {
        None => Ok(()),
        Some(tensor) => bail!(
            UnsupportedFeature,
            "tensor '{}' is rotated in another order of its columns, which a CMF file cannot state; \
             with a type for all matrices it is un-rotated",
            tensor.name
        ),
    }
}

/// The tensors without the rotation: every rotated row w' is s ⊙ H(w'), computed in f64 when it is read. Also returns the names
/// of those that were rotated.
///
/// Errors: `UnsupportedFeature` if rotated matrices are parts of other tensors, or replaced by skills; those of
/// [`Hadamard::signs`].
pub(super) fn undone(rotation: &Hadamard, tensors: Vec<Tensor>) -> Result<(Vec<Tensor>, HashSet<String>)> {
    all_found(rotation, &tensors)?;
    if let Some(skill) = tensors.iter().find(|tensor| tensor.name.starts_with("skill.")) {
        bail!(
            UnsupportedFeature,
            "tensor '{}': a model with skills keeps its rotation",
            skill.name
        );
    }
    let mut names = HashSet::new();
    let plain = tensors.into_iter().map(|mut tensor| {
        if is_rotated(rotation, &tensor) {
            let plain = |tensor: Tensor| {
                let (_, cols) = tensor.data.rows_cols();
                tensor.data.unrotated(rotation.signs(cols)?, rotation.block())
            };
            let name = tensor.name.clone();
            let data = plain(tensor).map_err(|err| err.context(format!("tensor '{name}'")))?;
            names.insert(name.clone());
            tensor = Tensor { name, data };
        }
        Ok(tensor)
    });
    let plain = plain.collect::<Result<_>>()?;
    Ok((plain, names))
}

fn is_rotated(rotation: &Hadamard, tensor: &Tensor) -> bool {
    rotation.forward.contains(&tensor.name) || rotation.inverse.contains(&tensor.name)
}

/// Errors: `UnsupportedFeature` for the name of a rotated matrix that is no tensor of its own.
fn all_found(rotation: &Hadamard, tensors: &[Tensor]) -> Result<()> {
    let names: HashSet<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    let mut rotated = rotation.forward.iter().chain(&rotation.inverse);
    match rotated.find(|name| !names.contains(name.as_str())) {
        None => Ok(()),
        Some(name) => bail!(
            UnsupportedFeature,
            "rotated matrix '{name}' is part of another tensor in a CMF file"
        ),
    }
}
