//! The decoder as a graph. Each layer is a convolution with what belongs to it: the norm before it, the addition to the residual,
//! and the moments of its result for the norm that follows.
//!
//! The layers before the first doubling, and attention, run on the whole image of latents. The others run on the whole image too,
//! or in strips of whole rows if their activations do not fit. Moments are computed for each row and then joined, so a norm sees
//! the whole image in both cases, and the results are the same bit by bit.

use super::builder::{Builder, Rows, vectors_of};
use crate::error::{Result, bail};
use crate::graph::{Graph, Stacking};
use crate::image::config::VaeConfig;
use crate::image::network::{Conv, GroupNorm, PixelAttention, Resnet, Vae};
use crate::op::{self, Bind, BufferId};
use crate::source::Tensors;
use std::ops::Range;
use std::sync::Arc;

/// Added to the variance of a group.
const GROUP_EPS: f32 = 1e-6;

/// What a layer adds to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residual {
    /// Nothing.
    None,
    /// The stream, which is already in the buffer of the result.
    Same,
    /// A convolution of the stream in this buffer.
    Shortcut(BufferId),
}

/// An image in a buffer: rows, pixels of a row, and elements from one pixel to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Rows.
    pub height: usize,
    /// Pixels of a row.
    pub width: usize,
    /// Elements from one pixel to the next.
    pub stride: usize,
}

impl Extent {
    /// Elements of a row.
    pub fn row(&self) -> usize {
        self.width * self.stride
    }

    /// Elements of all rows.
    pub fn elements(&self) -> usize {
        self.height * self.row()
    }
}

/// One layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Its role.
    pub label: String,
    /// The steps that compute rows of the result.
    pub steps: Range<usize>,
    /// The steps that follow when all rows are computed.
    pub merge: Range<usize>,
    /// The buffer of the input.
    pub input: BufferId,
    /// The input as a whole.
    pub from: Extent,
    /// The buffer of the result.
    pub output: BufferId,
    /// The result as a whole.
    pub to: Extent,
    /// What the result is added to.
    pub residual: Residual,
    /// Whether the input is needed again: it is what a later layer adds to.
    pub keeps_input: bool,
    /// Rows of the input above and below a row that it needs.
    pub halo: usize,
    /// Whether the sides of the input are doubled.
    pub doubled: bool,
    /// Rows of the result that are computed together.
    pub rows: usize,
}

/// A lowered decoder for images of one size.
#[derive(Clone, Debug)]
pub struct VaePlan {
    /// The graph, of one program.
    pub graph: Arc<Graph>,
    /// The layers, in order.
    pub parts: Vec<Part>,
    /// The frames of the input, of the result, and of the stream that a shortcut reads.
    pub frames: [BufferId; 3],
    /// The number of pixels, for the products of attention.
    pub batch: BufferId,
    /// The input of the layers that run in strips, if any do.
    pub strip_input: Option<BufferId>,
}

