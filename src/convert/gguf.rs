//! A GGUF file: its keys to the header, its tensor names to the container's.
//!
//! Knows the keys of the imported families and refuses every other hyperparameter by name. The tokenizer is rebuilt next
//! door.

use super::arch::{Dims, frequencies};
use super::bind::{Found, bind};
use super::family::{Family, GGUF_LAYER_PREFIX, HEAD, LAYER, LAYER_PREFIX, Role, TAIL};
use super::{Encoding, Import, Matrix, Model, rope, tokenizer};
use crate::container::gguf::{Gguf, Metadata, shortest};
use crate::container::{Arch, MappedFile, Yarn};
use crate::error::{Error, Kind, Result, bail};
use serde_json::Map;
use std::path::Path;

/// Divisors of the rotation frequencies, stored like a weight.
const ROPE_FREQS: &str = "rope_freqs.weight";

/// Hyperparameters, after the architecture's prefix, that are read below or say nothing new.
const KNOWN: [&str; 26] = [
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
    "rope.freq_base",
    "rope.dimension_count",
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
    "tensor_data_layout",
];

/// An open file.
pub(super) struct Source {
    file: MappedFile,
    gguf: Gguf,
}

impl Source {
    /// Opens and checks a file.
    pub fn open(path: &Path) -> Result<Source> {
        let file = MappedFile::open(path)?;
        let gguf = Gguf::parse(file.bytes()).map_err(|err| err.context(path.display()))?;
        Ok(Source { file, gguf })
    }

