//! The objects of a file that is written: which rows of which tensors each has.

use super::names::{FROM_ROLES, GATED, LAYERS, OUTSIDE, ROLES, WHOLE, is_gated, rows_of};
use crate::error::{Result, bail};
use crate::format::Arch;
use crate::import::family::Family;
use crate::import::model::Tensor;
use crate::import::roles::{CONVOLUTION, EMBED, LAYER_PREFIX};
use std::collections::BTreeMap;
use std::ops::Range;

/// Rows of a tensor.
pub struct Rows {
    /// The index of the tensor.
    pub tensor: usize,
    /// Its rows, in the order in which the object has them.
    pub ranges: Vec<Range<usize>>,
}

/// An object.
pub struct Layout {
    /// The name.
    pub name: String,
    /// Its rows, one below the other. They have one width, and weights of one type.
    pub parts: Vec<Rows>,
    /// Whether it has the rows as columns.
    pub transposed: bool,
    /// Whether its values are f32, also if fewer bits hold them.
    pub single: bool,
}

/// Roles that share an object if they have one type: the part of the layer, the roles, and the end of the object's name.
const SHARED: [(&str, &[&str], &str); 7] = [
    ("attention", &["query", "key"], ""),
    ("attention", &["gate", "value"], ""),
    ("gdn", &["query", "key"], ""),
    ("gdn", &["value", "z"], ""),
    ("gdn", &["a"], "_projection"),
    ("gdn", &["b"], "_projection"),
    ("mlp", &["gate", "up"], ""),
];

/// Tensors that files hold as f32.
const SINGLE: [&str; 2] = ["linear_attn.A_log", "linear_attn.dt_bias"];

/// The objects of one layer.
#[derive(Default)]
struct Layer {
    whole: Vec<Layout>,
    roles: BTreeMap<(&'static str, &'static str), Rows>,
}

/// The objects that hold `tensors`, the network of `arch`: the embedding, the layers, the others.
///
/// Errors: `UnsupportedModel` for a tensor that no object can hold.
pub fn layout(arch: &Arch, tensors: &[Tensor]) -> Result<Vec<Layout>> {
    let Some(family) = Family::of_model_type(&arch.arch_name) else {
        bail!(UnsupportedModel, "'{}' is not the name of a family", arch.arch_name);
    };
    let (mut first, mut last) = (Vec::new(), Vec::new());
    let mut layers: BTreeMap<usize, Layer> = BTreeMap::new();
    for (index, tensor) in tensors.iter().enumerate() {
        let name = tensor.name.as_str();
        let place = name.strip_prefix(LAYER_PREFIX).and_then(|rest| rest.split_once('.'));
        let layer = place.and_then(|(layer, rest)| Some((layer.parse::<usize>().ok()?, rest)));
        let outside = OUTSIDE.iter().find(|(_, own)| *own == name);
        let has_place = match (outside, layer) {
            (Some((object, _)), _) => {
                let list = if name == EMBED { &mut first } else { &mut last };
                list.push(whole((*object).to_owned(), index, tensor));
                true
            }
            (None, Some((number, rest))) => {
                let layer = layers.entry(number).or_default();
                layer.add(number, rest, (index, tensor), arch, family)
            }
            (None, None) => false,
        };
        if !has_place {
            bail!(UnsupportedModel, "tensor '{name}': .ninfer files have no object for it");
        }
    }
    let layers = layers.into_iter();
    first.extend(layers.flat_map(|(number, layer)| layer.objects(number, tensors)));
    first.append(&mut last);
    Ok(first)
}

fn whole(name: String, index: usize, tensor: &Tensor) -> Layout {
    let (rows, _) = tensor.data.rows_cols();
    Layout {
        name,
        parts: vec![Rows {
            tensor: index,
            ranges: std::iter::once(0..rows).collect(),
        }],
        transposed: tensor.name.ends_with(CONVOLUTION),
        single: SINGLE.iter().any(|name| tensor.name.ends_with(name)),
    }
}

impl Layer {
    /// Adds a tensor called `name` in layer `number`; false if there is no place for it.
    fn add(&mut self, number: usize, name: &str, tensor: (usize, &Tensor), arch: &Arch, family: &Family) -> bool {
        let (index, tensor) = tensor;
        if let Some((object, _)) = WHOLE.iter().find(|(_, own)| *own == name) {
            self.whole
                .push(whole(format!("{LAYERS}{number}/{object}"), index, tensor));
            return true;
        }
        let Some(&(_, group, roles)) = FROM_ROLES.iter().find(|(own, ..)| *own == name) else {
            return false;
        };
        let gated = is_gated(name, family);
        let mut start = 0;
        for &role in if gated { GATED } else { roles } {
            let Some(&(.., dim)) = ROLES.iter().find(|row| row.0 == group && row.1 == role) else {
                return false;
            };
            let rows = rows_of(arch, dim) as usize;
            let ranges = match gated {
                true => of_heads(rows, arch.head_dim, GATED.iter().position(|own| *own == role)),
                false => std::iter::once(start..start + rows).collect(),
            };
            start += rows;
            let tensor = index;
            self.roles.insert((group, role), Rows { tensor, ranges });
        }
        start == tensor.data.rows_cols().0
    }

    fn objects(mut self, number: usize, tensors: &[Tensor]) -> Vec<Layout> {
        let mut objects = self.whole;
        for (group, roles, end) in SHARED {
            let found = roles
                .iter()
                .filter_map(|&role| Some((role, self.roles.remove(&(group, role))?)));
            let found: Vec<(&str, Rows)> = found.collect();
            let kind = |rows: &Rows| {
                let data = &tensors[rows.tensor].data;
                (data.dtype().ok(), data.rows_cols().1)
            };
            let same = found.windows(2).all(|pair| kind(&pair[0].1) == kind(&pair[1].1));
            let mut object = |names: Vec<&str>, parts: Vec<Rows>| {
                objects.push(Layout {
                    name: format!("{LAYERS}{number}/{group}/{}{end}", names.join("_")),
                    parts,
                    transposed: false,
                    single: false,
                });
            };
            match same && !found.is_empty() {
                true => {
                    let (names, parts) = found.into_iter().unzip();
                    object(names, parts);
                }
                false => found
                    .into_iter()
                    .for_each(|(name, rows)| object(vec![name], vec![rows])),
            }
        }
        objects
    }
}

/// The rows of every head, in a tensor that has those of queries and gates in turn: `turn` 0 are those of queries.
fn of_heads(rows: usize, head: usize, turn: Option<usize>) -> Vec<Range<usize>> {
    let heads = 0..rows / head.max(1);
    let first = |index: usize| (2 * index + turn.unwrap_or(0)) * head;
    heads.map(|index| first(index)..first(index) + head).collect()
}
