//! Which type every tensor gets. Knows names and shapes, no values.

use super::experts::routes;
use super::family::{EMBED, LAYER_PREFIX, LM_HEAD, steers};
use super::{Options, Tensor};
use crate::dtype::Dtype;
use crate::dtype::encode::{Settings, storage_dtype};
use crate::error::{Result, bail};
use std::collections::{BTreeMap, HashMap};

/// Of how many layers the first is an outer one, and of how many the last.
const LAYERS_AN_OUTER: usize = 15;

/// The mean bits of vbit in the outer layers of q4tp.
const OUTER_BITS: f64 = 5.0;

/// The type of every tensor, in order, and what a person should know about them: the last matching override's, or what suits
/// the tensor's role, unless the shape does not allow it.
///
/// Errors: `Usage` for an override that matches no name, or only tensors that are never stored in the type.
pub(super) fn dtypes(tensors: &[Tensor], options: &Options) -> Result<(Vec<Dtype>, Vec<String>)> {
    for (glob, dtype) in &options.overrides {
        let named = || tensors.iter().filter(|tensor| matches(glob, &tensor.name));
        if named().next().is_none() {
            bail!(Usage, "no tensor is called '{glob}', which is to be {}", dtype.name());
        }
        // What becomes of matrices whose shape a type does not have is a note below.
        let stays = |tensor: &Tensor| {
            let shape = &tensor.data.shape;
            shape.len() < 2 && storage_dtype(*dtype, shape) != *dtype
        };
        if named().all(stays) {
            bail!(
                Usage,
                "'{glob}' is to be {}, but names {} vectors only, and they are always {}",
                dtype.name(),
                named().count(),
                Dtype::F16.name()
            );
        }
    }
    let layers = tensors.iter().filter_map(|tensor| layer(&tensor.name)).max();
    let layers = layers.map_or(0, |last| last.saturating_add(1));
    let (mut dtypes, mut outermost, mut sensitive, mut shapes) = (Vec::new(), 0, 0, BTreeMap::new());
    let mut in_outer_layers = 0;
    for tensor in tensors {
        let chosen = chosen(&tensor.name, options);
        let requested = chosen.unwrap_or_else(|| by_role(&tensor.name, options.quant, layers));
        let dtype = storage_dtype(requested, &tensor.data.shape);
        if tensor.data.shape.len() > 1 {
            match requested {
                _ if dtype != requested => shapes
                    .entry((requested, dtype))
                    .or_insert_with(Vec::new)
                    .push(tensor.name.as_str()),
                _ if chosen.is_some() || requested == options.quant => {}
                Dtype::F16 => sensitive += 1,
                Dtype::VbitRo => in_outer_layers += 1,
                _ => outermost += 1,
            }
        }
        dtypes.push(dtype);
    }
    let mut notes = Vec::new();
    let quant = options.quant.name();
    if outermost > 0 {
        notes.push(format!(
            "embedding and output projection are q8_2f, the other matrices {quant}"
        ));
    }
    if in_outer_layers > 0 {
        let (outer, bits) = (layers / LAYERS_AN_OUTER, options.mean_bits.unwrap_or(OUTER_BITS));
        notes.push(format!(
            "{in_outer_layers} matrices are vbit_ro, with a mean of {bits} bits: those of the first and last {outer} of {layers} layers"
        ));
    }
    if sensitive > 0 {
        notes.push(format!(
            "{sensitive} small matrices of routers, gates and recurrences are f16"
        ));
    }
    for ((requested, dtype), names) in shapes {
        notes.push(format!(
            "{} of a shape that {} does not have: {}, the first is {}",
            names.len(),
            requested.name(),
            dtype.name(),
            names[0]
        ));
    }
    Ok((dtypes, notes))
}

/// The mean bits of a vbit tensor of this name, unless all are to have the same.
pub(super) fn mean_bits(name: &str, options: &Options) -> f64 {
    match options.quant == Dtype::Q4tp && chosen(name, options).is_none() {
        true => OUTER_BITS,
        false => Settings::MEAN_BITS,
    }
}

/// What the overrides say about a tensor of this name.
fn chosen(name: &str, options: &Options) -> Option<Dtype> {
    let mut overrides = options.overrides.iter().rev();
    overrides.find(|(glob, _)| matches(glob, name)).map(|&(_, dtype)| dtype)
}

/// What a profile means for a tensor of this name, in a network of `layers`.
fn by_role(name: &str, quant: Dtype, layers: usize) -> Dtype {
    if matches!(quant, Dtype::F32 | Dtype::F16 | Dtype::Bf16) {
        return quant;
    }
    // They are small, and what they get wrong is not a little of every weight but a choice, or a decay.
    if routes(name) || steers(name) || name.ends_with("conv1d.weight") {
        return Dtype::F16;
    }
    let eight_bit = matches!(quant, Dtype::Q8Row | Dtype::Q82f);
    if outermost(name) && !eight_bit {
        return Dtype::Q82f;
    }
    // q4tp takes 0.3 bits a weight less than the other 4-bit types. Part of that buys most where layers suffer most.
    let outer = layers / LAYERS_AN_OUTER;
    match layer(name) {
        Some(layer) if quant == Dtype::Q4tp && (layer < outer || layer >= layers - outer) => Dtype::VbitRo,
        _ => quant,
    }
}

