//! Router statistics: how often each expert is used.

use super::names::Expert;
use crate::error::{Result, bail, error};
use serde::Deserialize;
use std::collections::BTreeMap;

/// How often the router of each layer chose each expert, as frequencies or counts.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct RouterStats {
    layers: BTreeMap<usize, Vec<f64>>,
}

impl RouterStats {
    /// Reads `{"layers": {"3": [f0, f1, …]}}`: for a layer the frequency or count of every expert. Only ratios within a layer
    /// matter. Layers may be missing, and other members are ignored.
    ///
    /// Errors: `Parse` for another form, a negative number, or a layer without any positive number.
    pub fn from_json(json: &[u8]) -> Result<RouterStats> {
        let stats: RouterStats =
            serde_json::from_slice(json).map_err(|err| error!(Parse, "router statistics: {err}"))?;
        for (layer, frequencies) in &stats.layers {
            let is_bad = frequencies.iter().any(|frequency| *frequency < 0.0);
            if is_bad || frequencies.iter().all(|frequency| *frequency == 0.0) {
                bail!(
                    Parse,
                    "router statistics: layer {layer}: expected one number of at least 0 per expert, not all 0"
                );
            }
        }
        Ok(stats)
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
        let frequency = layer.and_then(|experts| experts.get(expert.number));
        frequency.copied().unwrap_or(1.0)
    }
}
