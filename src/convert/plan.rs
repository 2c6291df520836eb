//! The type of every tensor, and their order in the file. Knows names and shapes; `keep` knows values.

use super::keep::{self, Kept};
use super::names::{Expert, layer, matches};
use super::options::{Event, Options};
use super::pipeline::Role;
use crate::dtype::Dtype;
use crate::dtype::encode::{Settings, storage_dtype};
use crate::error::{Result, bail};
use crate::import::{EMBED, LM_HEAD, Tensor, is_recurrent_gate, is_router};
use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;

/// With q4tp, one layer in so many at each end of the network is vbit_ro.
const LAYERS_PER_OUTER: usize = 15;

/// The mean bits of vbit_ro in these outer layers.
const OUTER_BITS: f64 = 5.0;

/// How every tensor is written, in order.
pub(super) struct Plan {
    pub dtypes: Vec<Dtype>,
    /// Those that keep their values.
    pub kept: Vec<Option<Kept>>,
    /// Notes about the choice.
    pub notes: Vec<String>,
}

impl Plan {
    /// Errors: those of [`keep::kept`] and [`dtypes`].
    pub fn of(
        tensors: &[Tensor],
        options: &Options,
        progress: &mut dyn FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Plan> {
        check_overrides(tensors, options)?;
        let kept = keep::kept(tensors, options, progress)?;
        let (dtypes, notes) = dtypes(tensors, &kept, options);
        Ok(Plan { dtypes, kept, notes })
    }

    /// Whether the bits of a tensor's rows are chosen when it is written.
    pub fn chooses_widths(&self, index: usize) -> bool {
        self.dtypes[index].has_row_widths() && !self.kept[index].is_some_and(Kept::writes_codes)
    }

    /// The type that most weights of matrices have.
    pub fn most_common(&self, tensors: &[Tensor]) -> Option<Dtype> {
        let mut weights = BTreeMap::<Dtype, u128>::new();
        for (tensor, &dtype) in tensors
            .iter()
            .zip(&self.dtypes)
            .filter(|(tensor, _)| tensor.data.shape.len() > 1)
        {
            let (rows, cols) = tensor.data.rows_cols();
            *weights.entry(dtype).or_default() += rows as u128 * cols as u128;
        }
        weights
            .into_iter()
            .max_by_key(|&(_, weights)| weights)
            .map(|(dtype, _)| dtype)
    }
}

/// The type of every tensor, in order, and notes about the choice. What keeps its values has the type for that. Else the last
/// matching override decides, else the tensor's role; a shape that the type does not allow falls back as [`storage_dtype`]
/// says.
fn dtypes(tensors: &[Tensor], kept: &[Option<Kept>], options: &Options) -> (Vec<Dtype>, Vec<String>) {
    let layers = tensors.iter().filter_map(|tensor| layer(&tensor.name)).max();
    let layers = layers.map_or(0, |last| last.saturating_add(1));
    let mut chosen = Chosen::default();
    let mut dtypes = Vec::new();
    for (tensor, kept) in tensors.iter().zip(kept) {
        if let Some(kept) = kept {
            dtypes.push(kept.dtype);
            continue;
        }
        let overridden = options.overridden(&tensor.name);
        let role = Role::of(tensor);
        let requested = overridden.unwrap_or_else(|| match role {
            Some(role) => role.dtype(options.quant()),
            None => by_role(&tensor.name, options.quant(), layers),
        });
        let dtype = match role {
            Some(Role::Convolution) => convolution(requested, tensor, overridden.is_some()),
            _ => storage_dtype(requested, &tensor.data.shape),
        };
        if tensor.data.shape.len() > 1 {
            match requested {
                _ if dtype != requested => chosen.shapes.entry((requested, dtype)).or_default().push(&tensor.name),
                _ if overridden.is_some() || requested == options.quant() => {}
                dtype if role.is_some() => *chosen.roles.entry((role, dtype)).or_default() += 1,
                Dtype::F16 => chosen.sensitive += 1,
                Dtype::VbitRo => chosen.outer += 1,
                _ => chosen.outermost += 1,
            }
        }
        dtypes.push(dtype);
    }
    (dtypes, chosen.notes(options, layers))
}

/// The type of a convolution. That of a container stays unless another is asked for, and is never quantised.
fn convolution(requested: Dtype, tensor: &Tensor, overridden: bool) -> Dtype {
    let stored = tensor
        .data
        .dtype()
        .ok()
        .filter(|_| tensor.data.is_contained() && !overridden);
    let dtype = stored.unwrap_or(requested);
    if dtype.code_bits() < 16 { Dtype::F16 } else { dtype }
}

/// Errors: `Usage` for an override that matches no name, or only tensors that are never stored in the type.
fn check_overrides(tensors: &[Tensor], options: &Options) -> Result<()> {
    for (glob, dtype) in &options.overrides {
        let weights = || {
            tensors
                .iter()
                .filter(|tensor| tensor.data.dtype().ok() != Some(Dtype::U8))
        };
        let named = || weights().filter(|tensor| matches(glob, &tensor.name));
        if named().next().is_none() {
            let dtype = dtype.name();
            bail!(Usage, "'{glob}' is to be {dtype}, but no tensor has such a name");
        }
        // Matrices of a shape that the type does not allow are reported in a note instead.
        let stays = |tensor: &Tensor| {
            let shape = &tensor.data.shape;
            shape.len() < 2 && storage_dtype(*dtype, shape) != *dtype
        };
        if named().all(stays) {
            bail!(
                Usage,
                "'{glob}' is to be {}, but the {} tensors of such a name are vectors, which are always {}",
                dtype.name(),
                named().count(),
                Dtype::F16.name()
            );
        }
    }
    Ok(())
}

/// Matrices whose type is not the one asked for.
#[derive(Default)]
struct Chosen<'a> {
    /// Embedding and output projection.
    outermost: usize,
    /// Matrices of routers, gates and recurrences.
    sensitive: usize,
    /// Matrices of the outer layers.
    outer: usize,
    /// Matrices of pipelines with a role of their own, by role and type.
    roles: HashMap<(Option<Role>, Dtype), usize>,
    /// Names of the matrices whose shape a type does not allow, by that type and the type used.
    shapes: BTreeMap<(Dtype, Dtype), Vec<&'a str>>,
}

