//! From the configurations and the tensors of a pipeline to its [`Network`]. Every shape is checked.

use super::config::{Config, DitConfig, VaeConfig};
use super::network::{Block, Conv, Dit, GroupNorm, Network, PixelAttention, Resnet, UpBlock, Vae};
use crate::dtype::Dtype;
use crate::error::{Result, bail};
use crate::model::{self, Finder, Linear};
use crate::source::{Stored, TensorId, TensorInfo, Tensors};

/// Elements of the sinusoidal embedding of the time.
pub const TIME_ELEMENTS: usize = 256;

/// Binds the networks that `config` describes to tensors with the prefixes `te.`, `dit.` and `vae.`.
///
/// Errors: `MissingTensor` by name; `Parse` for shapes that contradict the configuration; `UnsupportedModel` for networks that
/// kernels do not support; `UnsupportedTensorType` for a convolution whose weights are not f16, bf16 or f32.
pub fn bind(config: &Config, tensors: &dyn Tensors) -> Result<Network> {
    let text = model::bind(&config.text, &TextTensors(tensors))?;
    let mut finder = Finder::new(tensors, "the configuration");
    let dit = dit(&config.dit, &mut finder)?;
    let vae = vae(&config.vae, &mut finder, tensors)?;
    let unused = finder.unused().into_iter().filter(|id| {
        let is_config = tensors.infos()[*id].name.ends_with(".config_json");
        text.unused.contains(id) && !is_config
    });
    Ok(Network {
        unused: unused.collect(),
        text,
        dit,
        vae,
    })
}

/// The tensors of a pipeline, of which those of the text encoder are found under the names of a language model.
struct TextTensors<'a>(&'a dyn Tensors);

impl Tensors for TextTensors<'_> {
    fn infos(&self) -> &[TensorInfo] {
        self.0.infos()
    }

    fn find(&self, name: &str) -> Option<TensorId> {
        self.0.find(&format!("te.{}", name.strip_prefix("model.")?))
    }

    fn stored(&self, id: TensorId) -> Result<Stored<'_>> {
        self.0.stored(id)
    }

    fn release(&self, id: TensorId) {
        self.0.release(id);
    }
}

/// A linear map with a bias. Errors: as [`Finder::required`].
fn biased(finder: &mut Finder, name: &str, rows: usize, cols: usize) -> Result<Linear> {
    Ok(Linear {
        bias: Some(finder.vector(&format!("{name}.bias"), rows)?),
        ..finder.linear(name, rows, cols)?
    })
}

/// A linear map without a bias. Errors: as [`Finder::required`].
fn unbiased(finder: &mut Finder, name: &str, rows: usize, cols: usize) -> Result<Linear> {
    Ok(Linear {
        weight: finder.required(&format!("{name}.weight"), &[rows as u64, cols as u64])?,
        bias: None,
        rows,
        cols,
    })
}

fn dit(config: &DitConfig, finder: &mut Finder) -> Result<Dit> {
    let (hidden, time, patch) = (config.hidden, config.time(), config.patch_elements());
    let embed = |part: &str| format!("dit.time_caption_embed.{part}");
    let blocks = |finder: &mut Finder, name: &str, count: usize, modulated: bool| -> Result<Vec<Block>> {
        let one = |i| block(config, finder, &format!("dit.{name}.{i}"), modulated);
        (0..count).map(one).collect()
    };
    Ok(Dit {
        patches: biased(finder, "dit.x_embedder", hidden, patch)?,
        time: [
            biased(finder, &embed("timestep_embedder.linear_1"), time, TIME_ELEMENTS)?,
            biased(finder, &embed("timestep_embedder.linear_2"), time, time)?,
        ],
        caption_norm: finder.vector(&embed("caption_embedder.0.weight"), config.caption)?,
        caption: biased(finder, &embed("caption_embedder.1"), hidden, config.caption)?,
        context: blocks(finder, "context_refiner", config.refiners, false)?,
        noise: blocks(finder, "noise_refiner", config.refiners, true)?,
        layers: blocks(finder, "layers", config.layers, true)?,
        out_scale: biased(finder, "dit.norm_out.linear_1", hidden, time)?,
        out: biased(finder, "dit.norm_out.linear_2", patch, hidden)?,
    })
}

