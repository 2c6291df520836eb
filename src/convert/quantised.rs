//! A model that is quantised while it is loaded: the tensors that a conversion would write, made when they are read.

use super::bits::Bits;
use super::model::Model;
use super::options::Options;
use super::plan::Plan;
use super::{plan, rotation, write};
use crate::dtype::{Dtype, Order, Size};
use crate::error::{Result, bail};
use crate::format::{TensorId, TensorInfo};
use crate::import::{self, Format, Tensor};
use crate::source::{ModelSource, Stored, Tensors};
use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Opens the model at `src`, a Hugging Face directory, a GGUF or a `.ninfer` file, with the tensors of the container that
/// [`convert`](super::convert) writes with these options. Nothing is written: a tensor is encoded when its payload is asked for.
///
/// Errors: those of [`convert`](super::convert); `UnsupportedFeature` for a container.
pub fn quantised(src: &Path, options: Options) -> Result<ModelSource> {
    let model = match Format::of(src)? {
        Format::HuggingFace => import::hugging_face(src)?,
        Format::Gguf => import::gguf(src)?,
        Format::Ninfer => import::ninfer(src)?,
        Format::Cmf => bail!(
            UnsupportedFeature,
            "{}: a CMF file runs in the types that it has; convert it to change them",
            src.display()
        ),
    };
    let (model, tensors) = Model::joined(model)?;
    let mut model = model;
    let tensors = match (&model.arch.prism_hadamard, options.quant) {
        (Some(rotation), Some(_)) => {
            let (tensors, names) = rotation::undone(rotation, tensors)?;
            model.arch.prism_hadamard = None;
            model.notes.push(format!("un-rotated: lossy: {} matrices", names.len()));
            tensors
        }
        _ => tensors,
    };
    let (tensors, notes) = QuantisedTensors::new(tensors, options)?;
    model.notes.extend(notes);
    ModelSource::described(model, Arc::new(tensors))
}

struct QuantisedTensors {
    tensors: Vec<Tensor>,
    plan: Plan,
    infos: Vec<TensorInfo>,
    ids: HashMap<String, TensorId>,
    options: Options,
    bits: Mutex<Bits>,
}

impl QuantisedTensors {
    /// Also returns notes about the types. Errors: those of [`Plan::of`].
    fn new(tensors: Vec<Tensor>, options: Options) -> Result<(QuantisedTensors, Vec<String>)> {
        let tensors = plan::order(tensors);
        let mut plan = Plan::of(&tensors, &options, &mut |_| ControlFlow::Continue(()))?;
        let notes = std::mem::take(&mut plan.notes);
        let info = |(tensor, &dtype): (&Tensor, &Dtype)| {
            let (Size::Exact(nbytes) | Size::AtLeast(nbytes)) = dtype.size(&tensor.data.shape)?;
            Ok(TensorInfo {
                name: tensor.name.clone(),
                dtype,
                shape: tensor.data.shape.clone(),
                nbytes,
            })
        };
        let infos = tensors.iter().zip(&plan.dtypes).map(info).collect::<Result<Vec<_>>>()?;
        let ids = infos.iter().enumerate().map(|(id, info)| (info.name.clone(), id));
        let set = QuantisedTensors {
            ids: ids.collect(),
            infos,
            tensors,
            plan,
            options,
            bits: Mutex::default(),
        };
        Ok((set, notes))
    }
}

impl Tensors for QuantisedTensors {
    fn infos(&self) -> &[TensorInfo] {
        &self.infos
    }

    fn find(&self, name: &str) -> Option<TensorId> {
        self.ids.get(name).copied()
    }

    fn stored(&self, id: TensorId) -> Result<Stored<'_>> {
        let Some(info) = self.infos.get(id) else {
            bail!(Internal, "tensor {id} of {}", self.infos.len());
        };
        let widths = {
            let mut bits = self.bits.lock().unwrap_or_else(PoisonError::into_inner);
            bits.of(id, &self.tensors, &self.plan, &self.options)?
        };
        let payload = write::payload(&self.tensors[id], info.dtype, self.plan.kept[id], widths.as_deref());
        Ok(Stored {
            info,
            bytes: Cow::Owned(payload.map_err(|err| err.context(format!("tensor '{}'", info.name)))?),
            order: Order::default(),
        })
    }

    fn release(&self, id: TensorId) {
        if let Some(tensor) = self.tensors.get(id) {
            tensor.data.release();
        }
    }
}
