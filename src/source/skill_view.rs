//! The tensors of a model with one skill active.

use super::tensors::{Place, Stored, Tensors};
use crate::error::{Result, bail};
use crate::format::cmf::{Masks, Skill, registered, replaced_by};
use crate::format::{TensorId, TensorInfo};
use std::collections::{HashMap, HashSet};
use std::ops::Deref;

/// A model with one skill active, or with none: each tensor is that of the skill, or that of the backbone if the skill does
/// not replace it. The view copies no payloads.
///
/// `T` refers to all tensors of the model, those of its skills included.
pub struct SkillView<T> {
    tensors: T,
    infos: Vec<TensorInfo>,
    /// For each of `infos` the id in `tensors`.
    stored: Vec<TensorId>,
    ids: HashMap<String, TensorId>,
    replaced: Vec<TensorId>,
}

impl<T: Deref<Target: Tensors>> SkillView<T> {
    /// The model with the skill of this id, or the bare backbone. `skills` are all skills of the model.
    ///
    /// Errors: `Usage` for an unknown id, with the existing ones; `MissingTensor` if the backbone lacks a tensor that the skill
    /// replaces, `Parse` if it has another shape.
    pub fn new(tensors: T, skills: &[Skill], skill: Option<&str>) -> Result<SkillView<T>> {
        if let Some(id) = skill
            && !skills.iter().any(|skill| skill.id == id)
        {
            let ids: Vec<&str> = skills.iter().map(|skill| skill.id.as_str()).collect();
            let ids = match ids.is_empty() {
                true => "none".to_owned(),
                false => ids.join(", "),
            };
            bail!(Usage, "no skill '{id}'; existing skills: {ids}");
        }
        let skills: HashSet<&str> = skills.iter().map(|skill| skill.id.as_str()).collect();
        let mut replaced = Vec::new();
        let (mut infos, mut stored, mut ids) = (Vec::new(), Vec::new(), HashMap::new());
        for (id, info) in tensors.infos().iter().enumerate() {
            if registered(&skills, &info.name).is_none() {
                ids.insert(info.name.clone(), infos.len());
                infos.push(info.clone());
                stored.push(id);
            }
        }
        for (id, info) in tensors.infos().iter().enumerate() {
            let Some((_, name)) = registered(&skills, &info.name).filter(|(of, _)| Some(*of) == skill) else {
                continue;
            };
            let place = ids.get(name).copied();
            let place = replaced_by(info, place.map(|place| (place, infos[place].shape.as_slice())))?;
            infos[place] = TensorInfo {
                name: name.to_owned(),
                ..info.clone()
            };
            stored[place] = id;
            replaced.push(place);
        }
        replaced.sort_unstable();
        Ok(SkillView {
            tensors,
            infos,
            stored,
            ids,
            replaced,
        })
    }

    /// The tensors that the skill replaces, ascending.
    pub fn replaced(&self) -> &[TensorId] {
        &self.replaced
    }

    /// The id in the model's own tensors of a tensor of the view.
    pub fn stored_id(&self, id: TensorId) -> Option<TensorId> {
        self.stored.get(id).copied()
    }
}

impl<T: Deref<Target: Tensors> + Send + Sync> Tensors for SkillView<T> {
    fn infos(&self) -> &[TensorInfo] {
        &self.infos
    }

    fn find(&self, name: &str) -> Option<TensorId> {
        self.ids.get(name).copied()
    }

    fn stored(&self, id: TensorId) -> Result<Stored<'_>> {
        match self.stored_id(id) {
            Some(stored) => Ok(Stored {
                info: &self.infos[id],
                ..self.tensors.stored(stored)?
            }),
            None => bail!(Internal, "tensor {id} of {}", self.infos.len()),
        }
    }

    fn place(&self, id: TensorId) -> Option<Place> {
        self.tensors.place(self.stored_id(id)?)
    }

    fn has_tiled_columns(&self, id: TensorId) -> bool {
        self.stored_id(id).is_some_and(|id| self.tensors.has_tiled_columns(id))
    }

    fn masks(&self) -> Option<&Masks> {
        self.tensors.masks()
    }

    fn release(&self, id: TensorId) {
        if let Some(id) = self.stored_id(id) {
            self.tensors.release(id);
        }
    }
}