fn block(config: &DitConfig, finder: &mut Finder, at: &str, modulated: bool) -> Result<Block> {
    let name = |part: &str| format!("{at}.{part}");
    let (hidden, head) = (config.hidden, config.head());
    let kv = config.kv_heads * head;
    let Some(width) = finder.rows(&name("feed_forward.linear_1.weight")) else {
        bail!(
            MissingTensor,
            "the network needs tensor '{}'",
            name("feed_forward.linear_1.weight")
        );
    };
    let mut linear = |part: &str, rows, cols| unbiased(finder, &name(part), rows, cols);
    let qkv = [
        linear("attn.to_q", hidden, hidden)?,
        linear("attn.to_k", kv, hidden)?,
        linear("attn.to_v", kv, hidden)?,
    ];
    let o = linear("attn.to_out.0", hidden, hidden)?;
    let gate = linear("feed_forward.linear_1", width, hidden)?;
    let up = linear("feed_forward.linear_3", width, hidden)?;
    let down = linear("feed_forward.linear_2", hidden, width)?;
    let mut norm = |part: &str, len| finder.vector(&name(&format!("{part}.weight")), len);
    let first = if modulated { "norm1.norm" } else { "norm1" };
    Ok(Block {
        q_norm: norm("attn.norm_q", head)?,
        k_norm: norm("attn.norm_k", head)?,
        attn_norm: norm(first, hidden)?,
        attn_post_norm: norm("norm2", hidden)?,
        ffn_norm: norm("ffn_norm1", hidden)?,
        ffn_post_norm: norm("ffn_norm2", hidden)?,
        modulation: modulated
            .then(|| biased(finder, &name("norm1.linear"), 4 * hidden, config.time()))
            .transpose()?,
        qkv,
        o,
        gate,
        up,
        down,
    })
}

/// The tensors of the decoder while they are bound.
struct Decoder<'a, 'f> {
    finder: &'a mut Finder<'f>,
    tensors: &'f dyn Tensors,
}

fn vae<'f>(config: &VaeConfig, finder: &mut Finder<'f>, tensors: &'f dyn Tensors) -> Result<Vae> {
    let mut decoder = Decoder { finder, tensors };
    let (latent, first) = (config.latent, config.channels[0]);
    let top = config.channels[config.channels.len() - 1];
    let mut blocks = Vec::new();
    let mut inputs = top;
    for (b, &outputs) in config.channels.iter().rev().enumerate() {
        let name = |part: &str| format!("vae.decoder.up_blocks.{b}.{part}");
        let mut resnets = Vec::new();
        for r in 0..=config.layers_per_block {
            resnets.push(decoder.resnet(&name(&format!("resnets.{r}")), inputs, outputs)?);
            inputs = outputs;
        }
        let doubles = b + 1 < config.channels.len();
        let upsample = doubles.then(|| decoder.conv(&name("upsamplers.0.conv"), outputs, outputs, 3));
        blocks.push(UpBlock {
            resnets,
            upsample: upsample.transpose()?,
        });
    }
    let mid = |part: &str| format!("vae.decoder.mid_block.{part}");
    Ok(Vae {
        post_quant: match config.post_quant {
            true => Some(decoder.conv("vae.post_quant_conv", latent, latent, 1)?),
            false => None,
        },
        conv_in: decoder.conv("vae.decoder.conv_in", top, latent, 3)?,
        mid: [
            decoder.resnet(&mid("resnets.0"), top, top)?,
            decoder.resnet(&mid("resnets.1"), top, top)?,
        ],
        attention: match config.mid_attention {
            true => Some(decoder.attention(&mid("attentions.0"), top)?),
            false => None,
        },
        blocks,
        norm_out: decoder.norm("vae.decoder.conv_norm_out", first)?,
        conv_out: decoder.conv("vae.decoder.conv_out", 3, first, 3)?,
    })
}

impl Decoder<'_, '_> {
    fn conv(&mut self, name: &str, outputs: usize, inputs: usize, side: usize) -> Result<Conv> {
        let shape = [outputs, inputs, side, side].map(|dim| dim as u64);
        let weight = self.finder.required(&format!("{name}.weight"), &shape)?;
        let dtype = self.tensors.infos()[weight].dtype;
        if !matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16) {
            bail!(
                UnsupportedTensorType,
                "tensor '{name}.weight' is of type {}, expected f32, f16 or bf16 for a convolution",
                dtype.name()
            );
        }
        Ok(Conv {
            weight,
            bias: self.finder.vector(&format!("{name}.bias"), outputs)?,
            outputs,
            inputs,
            side,
        })
    }

    fn norm(&mut self, name: &str, channels: usize) -> Result<GroupNorm> {
        Ok(GroupNorm {
            weight: self.finder.vector(&format!("{name}.weight"), channels)?,
            bias: self.finder.vector(&format!("{name}.bias"), channels)?,
            channels,
        })
    }

    fn resnet(&mut self, name: &str, inputs: usize, outputs: usize) -> Result<Resnet> {
        let part = |part: &str| format!("{name}.{part}");
        Ok(Resnet {
            norm1: self.norm(&part("norm1"), inputs)?,
            conv1: self.conv(&part("conv1"), outputs, inputs, 3)?,
            norm2: self.norm(&part("norm2"), outputs)?,
            conv2: self.conv(&part("conv2"), outputs, outputs, 3)?,
            shortcut: match inputs == outputs {
                true => None,
                false => Some(self.conv(&part("conv_shortcut"), outputs, inputs, 1)?),
            },
        })
    }

    fn attention(&mut self, name: &str, channels: usize) -> Result<PixelAttention> {
        let norm = self.norm(&format!("{name}.group_norm"), channels)?;
        let mut linear = |part: &str| biased(self.finder, &format!("{name}.{part}"), channels, channels);
        Ok(PixelAttention {
            norm,
            qkv: [linear("to_q")?, linear("to_k")?, linear("to_v")?],
            o: linear("to_out.0")?,
        })
    }
}