/// Lowers the decoder for latents of this height and width. `strip`: the most bytes of a buffer of activations of the layers from
/// the first doubling on; `None`: they run on the whole image.
///
/// Errors: `UnsupportedTensorType`; `OutOfMemory` for a buffer that exceeds the largest binding, and for strips of less than one
/// row.
pub fn vae(
    (config, vae): (&VaeConfig, &Vae),
    tensors: &dyn Tensors,
    [height, width]: [usize; 2],
    strip: Option<u64>,
    max_binding: u64,
) -> Result<VaePlan> {
    let mut builder = Builder::new(tensors, max_binding)?;
    let largest = largest(config, [height, width], strip.is_none());
    let names = ["stream", "normed", "other"];
    let [stream, normed, other] = [0, 1, 2].map(|i| builder.words(names[i], largest));
    let widest = config.channels.iter().max().copied().unwrap_or(0);
    let mut lowering = Lowering {
        groups: config.groups,
        latents: builder.words("latents", height * width * config.latent.next_multiple_of(32))?,
        qkv: builder.words(
            "qkv",
            match &vae.attention {
                Some(attention) => {
                    (height * width).next_multiple_of(8) * 3 * attention.norm.channels.next_multiple_of(32)
                }
                None => 0,
            },
        )?,
        partials: builder.words("partials", 8 * height * 2 * widest)?,
        stats: builder.words("stats", 2 * widest)?,
        frames: [
            builder.words("frame.input", 4)?,
            builder.words("frame", 4)?,
            builder.words("frame.stream", 4)?,
        ],
        batch: builder.batch("pixels")?,
        stream: stream?,
        normed: normed?,
        other: other?,
        at: Extent {
            height,
            width,
            stride: config.latent.next_multiple_of(32),
        },
        strip: None,
        parts: Vec::new(),
        b: builder,
    };
    lowering.front(vae)?;
    if let Some(bytes) = strip {
        lowering.begin_strips(bytes as usize / 4)?;
    }
    lowering.back(vae)?;
    let output = lowering.parts.last().map_or(lowering.stream, |part| part.output);
    lowering.b.program("decode", output);
    Ok(VaePlan {
        parts: lowering.parts,
        frames: lowering.frames,
        batch: lowering.batch,
        strip_input: lowering.strip.map(|strip| strip.input),
        graph: Arc::new(lowering.b.finish()),
    })
}

/// Elements of the largest activations: of all layers, or of those before the first doubling.
fn largest(config: &VaeConfig, [height, width]: [usize; 2], all: bool) -> usize {
    let top = config.channels.last().copied().unwrap_or(0);
    let mut inputs = top;
    let mut largest = height * width * top.next_multiple_of(32);
    let levels = config
        .channels
        .iter()
        .rev()
        .enumerate()
        .take(if all { usize::MAX } else { 0 });
    for (level, &outputs) in levels {
        // A block computes at the size to which the block before it doubled its channels.
        let pixels = (height << level) * (width << level);
        largest = largest.max(pixels * inputs.max(outputs).next_multiple_of(32));
        inputs = outputs;
    }
    // Products compute whole tiles of 8 pixels.
    largest + 7 * top.next_multiple_of(32)
}

struct Lowering<'a> {
    b: Builder<'a>,
    groups: usize,
    latents: BufferId,
    qkv: BufferId,
    partials: BufferId,
    stats: BufferId,
    frames: [BufferId; 3],
    batch: BufferId,
    /// The residual stream, and two other buffers.
    stream: BufferId,
    normed: BufferId,
    other: BufferId,
    /// The image in `stream`, or the latents before the first layer.
    at: Extent,
    strip: Option<Strip>,
    parts: Vec<Part>,
}

/// Buffers of strips: the input, its norm, the result, and the stream that a shortcut reads.
#[derive(Clone, Copy)]
struct Strip {
    input: BufferId,
    normed: BufferId,
    output: BufferId,
    stream: BufferId,
    /// Elements of each.
    elements: usize,
}

/// A convolution with what belongs to it.
struct Layer<'l> {
    label: String,
    norm: Option<&'l GroupNorm>,
    conv: &'l Conv,
    /// Buffers in a lowering without strips.
    input: BufferId,
    output: BufferId,
    from: Extent,
    doubled: bool,
    shortcut: Option<&'l Conv>,
    adds: bool,
    keeps_input: bool,
    /// Whether a norm of the result follows.
    normed_next: bool,
}

impl<'l> Layer<'l> {
    /// A convolution from one buffer to another, without a norm.
    fn new(label: String, conv: &'l Conv, [input, output]: [BufferId; 2], from: Extent) -> Layer<'l> {
        Layer {
            label,
            norm: None,
            conv,
            input,
            output,
            from,
            doubled: false,
            shortcut: None,
            adds: false,
            keeps_input: false,
            normed_next: false,
        }
    }
}

impl Lowering<'_> {
    /// The layers up to the end of the middle.
    fn front(&mut self, vae: &Vae) -> Result<()> {
        let mut input = self.latents;
        if let Some(conv) = &vae.post_quant {
            self.plain("post_quant", conv, [input, self.normed], false, false)?;
            input = self.normed;
        }
        self.plain("conv_in", &vae.conv_in, [input, self.stream], false, true)?;
        self.resnet("mid.0", &vae.mid[0], true)?;
        if let Some(attention) = &vae.attention {
            self.attention(attention)?;
        }
        self.resnet("mid.1", &vae.mid[1], true)
    }