    /// Reads what the file describes.
    pub fn model(&self) -> Result<Model<'_>> {
        let metadata = &self.gguf.metadata;
        let Some(name) = metadata.string("general.architecture")? else {
            bail!(UnsupportedModel, "metadata key 'general.architecture' is missing");
        };
        let Some(family) = Family::of_gguf(name, false) else {
            bail!(
                UnsupportedModel,
                "GGUF architecture '{name}' cannot be converted; known are {}",
                Family::names()
            );
        };
        let keys = Keys { metadata, prefix: name };
        keys.refuse_unknown()?;
        let mut arch = self.arch(&keys, family)?;
        let found = self.tensors(family, &arch)?;
        let mut bound = bind(family, &mut arch, found)?;
        let tokens = tokenizer::read(metadata, self.file.bytes())?;
        let mut provenance = Map::new();
        provenance.insert("source_format".into(), "gguf".into());
        for key in ["general.name", "general.license"] {
            if let Some(value) = metadata.string(key)? {
                provenance.insert(key.replace("general.", "source_"), value.into());
            }
        }
        bound.notes.extend(tokens.notes);
        Import {
            arch,
            tokenizer_config: tokens.config,
            provenance,
            vocab: tokens.vocab,
            bound,
        }
        .model()
    }

    fn arch(&self, keys: &Keys, family: &Family) -> Result<Arch> {
        let Some(embed) = HEAD.first().and_then(|role| self.gguf.find(role.gguf)) else {
            bail!(MissingTensor, "the source lacks the token embedding");
        };
        let tied = TAIL
            .iter()
            .all(|role| role.name != super::LM_HEAD || self.gguf.find(role.gguf).is_none());
        let (hidden, heads) = (keys.count("embedding_length")?, keys.count("attention.head_count")?);
        let head_dim = match keys.unsigned("attention.key_length")? {
            Some(length) => length,
            None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
            None => bail!(
                UnsupportedModel,
                "{}: {hidden} is not a multiple of {heads} heads",
                keys.full("embedding_length")
            ),
        };
        let vocab = embed.shape.first().copied().unwrap_or(0);
        keys.same("attention.value_length", head_dim)?;
        keys.same("vocab_size", vocab)?;
        let dims = Dims {
            hidden,
            heads,
            head_dim,
            vocab,
            inter: keys.count("feed_forward_length")?,
            layers: keys.count("block_count")?,
            kv_heads: keys.unsigned("attention.head_count_kv")?.unwrap_or(heads),
        };
        let mut arch = dims.arch(family, self.gguf.tensors.len())?;
        arch.tie_word_embeddings = tied;
        arch.rms_norm_eps = keys.need(
            "attention.layer_norm_rms_epsilon",
            keys.float("attention.layer_norm_rms_epsilon")?,
        )?;
        arch.max_position_embeddings = keys.size("context_length")?;
        self.rotation(keys, &mut arch)?;
        Ok(arch)
    }

    fn rotation(&self, keys: &Keys, arch: &mut Arch) -> Result<()> {
        arch.rope_theta = keys.float("rope.freq_base")?.unwrap_or(10_000.0);
        if let Some(rotated) = keys.unsigned("rope.dimension_count")? {
            arch.partial_rotary_factor = rotated as f64 / arch.head_dim as f64;
        }
        let frequencies = frequencies(arch)?;
        let factor = || {
            keys.float("rope.scaling.factor")
                .and_then(|factor| keys.need("rope.scaling.factor", factor))
        };
        match keys.string("rope.scaling.type")? {
            None => {
                if let Some(factor) = keys.float("rope.scale_linear")?.filter(|&factor| factor != 1.0) {
                    arch.rope_freq_factors = Some(rope::linear(factor, frequencies)?);
                }
            }
            Some("none") => {}
            Some("linear") => arch.rope_freq_factors = Some(rope::linear(factor()?, frequencies)?),
            Some("yarn") => {
                let factor = factor()?;
                let original = keys.size("rope.scaling.original_context_length")?;
                if keys
                    .float("rope.scaling.yarn_ext_factor")?
                    .is_some_and(|value| value != 1.0)
                {
                    bail!(
                        UnsupportedModel,
                        "{}: only 1 is known",
                        keys.full("rope.scaling.yarn_ext_factor")
                    );
                }
                // A factor of the file multiplies what follows from the scaling.
                let extra = keys
                    .float("rope.scaling.attn_factor")?
                    .or(keys.float("rope.scaling.yarn_attn_factor")?);
                arch.yarn = Some(Yarn {
                    factor,
                    original_max_position_embeddings: keys.need("rope.scaling.original_context_length", original)?,
                    beta_fast: keys.float("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                    beta_slow: keys.float("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                    attention_factor: Some(rope::yarn_attention(factor, 1.0) * extra.unwrap_or(1.0)),
                });
            }
            Some(other) => bail!(
                UnsupportedModel,
                "{} is '{other}'; known are none, linear and yarn",
                keys.full("rope.scaling.type")
            ),
        }
        let Some(tensor) = self.gguf.find(ROPE_FREQS) else {
            return Ok(());
        };
        if arch.rope_freq_factors.is_some() || arch.yarn.is_some() {
            bail!(
                UnsupportedModel,
                "tensor '{ROPE_FREQS}' and {} both scale the rotation",
                keys.full("rope.scaling.type")
            );
        }
        if tensor.shape != [frequencies as u64] {
            bail!(
                Parse,
                "tensor '{ROPE_FREQS}' has shape {:?}, wanted [{frequencies}]",
                tensor.shape
            );
        }
        let mut divisors = vec![0.0; frequencies];
        let bytes = self.file.bytes().get(tensor.range.clone()).unwrap_or_default();
        tensor.kind.decode(bytes, &mut divisors)?;
        arch.rope_freq_factors = Some(divisors.into_iter().map(shortest).collect());
        Ok(())
    }

    /// The tensors under the container's names.
    fn tensors(&self, family: &Family, arch: &Arch) -> Result<Found<'_>> {
        let mut found = Found::new();
        for tensor in self.gguf.tensors.iter().filter(|tensor| tensor.name != ROPE_FREQS) {
            let (name, role) = match container_name(family, &tensor.name) {
                Some((name, role)) => (name, Some(role)),
                // Left for the binder to refuse by the name it has.
                None => (tensor.name.clone(), None),
            };
            let encoding = Ok(Encoding::Blocks(tensor.kind));
            let mut matrix = Matrix::in_file(tensor.shape.clone(), &self.file, tensor.range.clone(), encoding)?;
            if family.gguf_interleaves_qk && role.is_some_and(|role| role.rotates) {
                matrix = matrix.interleaved(arch.head_dim)?;
            }
            if found.insert(name.clone(), matrix).is_some() {
                bail!(Parse, "tensor '{name}' occurs twice");
            }
        }
        Ok(found)
    }
}