/// The number of the layer that a tensor of this name belongs to. `None` outside the stack.
fn layer(name: &str) -> Option<usize> {
    let (number, _) = name.strip_prefix(LAYER_PREFIX)?.split_once('.')?;
    number.parse().ok()
}

/// Whether a tensor is the embedding or the output projection, or takes its place.
fn outermost(name: &str) -> bool {
    [EMBED, LM_HEAD].iter().any(|outer| {
        let before = name.strip_suffix(outer);
        before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
    })
}

/// Whether a name is what `glob` describes: `*` is any number of any characters, `?` is one, all others are themselves.
fn matches(glob: &str, name: &str) -> bool {
    let (glob, name): (Vec<char>, Vec<char>) = (glob.chars().collect(), name.chars().collect());
    let (mut g, mut n) = (0, 0);
    // Where the last star is, and how far what it stands for reaches.
    let mut star = None;
    while n < name.len() {
        match glob.get(g) {
            Some('*') => {
                star = Some((g, n));
                g += 1;
            }
            Some(&c) if c == '?' || c == name[n] => (g, n) = (g + 1, n + 1),
            _ => match star {
                Some((at, reached)) => {
                    star = Some((at, reached + 1));
                    (g, n) = (at + 1, reached + 1);
                }
                None => return false,
            },
        }
    }
    glob[g..].iter().all(|&c| c == '*')
}

/// One expert's matrix: what stands before `experts.`, its number, and what follows.
pub(super) struct Expert<'a> {
    pub before: &'a str,
    pub number: usize,
    pub role: &'a str,
}

impl<'a> Expert<'a> {
    /// `None` for a name that is not an expert's.
    pub fn of(name: &'a str) -> Option<Expert<'a>> {
        let (before, after) = name.split_once(".experts.")?;
        let (number, role) = after.split_once('.')?;
        let number = number.parse().ok()?;
        Some(Expert { before, number, role })
    }

    /// The layer's number, when the name says it.
    pub fn layer(&self) -> Option<usize> {
        let (_, after) = self.before.rsplit_once("layers.")?;
        after.split('.').next()?.parse().ok()
    }
}

/// Puts the experts of a layer next to each other by role: every gate, then every up, then every down projection, each in
/// the order of the experts. All else keeps its place; the experts stand where the first of the layer stood.
pub(super) fn order(tensors: Vec<Tensor>) -> Vec<Tensor> {
    let mut place = Vec::with_capacity(tensors.len());
    let mut firsts = HashMap::new();
    for (index, tensor) in tensors.iter().enumerate() {
        place.push(match Expert::of(&tensor.name) {
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
    let mut tensors: Vec<_> = place.into_iter().zip(tensors).collect();
    tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
    tensors.into_iter().map(|(_, tensor)| tensor).collect()
}

/// A name with a star for every number in it: what tensors of one role have in common.
pub(super) fn pattern(name: &str) -> String {
    let part = |part: &str| match !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) {
        true => "*".to_owned(),
        false => part.to_owned(),
    };
    name.split('.').map(part).collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs() {
        let name = "model.layers.10.mlp.down_proj.weight";
        for glob in [
            name,
            "*",
            "**",
            "model.*",
            "*.weight",
            "*down_proj*",
            "model.layers.1?.*",
            "*.mlp.*.weight",
            "*0*o*w*",
            "model.layers.10.mlp.down_proj.weight*",
        ] {
            assert!(matches(glob, name), "{glob}");
        }
        for glob in [
            "",
            "model",
            "*.weigh",
            "?",
            "model.layers.1?.mlp",
            "*up_proj*",
            "down_proj",
            "*.weight?",
            "MODEL*",
            "*.weight.*",
        ] {
            assert!(!matches(glob, name), "{glob}");
        }
        // Backtracking is linear in each star, not exponential.
        assert!(!matches(&"*a".repeat(40), &"a".repeat(39)));
        assert!(!matches(&format!("{}b", "*a".repeat(40)), &"a".repeat(2000)));
        assert!(matches("", ""));
    }

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

    #[test]
    fn experts_and_patterns() {
        let expert = Expert::of("skill.a.model.layers.12.mlp.experts.30.up_proj.weight").unwrap();
        assert_eq!(
            (expert.layer(), expert.number, expert.role),
            (Some(12), 30, "up_proj.weight")
        );
        assert!(Expert::of("model.layers.1.mlp.experts.gate_up_proj").is_none());
        assert!(Expert::of("model.layers.1.mlp.shared_expert.up_proj.weight").is_none());
        assert_eq!(
            pattern("model.layers.12.mlp.experts.30.up_proj.weight"),
            "model.layers.*.mlp.experts.*.up_proj.weight"
        );
    }
}