    /// The blocks and the last convolution.
    fn back(&mut self, vae: &Vae) -> Result<()> {
        for (i, block) in vae.blocks.iter().enumerate() {
            for (r, resnet) in block.resnets.iter().enumerate() {
                // A convolution after doubling has no norm.
                let normed_next = r + 1 < block.resnets.len() || block.upsample.is_none();
                self.resnet(&format!("up.{i}.{r}"), resnet, normed_next)?;
            }
            if let Some(conv) = &block.upsample {
                let buffers = [self.stream, self.other];
                self.plain(&format!("up.{i}.double"), conv, buffers, true, true)?;
                std::mem::swap(&mut self.stream, &mut self.other);
            }
        }
        let layer = Layer {
            norm: Some(&vae.norm_out),
            ..Layer::new("conv_out".into(), &vae.conv_out, [self.stream, self.other], self.at)
        };
        self.layer(&layer)
    }

    /// Makes the buffers of strips of at most so many elements.
    fn begin_strips(&mut self, elements: usize) -> Result<()> {
        let mut buffer = |label: &str| self.b.words(&format!("strip.{label}"), elements);
        self.strip = Some(Strip {
            input: buffer("input")?,
            normed: buffer("normed")?,
            output: buffer("output")?,
            stream: buffer("stream")?,
            elements,
        });
        Ok(())
    }

    /// A convolution without a norm.
    fn plain(
        &mut self,
        label: &str,
        conv: &Conv,
        buffers: [BufferId; 2],
        doubled: bool,
        normed_next: bool,
    ) -> Result<()> {
        let layer = Layer {
            doubled,
            normed_next,
            ..Layer::new(label.into(), conv, buffers, self.at)
        };
        self.layer(&layer)
    }

    /// A resnet on the stream. Its second convolution adds to the stream, or to a convolution of it in the other buffer.
    fn resnet(&mut self, label: &str, resnet: &Resnet, normed_next: bool) -> Result<()> {
        let first = Layer {
            norm: Some(&resnet.norm1),
            keeps_input: true,
            normed_next: true,
            ..Layer::new(
                format!("{label}.conv1"),
                &resnet.conv1,
                [self.stream, self.other],
                self.at,
            )
        };
        self.layer(&first)?;
        let output = match &resnet.shortcut {
            Some(_) => self.other,
            None => self.stream,
        };
        let second = Layer {
            norm: Some(&resnet.norm2),
            shortcut: resnet.shortcut.as_ref(),
            adds: true,
            normed_next,
            ..Layer::new(label.into(), &resnet.conv2, [self.other, output], self.at)
        };
        self.layer(&second)?;
        if resnet.shortcut.is_some() {
            std::mem::swap(&mut self.stream, &mut self.other);
        }
        Ok(())
    }

    /// Emits a layer.
    fn layer(&mut self, layer: &Layer) -> Result<()> {
        let Extent { height, width, .. } = layer.from;
        let scale = if layer.doubled { 2 } else { 1 };
        let to = Extent {
            height: scale * height,
            width: scale * width,
            stride: layer.conv.outputs.next_multiple_of(32),
        };
        let halo = layer.conv.side / 2;
        let strip = self.strip;
        let rows = match strip {
            Some(strip) => self.strip_rows(layer, to, halo, strip.elements)?,
            None => to.height,
        };
        let (input, mut normed, output) = match strip {
            Some(strip) => (strip.input, strip.normed, strip.output),
            None => (layer.input, self.normed, layer.output),
        };
        let start = self.b.len();
        match layer.norm {
            Some(norm) => self.group_norm(&layer.label, norm, (input, normed), (layer.from.width, true)),
            None => normed = input,
        }
        let mut residual = if layer.adds { Residual::Same } else { Residual::None };
        if let Some(shortcut) = layer.shortcut {
            let stream = strip.map_or(self.stream, |strip| strip.stream);
            let label = format!("{}.shortcut", layer.label);
            let frame = self.frames[2];
            self.conv(&label, shortcut, [frame, stream, output], (to, false), false)?;
            residual = Residual::Shortcut(stream);
        }
        let operands = [self.frames[1], normed, output];
        self.conv(&layer.label, layer.conv, operands, (to, layer.doubled), layer.adds)?;
        self.finish(layer, (input, output), (to, start, rows, residual, halo));
        Ok(())
    }

