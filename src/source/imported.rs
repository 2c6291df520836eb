//! GGUF files, `.ninfer` files and Hugging Face directories as model sources.
//!
//! Tensors have the types and the values of the files. Matrices are read in place, also those whose rows the files have in
//! another order. What a file has in another form, or in pieces, is made when it is read.

use super::model::{ModelSource, SamplingDefaults, TextAssets};
use super::tensors::{Place, Stored, Tensors};
use crate::dtype::encode::encode;
use crate::dtype::{Dtype, Order, Size};
use crate::error::{Error, Kind, Result, bail};
use crate::format::cmf::TokenizerConfig;
use crate::format::hadamard::Hadamard;
use crate::format::{TensorId, TensorInfo};
use crate::import::{Model, Tensor};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

/// The tensors of an imported model.
pub struct ImportedTensors {
    tensors: Vec<Tensor>,
    infos: Vec<TensorInfo>,
    /// How each tensor is read; `None`: it is made from its values.
    orders: Vec<Option<Order>>,
    /// Whether the columns of each are in tiled order.
    tiled: Vec<bool>,
    ids: HashMap<String, TensorId>,
    files: Vec<PathBuf>,
}

impl ImportedTensors {
    /// The tensors of `files`, of which those that `rotation` names are rotated.
    ///
    /// Errors: `UnsupportedTensorType` for a matrix whose payload cannot be used as it is, and for a shape that its type does
    /// not allow; `Bounds` for a payload of another size than its shape has.
    pub fn new(tensors: Vec<Tensor>, files: Vec<PathBuf>, rotation: Option<&Hadamard>) -> Result<ImportedTensors> {
        let mut set = ImportedTensors {
            infos: Vec::with_capacity(tensors.len()),
            orders: Vec::with_capacity(tensors.len()),
            tiled: Vec::with_capacity(tensors.len()),
            ids: HashMap::with_capacity(tensors.len()),
            tensors,
            files,
        };
        for (id, tensor) in set.tensors.iter().enumerate() {
            let rotated = rotation.is_some_and(|rotation| rotation.forward.contains(&tensor.name));
            let read = reading(tensor, rotated).map_err(|err| err.context(format!("tensor '{}'", tensor.name)));
            let Reading { info, order, tiled } = read?;
            set.ids.insert(info.name.clone(), id);
            set.infos.push(info);
            set.orders.push(order);
            set.tiled.push(tiled);
        }
        Ok(set)
    }

    fn get(&self, id: TensorId) -> Result<&Tensor> {
        match self.tensors.get(id) {
            Some(tensor) => Ok(tensor),
            None => bail!(Internal, "tensor {id} of {}", self.tensors.len()),
        }
    }
}

/// How a tensor is read.
struct Reading {
    info: TensorInfo,
    /// The order in which it is read in place; `None`: it is made from its values.
    order: Option<Order>,
    tiled: bool,
}

/// How a tensor is read. `rotated`: its columns cannot move.
fn reading(tensor: &Tensor, rotated: bool) -> Result<Reading> {
    let data = &tensor.data;
    let is_vector = data.shape.len() == 1;
    // Elements of a vector are not rows: a vector in another order, or of a type for matrices, is made.
    let plain = |dtype: Dtype, order: Order| order.is_same() && dtype.block().is_some_and(|(weights, _)| weights == 1);
    let (dtype, mut order) = match data.stored() {
        Some((dtype, order)) if !is_vector || plain(dtype, order) => (dtype, Some(order)),
        _ if is_vector => (Dtype::F32, None),
        _ => bail!(
            UnsupportedTensorType,
            "type {}: its weights cannot be used as they are in the file; convert the model",
            data.dtype()?.name()
        ),
    };
    // Heads that are rotated or no whole blocks cannot be moved; then the network follows the order of the file.
    let tiled = order.as_mut().is_some_and(|order| {
        let blocks = dtype.block().map_or(usize::MAX, |(weights, _)| weights);
        order
            .cols
            .take_if(|heads| rotated || !heads.keeps_blocks(blocks))
            .is_some()
    });
    let (Size::Exact(size) | Size::AtLeast(size)) = dtype.size(&data.shape)?;
    let nbytes = match order {
        Some(_) => data.nbytes()? as u64,
        None => size,
    };
    if nbytes != size {
        bail!(
            Bounds,
            "{nbytes} bytes; type {} and shape {:?} require {size}",
            dtype.name(),
            data.shape
        );
    }
    let info = TensorInfo {
        name: tensor.name.clone(),
        dtype,
        shape: data.shape.clone(),
        nbytes,
    };
    Ok(Reading { info, order, tiled })
}

impl Tensors for ImportedTensors {
    fn infos(&self) -> &[TensorInfo] {
        &self.infos
    }

    fn find(&self, name: &str) -> Option<TensorId> {
        self.ids.get(name).copied()
    }

    fn stored(&self, id: TensorId) -> Result<Stored<'_>> {
        let Tensor { name, data } = self.get(id)?;
        let info = &self.infos[id];
        let made = || {
            let (rows, cols) = info.rows_cols();
            encode(info.dtype, rows, cols, &*data.reader()?)
        };
        let bytes = match self.orders[id] {
            Some(_) => data.bytes()?,
            None => Cow::Owned(made().map_err(|err| err.context(format!("tensor '{name}'")))?),
        };
        Ok(Stored {
            info,
            bytes,
            order: self.orders[id].unwrap_or_default(),
        })
    }

    fn place(&self, id: TensorId) -> Option<Place> {
        let (path, offset) = self.tensors.get(id)?.data.place()?;
        let file = self.files.iter().position(|file| file == path)?;
        Some(Place {
            file,
            offset,
            hash: None,
        })
    }

    fn has_tiled_columns(&self, id: TensorId) -> bool {
        self.tiled.get(id) == Some(&true)
    }

    fn release(&self, id: TensorId) {
        if let Some(tensor) = self.tensors.get(id) {
            tensor.data.release();
        }
    }
}

impl ModelSource {
    /// The model that an importer has read. Errors: those of [`ImportedTensors::new`], `Tokenizer` for ids out of range.
    pub fn from_import(mut model: Model) -> Result<ModelSource> {
        let tensors = std::mem::take(&mut model.tensors);
        let tensors = ImportedTensors::new(tensors, model.files.clone(), model.arch.prism_hadamard.as_ref())?;
        ModelSource::described(model, Arc::new(tensors))
    }

    /// A model that an importer has read, with these tensors instead of its own. Errors: `Tokenizer` for ids out of range.
    pub(crate) fn described(model: Model, tensors: Arc<dyn Tensors>) -> Result<ModelSource> {
        let config = Value::from(model.tokenizer_config);
        let config: TokenizerConfig = serde_json::from_value(config)
            .map_err(|err| Error::new(Kind::Tokenizer, format!("the tokenizer's settings: {err}")))?;
        let provenance = Value::from(model.provenance);
        Ok(ModelSource {
            format: model.format,
            arch: model.arch,
            tensors,
            text: TextAssets {
                tokenizer_json: model.vocab.map(|vocab| Arc::new(vocab) as _),
                chat_template: config.chat_template,
                eos_token_ids: config.eos_token_ids,
                bos_token_id: config.bos_token_id,
                pad_token_id: config.pad_token_id,
                sampling: SamplingDefaults::of(&provenance),
            },
            skills: Vec::new(),
            provenance,
            files: model.files,
            dropped: model.dropped,
            notes: model.notes,
            cmf: None,
        })
    }
}