/// The container's name of a GGUF tensor, and what it is; `None` for names that no family has.
fn container_name(family: &Family, name: &str) -> Option<(String, &'static Role)> {
    let of = |roles: &'static [Role], name: &str| {
        let mut own = roles.iter().filter(|role| role.need.of(family).is_some());
        own.find(|role| role.gguf == name)
    };
    if let Some((layer, rest)) = name
        .strip_prefix(GGUF_LAYER_PREFIX)
        .and_then(|rest| rest.split_once('.'))
    {
        // Only the spelling that a number has: two names of one tensor would hide a duplicate.
        let number = layer.parse::<u64>().ok().filter(|number| number.to_string() == layer)?;
        let role = of(LAYER, rest)?;
        return Some((format!("{LAYER_PREFIX}{number}.{}", role.name), role));
    }
    let role = of(HEAD, name).or_else(|| of(TAIL, name))?;
    Some((role.name.to_owned(), role))
}

/// The hyperparameters: keys below the architecture's name.
struct Keys<'a> {
    metadata: &'a Metadata,
    prefix: &'a str,
}

impl Keys<'_> {
    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    fn refuse_unknown(&self) -> Result<()> {
        let own = self
            .metadata
            .keys()
            .filter_map(|key| key.strip_prefix(self.prefix)?.strip_prefix('.'));
        let mut unknown: Vec<&str> = own.filter(|key| !KNOWN.contains(key)).collect();
        unknown.sort_unstable();
        if let Some(key) = unknown.first() {
            bail!(
                UnsupportedModel,
                "metadata key '{}' is unknown and cannot be honoured",
                self.full(key)
            );
        }
        for key in ["expert_count", "expert_used_count"] {
            self.same(key, 0)?;
        }
        if self.metadata.bool(&self.full("attention.causal"))? == Some(false) {
            bail!(
                UnsupportedModel,
                "metadata key '{}' is false",
                self.full("attention.causal")
            );
        }
        Ok(())
    }

    fn unsigned(&self, key: &str) -> Result<Option<u64>> {
        self.metadata.unsigned(&self.full(key))
    }

    fn size(&self, key: &str) -> Result<Option<usize>> {
        let bad = |_| Error::new(Kind::Bounds, format!("metadata key '{}' is too large", self.full(key)));
        self.unsigned(key)?
            .map(|value| usize::try_from(value).map_err(bad))
            .transpose()
    }

    fn float(&self, key: &str) -> Result<Option<f64>> {
        self.metadata.float(&self.full(key))
    }

    fn string(&self, key: &str) -> Result<Option<&str>> {
        self.metadata.string(&self.full(key))
    }

    fn need<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| {
            Error::new(
                Kind::UnsupportedModel,
                format!("metadata key '{}' is missing", self.full(key)),
            )
        })
    }

    fn count(&self, key: &str) -> Result<u64> {
        self.need(key, self.unsigned(key)?)
    }

    /// Errors: `UnsupportedModel` when the key is there and not `wanted`.
    fn same(&self, key: &str, wanted: u64) -> Result<()> {
        match self.unsigned(key)? {
            Some(found) if found != wanted => {
                bail!(
                    UnsupportedModel,
                    "metadata key '{}' is {found}, wanted {wanted}",
                    self.full(key)
                )
            }
            _ => Ok(()),
        }
    }
}