    /// The moments of the result, if a norm follows, and the record of the layer.
    fn finish(
        &mut self,
        layer: &Layer,
        (input, output): (BufferId, BufferId),
        (to, start, rows, residual, halo): (Extent, usize, usize, Residual, usize),
    ) {
        if layer.normed_next {
            self.channel_stats(&layer.label, output, layer.conv.outputs, to);
        }
        let end = self.b.len();
        if layer.normed_next {
            self.group_merge(&layer.label, layer.conv.outputs, to);
        }
        self.at = to;
        self.parts.push(Part {
            label: layer.label.clone(),
            steps: start..end,
            merge: end..self.b.len(),
            input,
            from: layer.from,
            output,
            to,
            residual,
            keeps_input: layer.keeps_input,
            halo,
            doubled: layer.doubled,
            rows,
        });
    }

    /// Rows of a strip whose buffers have so many elements.
    fn strip_rows(&self, layer: &Layer, to: Extent, halo: usize, elements: usize) -> Result<usize> {
        let of_stream = match layer.shortcut {
            Some(shortcut) => to.width * shortcut.inputs.next_multiple_of(32),
            None => 0,
        };
        let of_output = elements / to.row().max(of_stream);
        let of_input = (elements / layer.from.row()).saturating_sub(2 * halo);
        let rows = match layer.doubled {
            true => (of_input * 2).min(of_output),
            false => of_input.min(of_output),
        };
        if rows == 0 {
            let (need, label) = ((2 * halo + 1) * layer.from.row().max(to.row()) * 4, &layer.label);
            bail!(
                OutOfMemory,
                "{label}: one row needs buffers of {need} bytes, a strip has at most {}",
                elements * 4
            );
        }
        Ok(rows.min(to.height))
    }

    fn conv(
        &mut self,
        label: &str,
        conv: &Conv,
        [frame, x, y]: [BufferId; 3],
        (to, doubled): (Extent, bool),
        adds: bool,
    ) -> Result<()> {
        let matrix = self.b.matrix(label, &[conv.weight], Stacking::Rows)?;
        let bias = self
            .b
            .vector(&format!("{label}.bias"), &[(Some(conv.bias), conv.outputs)]);
        for (w, segment) in self.b.segments(matrix) {
            let params = op::conv::Params {
                rows: segment.rows,
                groups: segment.groups,
                row0: segment.row0,
                tap_groups: conv.inputs.div_ceil(32) as u32,
                side: conv.side as u32,
                width: to.width as u32,
                doubled: u32::from(doubled),
                y_stride: (to.stride / 4) as u32,
                adds: u32::from(adds),
            };
            let [frame, x, y] = [frame, x, y].map(Bind::Buffer);
            let bias = Bind::Vector(bias);
            self.b.emit(label, params, op::conv::Bindings { w, frame, x, bias, y });
        }
        Ok(())
    }

