//! The configurations of a text-to-image pipeline: dimensions and constants of its text encoder, denoiser and decoder, and the
//! schedule of noise levels, as the JSON texts of diffusers and transformers state them.

use crate::error::{Result, bail, error};
use crate::source::{Arch, Keys, Tensors, parse_object, text_encoder};
use serde_json::{Map, Value};
use std::borrow::Cow;

/// Larger dimensions are taken for damage. They are refused before anything of that size is allocated.
const MAX_DIM: usize = 1 << 24;
/// The most layers of a stack, and blocks of the decoder.
const MAX_LAYERS: usize = 1 << 12;

/// The configurations of all components.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The text encoder, a Gemma 2 model.
    pub text: Arch,
    /// The denoiser.
    pub dit: DitConfig,
    /// The decoder of latents.
    pub vae: VaeConfig,
    /// The schedule.
    pub scheduler: SchedulerConfig,
}

/// The denoiser: Lumina2Transformer2DModel of diffusers, a transformer over the tokens of caption and image.
#[derive(Clone, Debug, PartialEq)]
pub struct DitConfig {
    /// Elements of a token.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Blocks over caption and image together.
    pub layers: usize,
    /// Blocks over the caption alone, and over the image alone.
    pub refiners: usize,
    /// Side of the square of latents that is one token.
    pub patch: usize,
    /// Channels of the latents.
    pub channels: usize,
    /// Elements of a caption feature.
    pub caption: usize,
    /// Added to the mean of squares in the norms of tokens.
    pub norm_eps: f32,
    /// Elements of a head that each axis of positions rotates.
    pub axes_dim: [usize; 3],
    /// Positions of each axis.
    pub axes_lens: [usize; 3],
    /// Side of the latents that the network was trained for.
    pub sample_size: usize,
}

/// The decoder: AutoencoderKL of diffusers.
#[derive(Clone, Debug, PartialEq)]
pub struct VaeConfig {
    /// Channels of the latents.
    pub latent: usize,
    /// Channels of the encoder's blocks; the decoder's blocks have them in reverse.
    pub channels: Vec<usize>,
    /// The resnets of a block of the encoder; a block of the decoder has one more.
    pub layers_per_block: usize,
    /// Groups of the norms.
    pub groups: usize,
    /// Divisor of the latents.
    pub scaling: f32,
    /// Added to the divided latents.
    pub shift: f32,
    /// Whether a 1×1 convolution comes first.
    pub post_quant: bool,
    /// Whether the middle has attention between its two resnets.
    pub mid_attention: bool,
}

/// The schedule: FlowMatchEulerDiscreteScheduler of diffusers.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerConfig {
    /// Shift of the noise levels.
    pub shift: f64,
    /// Settings of a shift that depends on the length of the sequence.
    pub dynamic: Option<DynamicShift>,
}

/// A shift that grows linearly with the length of the sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct DynamicShift {
    /// Shift at `base_len`.
    pub base_shift: f64,
    /// Shift at `max_len`.
    pub max_shift: f64,
    /// The shorter length.
    pub base_len: f64,
    /// The longer length.
    pub max_len: f64,
    /// Whether e^shift is the factor of the odds of noise; else the shift itself.
    pub exponential: bool,
}

impl Default for SchedulerConfig {
    /// The schedule of files that state none.
    fn default() -> SchedulerConfig {
        SchedulerConfig {
            shift: 6.0,
            dynamic: None,
        }
    }
}

