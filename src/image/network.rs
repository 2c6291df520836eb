//! The typed network of a text-to-image pipeline: its parts, and the tensor of each weight.

use crate::model::{Linear, Model};
use crate::source::TensorId;

/// The networks of a pipeline.
#[derive(Clone, Debug, PartialEq)]
pub struct Network {
    /// The text encoder. Its features are the residual stream that enters the last layer.
    pub text: Model,
    /// The denoiser.
    pub dit: Dit,
    /// The decoder.
    pub vae: Vae,
    /// Tensors that no part uses, configurations excepted.
    pub unused: Vec<TensorId>,
}

/// The denoiser: a transformer over the tokens of a caption and of an image.
#[derive(Clone, Debug, PartialEq)]
pub struct Dit {
    /// From patches of latents to tokens.
    pub patches: Linear,
    /// The two layers of the time embedding.
    pub time: [Linear; 2],
    /// RMSNorm weight of caption features.
    pub caption_norm: TensorId,
    /// From caption features to tokens.
    pub caption: Linear,
    /// Blocks over the caption, without modulation.
    pub context: Vec<Block>,
    /// Blocks over the image.
    pub noise: Vec<Block>,
    /// Blocks over both.
    pub layers: Vec<Block>,
    /// From the time embedding to the scale before the output projection.
    pub out_scale: Linear,
    /// From tokens to patches of velocity.
    pub out: Linear,
}

/// One block: x += tanh(g)·N(attention(N(x)·(1+s))), then the same with a gated feed-forward network. A block without modulation
/// has scales of 0, and 1 in place of tanh(g).
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// Query, key and value projections.
    pub qkv: [Linear; 3],
    /// Output projection of attention.
    pub o: Linear,
    /// RMSNorm weight of query heads.
    pub q_norm: TensorId,
    /// RMSNorm weight of key heads.
    pub k_norm: TensorId,
    /// RMSNorm weight before attention.
    pub attn_norm: TensorId,
    /// RMSNorm weight after attention.
    pub attn_post_norm: TensorId,
    /// RMSNorm weight before the feed-forward network.
    pub ffn_norm: TensorId,
    /// RMSNorm weight after the feed-forward network.
    pub ffn_post_norm: TensorId,
    /// Gate projection, `[width, hidden]`.
    pub gate: Linear,
    /// Up projection.
    pub up: Linear,
    /// Down projection, `[hidden, width]`.
    pub down: Linear,
    /// From the time embedding to scale and gate of attention, scale and gate of the feed-forward network.
    pub modulation: Option<Linear>,
}

/// The decoder: from latents to an image of 8 times their sides.
#[derive(Clone, Debug, PartialEq)]
pub struct Vae {
    /// A 1×1 convolution of the latents.
    pub post_quant: Option<Conv>,
    /// The first convolution.
    pub conv_in: Conv,
    /// The middle: two resnets.
    pub mid: [Resnet; 2],
    /// Attention between the two.
    pub attention: Option<PixelAttention>,
    /// The blocks, each but the last of which doubles the sides.
    pub blocks: Vec<UpBlock>,
    /// The last norm.
    pub norm_out: GroupNorm,
    /// The last convolution.
    pub conv_out: Conv,
}

/// A convolution with a square kernel, stride 1, and zeros around the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv {
    /// Its weight, `[outputs, inputs, side, side]`.
    pub weight: TensorId,
    /// Its bias.
    pub bias: TensorId,
    /// Channels of the result.
    pub outputs: usize,
    /// Channels of the input.
    pub inputs: usize,
    /// Side of the kernel: 1 or 3.
    pub side: usize,
}

/// Normalises groups of channels over all pixels, then scales each channel and adds a bias to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupNorm {
    /// Factors.
    pub weight: TensorId,
    /// Biases.
    pub bias: TensorId,
    /// Channels.
    pub channels: usize,
}

/// x + conv(silu(norm(conv(silu(norm(x)))))), or with a 1×1 convolution of the first x if the number of channels changes.
#[derive(Clone, Debug, PartialEq)]
pub struct Resnet {
    /// The first norm.
    pub norm1: GroupNorm,
    /// The first convolution.
    pub conv1: Conv,
    /// The second norm.
    pub norm2: GroupNorm,
    /// The second convolution.
    pub conv2: Conv,
    /// The 1×1 convolution.
    pub shortcut: Option<Conv>,
}

/// Attention of every pixel to every pixel, with one head: x + o(attention(norm(x))).
#[derive(Clone, Debug, PartialEq)]
pub struct PixelAttention {
    /// The norm.
    pub norm: GroupNorm,
    /// Query, key and value projections.
    pub qkv: [Linear; 3],
    /// Output projection.
    pub o: Linear,
}

/// Resnets, then a convolution of the image with doubled sides.
#[derive(Clone, Debug, PartialEq)]
pub struct UpBlock {
    /// The resnets.
    pub resnets: Vec<Resnet>,
    /// The convolution after doubling.
    pub upsample: Option<Conv>,
}