    fn group_norm(
        &mut self,
        label: &str,
        norm: &GroupNorm,
        (x, y): (BufferId, BufferId),
        (width, silu): (usize, bool),
    ) {
        let params = op::group_norm::Params {
            vectors: (norm.channels / 4) as u32,
            pixel_stride: vectors_of(norm.channels),
            width: width as u32,
            silu: u32::from(silu),
        };
        let label = format!("{label}.norm");
        let g = self.b.norm(&label, norm.weight);
        let bias = self.b.norm(&format!("{label}.bias"), norm.bias);
        let [frame, x, stats, y] = [self.frames[0], x, self.stats, y].map(Bind::Buffer);
        let bindings = op::group_norm::Bindings {
            frame,
            x,
            stats,
            g,
            bias,
            y,
        };
        self.b.emit(&label, params, bindings);
    }

    fn channel_stats(&mut self, label: &str, x: BufferId, channels: usize, to: Extent) {
        let params = op::channel_stats::Params {
            vectors: (channels / 4) as u32,
            pixel_stride: (to.stride / 4) as u32,
            width: to.width as u32,
        };
        let [frame, x, partials] = [self.frames[1], x, self.partials].map(Bind::Buffer);
        let bindings = op::channel_stats::Bindings { frame, x, partials };
        self.b.emit(&format!("{label}.stats"), params, bindings);
    }

    fn group_merge(&mut self, label: &str, channels: usize, to: Extent) {
        let params = op::group_merge::Params {
            channels: channels as u32,
            groups: self.groups as u32,
            width: to.width as u32,
            eps: GROUP_EPS,
        };
        let [frame, partials, stats] = [self.frames[1], self.partials, self.stats].map(Bind::Buffer);
        let bindings = op::group_merge::Bindings { frame, partials, stats };
        self.b.emit(&format!("{label}.merge"), params, bindings);
    }

    /// Attention of every latent to every latent.
    fn attention(&mut self, attention: &PixelAttention) -> Result<()> {
        let start = self.b.len();
        let channels = attention.norm.channels;
        let (at, pixels) = (self.at, self.at.height * self.at.width);
        self.group_norm(
            "mid.attn",
            &attention.norm,
            (self.stream, self.normed),
            (at.width, false),
        );
        let rows = Rows {
            batch: self.batch,
            x: self.normed,
        };
        let [q, k, v] = &attention.qkv;
        self.b.products("mid.attn.qkv", &[q, k, v], rows, self.qkv)?;
        let params = op::attn_full::Params {
            heads: 1,
            kv_heads: 1,
            head_vectors: (channels / 4) as u32,
            qkv_stride: vectors_of(3 * channels),
            y_stride: vectors_of(channels),
            scale: 1.0 / (channels as f32).sqrt(),
            most: pixels as u32,
        };
        let [batch, qkv, y] = [self.batch, self.qkv, self.normed].map(Bind::Buffer);
        self.b
            .emit("mid.attn", params, op::attn_full::Bindings { batch, qkv, y });
        let matrix = self.b.matrix("mid.attn.o", &[attention.o.weight], Stacking::Rows)?;
        let bias = self.b.vector("mid.attn.o.bias", &[(attention.o.bias, channels)]);
        for (w, segment) in self.b.segments(matrix) {
            let params = op::matmul_add::Params {
                rows: segment.rows,
                groups: segment.groups,
                row0: segment.row0,
                second_row: segment.second_row,
                third_row: segment.third_row,
                y_stride: vectors_of(channels),
                has_bias: 1,
            };
            let [batch, x, h] = [self.batch, self.normed, self.stream].map(Bind::Buffer);
            let bindings = op::matmul_add::Bindings {
                w,
                batch,
                x,
                list: batch,
                bias: Bind::Vector(bias),
                h,
            };
            self.b.emit("mid.attn.o", params, bindings);
        }
        self.channel_stats("mid.attn", self.stream, channels, at);
        let end = self.b.len();
        self.group_merge("mid.attn", channels, at);
        self.parts.push(Part {
            label: "mid.attn".into(),
            steps: start..end,
            merge: end..self.b.len(),
            input: self.stream,
            from: at,
            output: self.stream,
            to: at,
            residual: Residual::Same,
            keeps_input: false,
            halo: 0,
            doubled: false,
            rows: at.height,
        });
        Ok(())
    }
}
