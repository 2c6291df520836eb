//! The hyperparameters of a GGUF file: the known keys, and typed access to them.
//!
//! Knows names and types of keys, not their meaning.

use crate::error::{Error, Kind, Result, bail};
use crate::format::gguf::Metadata;
use crate::import::family::Family;

/// Known hyperparameters, without the architecture's prefix: those that are read, and those that are redundant.
const KNOWN: [&str; 39] = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.causal",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.dimension_count",
    "rope.dimension_count_swa",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "vocab_size",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "expert_weights_norm",
    "expert_weights_scale",
    "expert_gating_func",
    "tensor_data_layout",
];

/// The hyperparameters: keys below the architecture's name.
pub(super) struct Keys<'a> {
    pub metadata: &'a Metadata,
    pub prefix: &'a str,
    /// The file, to which lists refer.
    pub bytes: &'a [u8],
}

impl Keys<'_> {
    /// The full key.
    pub fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    /// Checks that all hyperparameters are known; `also` are known in this family. Errors: `UnsupportedModel` with one that is
    /// not, or whose value is not supported.
    pub fn refuse_unknown(&self, family: &Family, also: &[&str]) -> Result<()> {
        let own = self
            .metadata
            .keys()
            .filter_map(|key| key.strip_prefix(self.prefix)?.strip_prefix('.'));
        let mut unknown: Vec<&str> = own.filter(|key| !KNOWN.contains(key) && !also.contains(key)).collect();
        unknown.sort_unstable();
        if let Some(key) = unknown.first() {
            bail!(UnsupportedModel, "metadata key '{}' is unknown", self.full(key));
        }
        if family.experts.is_none() {
            for key in ["expert_count", "expert_used_count"] {
                self.same(key, 0)?;
            }
        }
        if self.metadata.bool(&self.full("attention.causal"))? == Some(false) {
            bail!(
                UnsupportedModel,
                "metadata key '{}' is false; only causal attention is supported",
                self.full("attention.causal")
            );
        }
        Ok(())
    }

    /// A number, or a list of equal numbers with an entry for each layer. Errors: `Parse` for other values, `UnsupportedModel` for
    /// a list of different numbers.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>> {
        let full = self.full(key);
        if !self.metadata.is_array(&full) {
            return self.metadata.unsigned(&full);
        }
        let values = self.metadata.integers(&full, self.bytes)?.unwrap_or_default();
        match values.as_slice() {
            [first, rest @ ..] if rest.iter().all(|value| value == first) && *first >= 0 => {
                Ok(Some(first.unsigned_abs()))
            }
            _ => bail!(
                UnsupportedModel,
                "metadata key '{full}' is {values:?}: expected one number for all layers"
            ),
        }
    }

    /// As [`Keys::unsigned`], for lengths.
    pub fn size(&self, key: &str) -> Result<Option<usize>> {
        let bad = |_| Error::new(Kind::Bounds, format!("metadata key '{}' is too large", self.full(key)));
        self.unsigned(key)?
            .map(|value| usize::try_from(value).map_err(bad))
            .transpose()
    }

    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        self.metadata.float(&self.full(key))
    }

    /// Whether the key exists and holds a list.
    pub fn is_list(&self, key: &str) -> bool {
        self.metadata.is_array(&self.full(key))
    }

    /// A switch for every layer: a list of `layers` truth values or of zeros and ones.
    pub fn switches(&self, key: &str, layers: usize, bytes: &[u8]) -> Result<Vec<bool>> {
        let values = self.metadata.switches(&self.full(key), bytes)?.unwrap_or_default();
        if values.len() != layers {
            bail!(
                UnsupportedModel,
                "metadata key '{}' has {} entries for {layers} layers",
                self.full(key),
                values.len()
            );
        }
        Ok(values)
    }

    pub fn string(&self, key: &str) -> Result<Option<&str>> {
        self.metadata.string(&self.full(key))
    }

    /// Errors: `UnsupportedModel` when `value` is absent.
    pub fn need<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| {
            Error::new(
                Kind::UnsupportedModel,
                format!("metadata key '{}' is missing", self.full(key)),
            )
        })
    }

    /// A required number.
    pub fn count(&self, key: &str) -> Result<u64> {
        self.need(key, self.unsigned(key)?)
    }

    /// Errors: `UnsupportedModel` when the key exists and its value is not `wanted`.
    pub fn same(&self, key: &str, wanted: u64) -> Result<()> {
        match self.unsigned(key)? {
            Some(found) if found != wanted => {
                bail!(
                    UnsupportedModel,
                    "metadata key '{}' is {found}, expected {wanted}",
                    self.full(key)
                )
            }
            _ => Ok(()),
        }
    }
}
