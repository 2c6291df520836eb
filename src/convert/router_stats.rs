//! Router statistics: how often each expert is used.

use super::names::Expert;
use crate::error::{Error, Kind, Result, bail};
use serde_json::Value;
use std::collections::BTreeMap;

/// How often the router of each layer chose each expert, as frequencies or counts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouterStats {
    layers: BTreeMap<usize, Vec<f64>>,
}

impl RouterStats {
    /// Reads `{"layers": {"3": [f0, f1, …]}}`: for a layer the frequency or count of every expert. Only ratios within a layer
    /// matter. Layers may be missing, and other members are ignored.
    ///
    /// Errors: `Parse` for another form, a negative number, or a layer without any positive number.
    pub fn from_json(json: &[u8]) -> Result<RouterStats> {
        let bad = |what: String| Error::new(Kind::Parse, format!("router statistics: {what}"));
        let value: Value = serde_json::from_slice(json).map_err(|err| bad(err.to_string()))?;
        let Some(found) = value.get("layers").and_then(Value::as_object) else {
            return Err(bad("expected an object with 'layers', an object".into()));
        };
        let mut layers = BTreeMap::new();
        for (layer, frequencies) in found {
            let number = layer
                .parse()
                .map_err(|_| bad(format!("expected the number of a layer, found '{layer}'")))?;
            let frequencies = frequencies.as_array().into_iter().flatten();
            let frequencies: Option<Vec<f64>> = frequencies
                .map(|value| value.as_f64().filter(|frequency| *frequency >= 0.0))
                .collect();
            match frequencies.filter(|all| all.iter().any(|frequency| *frequency > 0.0)) {
                Some(frequencies) => drop(layers.insert(number, frequencies)),
                None => {
                    return Err(bad(format!(
                        "layer {layer}: expected one number of at least 0 per expert, not all 0"
                    )));
                }
            }
        }
        Ok(RouterStats { layers })
    }

    /// Errors: `Usage` for a layer that has no experts among the tensors of these names, or another number of them.
    pub(super) fn check<'n>(&self, names: impl Iterator<Item = &'n str>) -> Result<()> {
        let mut experts: BTreeMap<usize, usize> = BTreeMap::new();
        for expert in names.filter_map(Expert::of) {
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

    /// The number of an expert; 1 where its layer is missing.
    pub(super) fn of(&self, expert: &Expert) -> f64 {
        let layer = expert.layer().and_then(|layer| self.layers.get(&layer));
        layer
            .and_then(|experts| experts.get(expert.number))
            .copied()
            .unwrap_or(1.0)
    }
}