impl Chosen<'_> {
    fn notes(self, options: &Options, layers: usize) -> Vec<String> {
        let mut notes = Vec::new();
        if self.outermost > 0 {
            notes.push(format!(
                "embedding and output projection are q8_2f, the other matrices {}",
                options.quant().name()
            ));
        }
        if self.outer > 0 {
            notes.push(format!(
                "{} matrices are vbit_ro, with a mean of {} bits: those of the first and last {} of {layers} layers",
                self.outer,
                options.mean_bits.unwrap_or(OUTER_BITS),
                layers / LAYERS_PER_OUTER
            ));
        }
        if self.sensitive > 0 {
            notes.push(format!(
                "{} small matrices of routers, gates and recurrences are f16",
                self.sensitive
            ));
        }
        for (role, name) in Role::NAMES {
            let mut of_role = self.roles.iter().filter(|((found, _), _)| *found == Some(role));
            if let Some(((_, dtype), count)) = of_role.next() {
                notes.push(format!("{count} {name} are {}", dtype.name()));
            }
        }
        for ((requested, dtype), names) in self.shapes {
            notes.push(format!(
                "{} matrices are {}, because {} does not allow their shape; the first is {}",
                names.len(),
                dtype.name(),
                requested.name(),
                names[0]
            ));
        }
        notes
    }
}

/// The mean bits of a vbit tensor of this name, unless the options set one for all.
pub(super) fn mean_bits(name: &str, options: &Options) -> f64 {
    match options.quant() == Dtype::Q4tp && options.overridden(name).is_none() {
        true => OUTER_BITS,
        false => Settings::MEAN_BITS,
    }
}

/// The type of a tensor of this name when matrices are to be `quant`, in a network of `layers`.
fn by_role(name: &str, quant: Dtype, layers: usize) -> Dtype {
    if quant.code_bits() >= 16 {
        return quant;
    }
    // These matrices are small, and their errors do more harm: they change which expert is chosen, or how fast a state decays.
    if is_router(name) || is_recurrent_gate(name) || name.ends_with("conv1d.weight") {
        return Dtype::F16;
    }
    if is_outermost(name) && quant.code_bits() < 8 {
        return Dtype::Q82f;
    }
    // q4tp takes 0.3 bits a weight less than the other 4-bit types. A part of that is spent on the layers that need it most.
    let outer = layers / LAYERS_PER_OUTER;
    match layer(name) {
        Some(layer) if quant == Dtype::Q4tp && (layer < outer || layer >= layers - outer) => Dtype::VbitRo,
        _ => quant,
    }
}