impl Config {
    /// Reads the configurations in the tensors `te.config_json`, `dit.config_json`, `vae.config_json` and, if it is there,
    /// `scheduler.config_json`, and checks that the components fit together.
    ///
    /// Errors: `MissingTensor` for a configuration that is missing; `Parse` for JSON, keys and values that no such network has;
    /// `UnsupportedModel` for networks and options that are not supported; those of reading a tensor.
    pub fn of(tensors: &dyn Tensors) -> Result<Config> {
        let required = |name: &str| match object(tensors, name)? {
            Some(object) => Ok(object),
            None => bail!(
                MissingTensor,
                "the pipeline needs tensor '{name}' with its configuration"
            ),
        };
        let text = required("te.config_json")?;
        let layers = tensors
            .infos()
            .iter()
            .filter(|info| info.name.starts_with("te."))
            .count();
        let config = Config {
            text: encoder(&text, layers).map_err(|err| err.context("te.config_json"))?,
            dit: DitConfig::from_json(&required("dit.config_json")?)?,
            vae: VaeConfig::from_json(&required("vae.config_json")?)?,
            scheduler: match object(tensors, "scheduler.config_json")? {
                Some(scheduler) => SchedulerConfig::from_json(&scheduler)?,
                None => SchedulerConfig::default(),
            },
        };
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<()> {
        let (features, caption) = (self.text.hidden_size, self.dit.caption);
        if features != caption {
            bail!(
                Parse,
                "the text encoder has features of {features} elements, the denoiser expects cap_feat_dim {caption}"
            );
        }
        let (latents, channels) = (self.vae.latent, self.dit.channels);
        if latents != channels {
            bail!(
                Parse,
                "the denoiser has {channels} in_channels, the decoder expects {latents} latent_channels"
            );
        }
        Ok(())
    }
}

/// The JSON object in a tensor of bytes, `None` if there is no such tensor.
fn object(tensors: &dyn Tensors, name: &str) -> Result<Option<Map<String, Value>>> {
    let Some(id) = tensors.find(name) else {
        return Ok(None);
    };
    let stored = tensors.stored(id)?;
    let bytes: &Cow<[u8]> = &stored.bytes;
    parse_object(bytes, name).map(Some)
}

/// The text encoder. Numbers that no network has are `Parse` errors here, as in the other configurations.
fn encoder(config: &Map<String, Value>, tensors: usize) -> Result<Arch> {
    let keys = Keys::new(config, "the text encoder");
    let kind = need(&keys, "model_type", keys.string("model_type")?)?;
    if kind != "gemma2" {
        bail!(UnsupportedModel, "model_type is '{kind}', expected gemma2");
    }
    for key in ["hidden_size", "num_hidden_layers", "intermediate_size"] {
        size(&keys, key)?;
    }
    let mut arch = text_encoder(config, tensors)?;
    // The output projection is not part of an encoder.
    arch.tie_word_embeddings = true;
    arch.validate()?;
    Ok(arch)
}

/// The value of a key. Errors: `Parse` if it is absent.
fn need<T>(keys: &Keys, key: &str, value: Option<T>) -> Result<T> {
    value.ok_or_else(|| error!(Parse, "{}: key '{key}' is missing", keys.place))
}

/// A dimension. Errors: `Parse` if it is absent or out of range.
fn size(keys: &Keys, key: &str) -> Result<usize> {
    let value = need(keys, key, keys.size(key)?)?;
    within(keys, key, value)
}

/// A dimension with a default. Errors: `Parse` if it is out of range.
fn size_or(keys: &Keys, key: &str, default: usize) -> Result<usize> {
    within(keys, key, keys.size(key)?.unwrap_or(default))
}

fn within(keys: &Keys, key: &str, value: usize) -> Result<usize> {
    let most = match key {
        "num_layers" | "num_refiner_layers" | "layers_per_block" => MAX_LAYERS,
        _ => MAX_DIM,
    };
    // A denoiser may have no refiners.
    let least = usize::from(key != "num_refiner_layers");
    if (least..=most).contains(&value) {
        return Ok(value);
    }
    bail!(
        Parse,
        "{}: key '{key}': expected {least} to {most}, found {value}",
        keys.place
    )
}

/// A number with a default. Errors: `Parse` if it is not finite.
fn number(keys: &Keys, key: &str, default: f64) -> Result<f64> {
    match keys.float(key)?.unwrap_or(default) {
        value if value.is_finite() && (value as f32).is_finite() => Ok(value),
        value => bail!(
            Parse,
            "{}: key '{key}': expected a finite number, found {value}",
            keys.place
        ),
    }
}

/// A list of dimensions. Errors: `Parse` if it is absent or has other entries.
fn sizes(keys: &Keys, key: &str) -> Result<Vec<usize>> {
    let entry = |value: &Value| {
        let value = value.as_u64().and_then(|value| usize::try_from(value).ok());
        value.filter(|value| (1..=MAX_DIM).contains(value))
    };
    let read = |value: &Value| value.as_array()?.iter().map(entry).collect::<Option<Vec<_>>>();
    need(keys, key, keys.typed(key, "a list of whole numbers above 0", read)?)
}

/// Three dimensions. Errors: `Parse`.
fn axes(keys: &Keys, key: &str) -> Result<[usize; 3]> {
    let all = sizes(keys, key)?;
    let count = all.len();
    all.try_into()
        .map_err(|_| error!(Parse, "{}: key '{key}': expected 3 axes, found {count}", keys.place))
}

/// Errors: `Parse` unless `value` is a multiple of `of`.
fn whole(place: &str, what: &str, value: usize, of_what: &str, of: usize) -> Result<()> {
    if of != 0 && value.is_multiple_of(of) {
        return Ok(());
    }
    bail!(Parse, "{place}: {what} {value} is not a multiple of {of_what} {of}")
}

/// Errors: `UnsupportedModel` for another class.
fn class(keys: &Keys, wanted: &str) -> Result<()> {
    match need(keys, "_class_name", keys.string("_class_name")?)? {
        found if found == wanted => Ok(()),
        found => bail!(
            UnsupportedModel,
            "{}: _class_name is '{found}', expected {wanted}",
            keys.place
        ),
    }
}

impl DitConfig {
    /// Errors: `Parse`, `UnsupportedModel`.
    fn from_json(config: &Map<String, Value>) -> Result<DitConfig> {
        let keys = Keys::new(config, "dit.config_json");
        class(&keys, "Lumina2Transformer2DModel")?;
        let dit = DitConfig {
            hidden: size(&keys, "hidden_size")?,
            heads: size(&keys, "num_attention_heads")?,
            kv_heads: size(&keys, "num_kv_heads")?,
            layers: size(&keys, "num_layers")?,
            refiners: size_or(&keys, "num_refiner_layers", 2)?,
            patch: size_or(&keys, "patch_size", 2)?,
            channels: size(&keys, "in_channels")?,
            caption: size(&keys, "cap_feat_dim")?,
            norm_eps: number(&keys, "norm_eps", 1e-5)? as f32,
            axes_dim: axes(&keys, "axes_dim_rope")?,
            axes_lens: axes(&keys, "axes_lens")?,
            sample_size: size_or(&keys, "sample_size", 128)?,
        };
        if let Some(out) = keys.size("out_channels")?.filter(|&out| out != dit.channels) {
            bail!(
                UnsupportedModel,
                "dit.config_json: out_channels is {out}, expected in_channels {}",
                dit.channels
            );
        }
        dit.check()?;
        Ok(dit)
    }

