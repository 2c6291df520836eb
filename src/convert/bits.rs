//! The bit widths of vbit rows across tensors: the experts of one layer and projection share a budget.

use super::plan::{self, Expert};
use super::{Options, Tensor};
use crate::dtype::Dtype;
use crate::dtype::encode::{amplitudes, spread};
use crate::error::{Error, Kind, Result, bail};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};

/// How often the router of each layer chose each expert.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouterStats {
    layers: BTreeMap<usize, Vec<f64>>,
}

impl RouterStats {
    /// Reads `{"layers": {"3": [f0, f1, …]}}`: for a layer the frequency, or count, of every expert. Only ratios within a layer
    /// count. Other members are ignored, and so is a layer that is not there.
    ///
    /// Errors: `Parse` for anything that is not of this form, a negative number, or a layer without any positive one.
    pub fn from_json(json: &[u8]) -> Result<RouterStats> {
        let bad = |what: String| Error::new(Kind::Parse, format!("router statistics: {what}"));
        let value: Value = serde_json::from_slice(json).map_err(|err| bad(err.to_string()))?;
        let Some(found) = value.get("layers").and_then(Value::as_object) else {
            return Err(bad("wanted an object with 'layers', an object".into()));
        };
        let mut layers = BTreeMap::new();
        for (layer, frequencies) in found {
            let number = layer
                .parse()
                .map_err(|_| bad(format!("wanted the number of a layer, found '{layer}'")))?;
            let frequencies = frequencies.as_array().into_iter().flatten();
            let frequencies: Option<Vec<f64>> = frequencies
                .map(|value| value.as_f64().filter(|frequency| *frequency >= 0.0))
                .collect();
            match frequencies.filter(|all| all.iter().any(|frequency| *frequency > 0.0)) {
                Some(frequencies) => drop(layers.insert(number, frequencies)),
                None => {
                    return Err(bad(format!(
                        "layer {layer}: wanted numbers from 0 on, one an expert, not all 0"
                    )));
                }
            }
        }
        Ok(RouterStats { layers })
    }

    /// Errors: `Usage` for a layer that has no experts, or another number of them.
    pub(super) fn check(&self, tensors: &[Tensor]) -> Result<()> {
        let mut experts: BTreeMap<usize, usize> = BTreeMap::new();
        for expert in tensors.iter().filter_map(|tensor| Expert::of(&tensor.name)) {
            if let Some(layer) = expert.layer() {
                let count = experts.entry(layer).or_default();
                *count = (*count).max(expert.number.saturating_add(1));
            }
        }
        for (layer, frequencies) in &self.layers {
            let (wanted, found) = (experts.get(layer).copied().unwrap_or(0), frequencies.len());
            if wanted != found {
                bail!(
                    Usage,
                    "router statistics: layer {layer} has {wanted} experts, found {found}"
                );
            }
        }
        Ok(())
    }

    fn of(&self, expert: &Expert) -> f64 {
        let layer = expert.layer().and_then(|layer| self.layers.get(&layer));
        layer
            .and_then(|experts| experts.get(expert.number))
            .copied()
            .unwrap_or(1.0)
    }
}

/// The widths of tensors to come. A family is read when its first tensor is asked for.
#[derive(Default)]
pub(super) struct Bits(HashMap<usize, Vec<u8>>);

impl Bits {
    /// The widths of the `index`-th tensor's rows; `None` when it is no vbit.
    ///
    /// Errors: those of reading, with the tensor's name.
    pub fn of(
        &mut self,
        index: usize,
        tensors: &[Tensor],
        dtypes: &[Dtype],
        options: &Options,
    ) -> Result<Option<Vec<u8>>> {
        if !is_vbit(dtypes[index]) {
            return Ok(None);
        }
        if let Some(widths) = self.0.remove(&index) {
            return Ok(Some(widths));
        }
        let family = members(index, tensors, dtypes);
        let mut all = Vec::new();
        let mut rows = Vec::new();
        for &member in &family {
            let tensor = &tensors[member];
            let (count, cols) = tensor.data.rows_cols();
            let read = || {
                tensor.data.intact()?;
                let reader = tensor.data.reader()?;
                amplitudes(count, cols, &*reader)
            };
            let loud = read().map_err(|err| err.context(format!("tensor '{}'", tensor.name)))?;
            let frequency = match (&options.router_stats, Expert::of(&tensor.name)) {
                (Some(stats), Some(expert)) => stats.of(&expert),
                _ => 1.0,
            };
            all.extend(loud.into_iter().map(|amplitude| amplitude * frequency));
            rows.push(count);
        }
        let usual = || plan::mean_bits(&tensors[index].name, options);
        let mut widths = spread(&all, options.mean_bits.unwrap_or_else(usual))?;
        for (&member, &rows) in family.iter().zip(&rows) {
            let rest = widths.split_off(rows);
            self.0.insert(member, std::mem::replace(&mut widths, rest));
        }
        Ok(self.0.remove(&index))
    }
}

pub(super) fn is_vbit(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::Vbit | Dtype::VbitRo)
}

/// The tensors that share a budget with the `index`-th, itself among them: vbit experts of its layer and projection, with
/// rows of its length.
fn members(index: usize, tensors: &[Tensor], dtypes: &[Dtype]) -> Vec<usize> {
    let Some(own) = Expert::of(&tensors[index].name) else {
        return vec![index];
    };
    let cols = tensors[index].data.rows_cols().1;
    let related = |&other: &usize| {
        let expert = Expert::of(&tensors[other].name);
        is_vbit(dtypes[other])
            && tensors[other].data.rows_cols().1 == cols
            && expert.is_some_and(|expert| expert.before == own.before && expert.role == own.role)
    };
    (0..tensors.len()).filter(related).collect()
}