/// Whether a tensor is the embedding or the output projection, or a skill's replacement of one.
fn is_outermost(name: &str) -> bool {
    [EMBED, LM_HEAD].iter().any(|outermost| {
        let before = name.strip_suffix(outermost);
        before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
    })
}

/// Puts the experts of a layer next to each other: every gate projection, then every up projection, then every down
/// projection, each in the order of the experts. They come where the first of the layer was; other tensors keep their order.
pub(super) fn order(tensors: Vec<Tensor>) -> Vec<Tensor> {
    let mut places = Vec::with_capacity(tensors.len());
    let mut firsts = HashMap::new();
    for (index, tensor) in tensors.iter().enumerate() {
        places.push(match Expert::of(&tensor.name) {
            Some(expert) => {
                let first = *firsts.entry(expert.before).or_insert(index);
                let rank = ["gate_proj.", "up_proj.", "down_proj."]
                    .iter()
                    .position(|role| expert.role.starts_with(role))
                    .unwrap_or(usize::MAX);
                (first, rank, expert.role.to_owned(), expert.number)
            }
            None => (index, 0, String::new(), 0),
        });
    }
    let mut tensors: Vec<_> = places.into_iter().zip(tensors).collect();
    tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
    tensors.into_iter().map(|(_, tensor)| tensor).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles() {
        for (name, q4, q8) in [
            (EMBED, Dtype::Q82f, Dtype::Q8Row),
            (LM_HEAD, Dtype::Q82f, Dtype::Q8Row),
            ("skill.x.lm_head.weight", Dtype::Q82f, Dtype::Q8Row),
            ("model.nolm_head.weight", Dtype::Q4tp, Dtype::Q8Row),
            ("model.layers.0.mlp.gate_proj.weight", Dtype::Q4tp, Dtype::Q8Row),
            ("model.layers.0.mlp.gate.weight", Dtype::F16, Dtype::F16),
            ("model.layers.0.mlp.shared_expert_gate.weight", Dtype::F16, Dtype::F16),
            (
                "model.layers.0.mlp.experts.7.gate_proj.weight",
                Dtype::Q4tp,
                Dtype::Q8Row,
            ),
            ("model.layers.0.linear_attn.in_proj_ba.weight", Dtype::F16, Dtype::F16),
            ("model.layers.0.linear_attn.in_proj_b.weight", Dtype::F16, Dtype::F16),
            (
                "model.layers.0.linear_attn.in_proj_qkv.weight",
                Dtype::Q4tp,
                Dtype::Q8Row,
            ),
        ] {
            assert_eq!(
                (by_role(name, Dtype::Q4tp, 14), by_role(name, Dtype::Q8Row, 14)),
                (q4, q8),
                "{name}"
            );
            assert_eq!(by_role(name, Dtype::F32, 14), Dtype::F32);
        }
    }

    #[test]
    fn outer_layers() {
        for (layers, outer) in [(14, vec![]), (15, vec![0, 14]), (30, vec![0, 1, 28, 29])] {
            let of = |quant| {
                let name = |layer| format!("model.layers.{layer}.mlp.up_proj.weight");
                let found = (0..layers).filter(|&layer| by_role(&name(layer), quant, layers) == Dtype::VbitRo);
                found.collect::<Vec<_>>()
            };
            assert_eq!((of(Dtype::Q4tp), of(Dtype::Q4Tiled)), (outer, vec![]), "{layers}");
        }
        assert_eq!(by_role("model.layers.0.mlp.gate.weight", Dtype::Q4tp, 30), Dtype::F16);
        assert_eq!(
            by_role("skill.x.model.layers.0.mlp.up_proj.weight", Dtype::Q4tp, 30),
            Dtype::Q4tp
        );
        let mut options = Options::new(Dtype::Q4tp);
        options.overrides.push(("*.down_proj.weight".into(), Dtype::VbitRo));
        let mean = |role| mean_bits(&format!("model.layers.0.mlp.{role}_proj.weight"), &options);
        assert_eq!((mean("up"), mean("down")), (OUTER_BITS, Settings::MEAN_BITS));
    }
}