    fn check(&self) -> Result<()> {
        let place = "dit.config_json";
        whole(place, "hidden_size", self.hidden, "num_attention_heads", self.heads)?;
        whole(place, "num_attention_heads", self.heads, "num_kv_heads", self.kv_heads)?;
        let (head, rotated) = (self.head(), self.axes_dim.iter().sum::<usize>());
        if rotated != head || self.axes_dim.iter().any(|dim| !dim.is_multiple_of(2)) {
            bail!(
                Parse,
                "{place}: axes_dim_rope {:?}: expected even numbers with the sum {head}, the elements of a head",
                self.axes_dim
            );
        }
        if self.norm_eps <= 0.0 {
            bail!(Parse, "{place}: norm_eps is {}, expected more than 0", self.norm_eps);
        }
        if !head.is_multiple_of(4) {
            bail!(
                UnsupportedModel,
                "{place}: heads of {head} elements, expected a multiple of 4"
            );
        }
        // The grid of positions is one of patches of latents, which are 1/8 of the image's sides.
        if self.patch != 2 {
            bail!(UnsupportedModel, "{place}: patch_size is {}, expected 2", self.patch);
        }
        Ok(())
    }

    /// Elements of a head.
    pub fn head(&self) -> usize {
        self.hidden / self.heads
    }

    /// Elements of the time embedding.
    pub fn time(&self) -> usize {
        self.hidden.min(1024)
    }

    /// Elements of a patch of latents.
    pub fn patch_elements(&self) -> usize {
        self.patch * self.patch * self.channels
    }
}

impl VaeConfig {
    /// Errors: `Parse`, `UnsupportedModel`.
    fn from_json(config: &Map<String, Value>) -> Result<VaeConfig> {
        let place = "vae.config_json";
        let keys = Keys::new(config, place);
        class(&keys, "AutoencoderKL")?;
        let channels = sizes(&keys, "block_out_channels")?;
        let act = keys.string("act_fn")?.unwrap_or("silu");
        if act != "silu" {
            bail!(UnsupportedModel, "{place}: act_fn is '{act}', expected silu");
        }
        for key in ["latents_mean", "latents_std"] {
            if keys.get(key).is_some() {
                bail!(UnsupportedModel, "{place}: '{key}' is set, expected none");
            }
        }
        blocks(&keys, channels.len())?;
        let out = size_or(&keys, "out_channels", 3)?;
        if out != 3 {
            bail!(UnsupportedModel, "{place}: out_channels is {out}, expected 3");
        }
        let vae = VaeConfig {
            latent: size(&keys, "latent_channels")?,
            layers_per_block: size_or(&keys, "layers_per_block", 1)?,
            groups: size_or(&keys, "norm_num_groups", 32)?,
            scaling: number(&keys, "scaling_factor", 0.18215)? as f32,
            shift: number(&keys, "shift_factor", 0.0)? as f32,
            post_quant: keys.bool("use_post_quant_conv")?.unwrap_or(true),
            mid_attention: keys.bool("mid_block_add_attention")?.unwrap_or(true),
            channels,
        };
        for &channels in &vae.channels {
            whole(place, "block_out_channels", channels, "norm_num_groups", vae.groups)?;
        }
        if let Some(odd) = vae.channels.iter().find(|channels| !channels.is_multiple_of(4)) {
            bail!(
                UnsupportedModel,
                "{place}: {odd} block_out_channels, expected multiples of 4"
            );
        }
        if vae.scaling == 0.0 {
            bail!(Parse, "{place}: scaling_factor is 0");
        }
        // The latents are 1/8 of the image, whatever the number of blocks says in other decoders.
        if vae.channels.len() != 4 {
            bail!(
                UnsupportedModel,
                "{place}: {} blocks, expected 4, which make 8 × 8 pixels of one latent",
                vae.channels.len()
            );
        }
        Ok(vae)
    }
}

/// Checks the types of the decoder's blocks.
fn blocks(keys: &Keys, count: usize) -> Result<()> {
    let Some(types) = keys.typed("up_block_types", "a list", Value::as_array)? else {
        bail!(Parse, "{}: key 'up_block_types' is missing", keys.place);
    };
    if types.len() != count {
        bail!(
            Parse,
            "{}: {} up_block_types for {count} block_out_channels",
            keys.place,
            types.len()
        );
    }
    match types.iter().find(|kind| kind.as_str() != Some("UpDecoderBlock2D")) {
        Some(other) => bail!(
            UnsupportedModel,
            "{}: up_block_types has {other}, expected UpDecoderBlock2D",
            keys.place
        ),
        None => Ok(()),
    }
}

impl SchedulerConfig {
    /// Errors: `Parse`, `UnsupportedModel`.
    fn from_json(config: &Map<String, Value>) -> Result<SchedulerConfig> {
        let place = "scheduler.config_json";
        let keys = Keys::new(config, place);
        class(&keys, "FlowMatchEulerDiscreteScheduler")?;
        for key in [
            "use_karras_sigmas",
            "use_exponential_sigmas",
            "use_beta_sigmas",
            "invert_sigmas",
            "stochastic_sampling",
        ] {
            if keys.bool(key)? == Some(true) {
                bail!(UnsupportedModel, "{place}: '{key}' is true, expected false");
            }
        }
        if keys.float("shift_terminal")?.is_some_and(|value| value != 0.0) {
            bail!(UnsupportedModel, "{place}: 'shift_terminal' is set, expected none");
        }
        let shift = number(&keys, "shift", 1.0)?;
        if shift <= 0.0 {
            bail!(Parse, "{place}: key 'shift': expected more than 0, found {shift}");
        }
        let dynamic = match keys.bool("use_dynamic_shifting")? {
            Some(true) => Some(DynamicShift::from_json(&keys)?),
            _ => None,
        };
        Ok(SchedulerConfig { shift, dynamic })
    }
}

impl DynamicShift {
    fn from_json(keys: &Keys) -> Result<DynamicShift> {
        let shift = DynamicShift {
            base_shift: number(keys, "base_shift", 0.5)?,
            max_shift: number(keys, "max_shift", 1.15)?,
            base_len: size_or(keys, "base_image_seq_len", 256)? as f64,
            max_len: size_or(keys, "max_image_seq_len", 4096)? as f64,
            exponential: match keys.string("time_shift_type")?.unwrap_or("exponential") {
                "exponential" => true,
                "linear" => false,
                other => bail!(
                    UnsupportedModel,
                    "{}: time_shift_type is '{other}', expected exponential or linear",
                    keys.place
                ),
            },
        };
        if shift.base_len == shift.max_len {
            bail!(
                Parse,
                "{}: base_image_seq_len and max_image_seq_len are both {}",
                keys.place,
                shift.base_len
            );
        }
        Ok(shift)
    }
}
