//! The denoiser as a graph of three programs: the caption, once for each prompt; the time, once for each step; and the velocity
//! of an image under a caption at a time.

use super::block::{Placed, Scratch, Stream, blocks};
use super::builder::{Builder, Rows, vectors_of};
use crate::error::Result;
use crate::graph::{Fill, Graph, Stacking};
use crate::image::TIME_ELEMENTS;
use crate::image::config::DitConfig;
use crate::image::network::{Block, Dit};
use crate::model::Linear;
use crate::op::{self, Bind, BufferId};
use crate::source::Tensors;
use std::sync::Arc;

/// Added to the variance in the norm before the output projection.
const OUT_EPS: f32 = 1e-6;

/// The programs of the denoiser. The discriminants are indices in [`Graph::programs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DitProgram {
    /// From caption features to refined tokens.
    Caption,
    /// From the time to the modulations of all blocks.
    Time,
    /// From patches of latents to patches of velocity.
    Velocity,
}

/// A lowered denoiser for images of one size. Image tokens come before those of the caption.
#[derive(Clone, Debug)]
pub struct DitPlan {
    /// The graph.
    pub graph: Arc<Graph>,
    /// Batches of the tokens of the caption, of the image, and of both.
    pub batches: [BufferId; 3],
    /// Cosines and sines of the tokens of the caption alone.
    pub caption_table: BufferId,
    /// Cosines and sines of the tokens of image and caption.
    pub table: BufferId,
    /// Caption features.
    pub features: BufferId,
    /// Refined tokens of the caption.
    pub caption: BufferId,
    /// The sinusoidal embedding of the time.
    pub time: BufferId,
    /// The time embedding; at the end of the program silu of it.
    pub embedding: BufferId,
    /// Scales and gates of all blocks.
    pub mods: BufferId,
    /// Patches of latents.
    pub patches: BufferId,
    /// Patches of velocity.
    pub velocity: BufferId,
    /// Tokens of the image.
    pub image_tokens: usize,
    /// Most tokens of a caption.
    pub caption_tokens: usize,
}

/// Lowers the denoiser for images of `image_tokens` tokens and captions of at most `caption_tokens`.
///
/// Errors: `UnsupportedTensorType` for weights without kernels, `OutOfMemory` for a buffer that exceeds the largest binding.
pub fn dit(
    (config, dit): (&DitConfig, &Dit),
    tensors: &dyn Tensors,
    [image_tokens, caption_tokens]: [usize; 2],
    max_binding: u64,
) -> Result<DitPlan> {
    let mut b = Builder::new(tensors, max_binding)?;
    let (hidden, head) = (config.hidden, config.head());
    let all = image_tokens + caption_tokens;
    let modulated: Vec<&Block> = dit.noise.iter().chain(&dit.layers).collect();
    // Each block has four parts of the modulations; the scale before the output is the last part.
    let parts = 4 * modulated.len() + 1;
    let plan = DitPlan {
        graph: Arc::new(Builder::new(tensors, max_binding)?.finish()),
        batches: [
            b.batch("batch.caption")?,
            b.batch("batch.image")?,
            b.batch("batch.all")?,
        ],
        caption_table: b.rows("caption.rope", head, caption_tokens)?,
        table: b.rows("rope", head, all)?,
        features: b.rows("features", config.caption, caption_tokens)?,
        caption: b.rows("caption", hidden, caption_tokens)?,
        time: b.words("time", TIME_ELEMENTS)?,
        embedding: b.words("time.embedding", config.time().next_multiple_of(32))?,
        mods: b.words("mods", (parts * hidden).next_multiple_of(32))?,
        patches: b.rows("patches", config.patch_elements(), image_tokens)?,
        velocity: b.rows("velocity", config.patch_elements(), image_tokens)?,
        image_tokens,
        caption_tokens,
    };
    let scratch = scratch(&mut b, config, dit, all, plan.mods)?;
    caption(&mut b, (config, dit), &plan, &scratch)?;
    time(&mut b, (config, dit), &plan, &modulated)?;
    velocity(&mut b, (config, dit), &plan, &scratch)?;
    Ok(DitPlan {
        graph: Arc::new(b.finish()),
        ..plan
    })
}

fn scratch(b: &mut Builder, config: &DitConfig, dit: &Dit, tokens: usize, mods: BufferId) -> Result<Scratch> {
    let every = || dit.context.iter().chain(&dit.noise).chain(&dit.layers);
    let width = every().map(|block| block.gate.rows).max().unwrap_or(0);
    let split = every()
        .map(|block| b.alike(&block.gate, &block.up))
        .collect::<Result<Vec<_>>>()?;
    let up = if split.contains(&false) { width } else { 0 };
    let kv = config.kv_heads * config.head();
    Ok(Scratch {
        // The caption's norm writes here as well.
        x: b.rows("x", config.hidden.max(config.caption), tokens)?,
        qkv: b.rows("qkv", config.hidden + 2 * kv, tokens)?,
        attn: b.rows("attn", config.hidden, tokens)?,
        y: b.rows("y", config.hidden, tokens)?,
        act: b.rows("act", width, tokens)?,
        up: b.rows("up", up, tokens)?,
        mods,
        tokens,
    })
}

fn placed<'a>(label: &str, blocks: &'a [Block], first: Option<u32>, hidden: usize) -> Vec<Placed<'a>> {
    let place = |(i, block): (usize, &'a Block)| Placed {
        block,
        label: format!("{label}.{i:02}"),
        mods_at: first.map(|first| (first + i as u32) * hidden as u32),
    };
    blocks.iter().enumerate().map(place).collect()
}

fn caption(b: &mut Builder, (config, dit): (&DitConfig, &Dit), plan: &DitPlan, scratch: &Scratch) -> Result<()> {
    let batch = plan.batches[0];
    let vectors = vectors_of(config.caption);
    let params = op::norm::Params {
        vectors,
        inv_cols: 1.0 / config.caption as f32,
        eps: config.norm_eps,
        y_stride: vectors,
        y_first: 0,
    };
    let g = b.norm("caption.norm", dit.caption_norm);
    let [count, x, y] = [batch, plan.features, scratch.x].map(Bind::Buffer);
    b.emit("caption.norm", params, op::norm::Bindings { batch: count, x, g, y });
    let rows = Rows { batch, x: scratch.x };
    b.linear("caption.embed", &dit.caption, rows, plan.caption)?;
    b.tap(plan.caption);
    let stream = Stream {
        batch,
        h: plan.caption,
        table: plan.caption_table,
    };
    blocks(
        b,
        config,
        &placed("context", &dit.context, None, config.hidden),
        stream,
        scratch,
    )?;
    b.program("caption", plan.caption);
    Ok(())
}

/// The time embedding, and from it the modulations of all blocks, each after the other in `mods`.
fn time(b: &mut Builder, (config, dit): (&DitConfig, &Dit), plan: &DitPlan, modulated: &[&Block]) -> Result<()> {
    let elements = config.time();
    let padded = elements.next_multiple_of(32);
    let inner = b.words("time.inner", padded)?;
    // The words of a batch of one token.
    let one = Fill::Values(vec![f32::from_bits(1)].into());
    let batch = b.filled("batch.one", op::batch_len(1), one)?;
    let batch = Batch1 { batch, elements };
    let ones = b.filled("ones", padded, Fill::Values(vec![1.0; padded].into()))?;
    let bias = |b: &mut Builder, label: &str, linear: &Linear| b.vector(label, &[(linear.bias, linear.rows)]);
    let first = bias(b, "time.1.bias", &dit.time[0]);
    b.matvec("time.1", (&dit.time[0], 0), plan.time, first, inner)?;
    batch.silu(b, ones, inner);
    let second = bias(b, "time.2.bias", &dit.time[1]);
    b.matvec("time.2", (&dit.time[1], 0), inner, second, plan.embedding)?;
    b.tap(plan.embedding);
    batch.silu(b, ones, plan.embedding);
    let linears = modulated.iter().filter_map(|block| block.modulation.as_ref());
    let linears: Vec<&Linear> = linears.chain([&dit.out_scale]).collect();
    let pieces: Vec<_> = linears.iter().map(|linear| (linear.bias, linear.rows)).collect();
    let biases = b.vector("mods.bias", &pieces);
    let mut row = 0;
    for (i, linear) in linears.iter().enumerate() {
        b.matvec(
            &format!("mods.{i:02}"),
            (linear, row),
            plan.embedding,
            biases,
            plan.mods,
        )?;
        row += linear.rows as u32;
    }
    b.program("time", plan.mods);
    Ok(())
}

/// A batch of one row of so many elements.
struct Batch1 {
    batch: BufferId,
    elements: usize,
}

impl Batch1 {
    /// `y = silu(y)`: the gated product with ones.
    fn silu(&self, b: &mut Builder, ones: BufferId, y: BufferId) {
        let params = op::glu::Params {
            vectors: vectors_of(self.elements),
            gelu: 0,
        };
        let [batch, up, y] = [self.batch, ones, y].map(Bind::Buffer);
        b.emit("time.silu", params, op::glu::Bindings { batch, up, y });
    }
}

impl Builder<'_> {
    /// `y = linear(x)` for one row, from an output on; `bias` has the biases of all outputs of `y`.
    fn matvec(
        &mut self,
        label: &str,
        (linear, first): (&Linear, u32),
        x: BufferId,
        bias: usize,
        y: BufferId,
    ) -> Result<()> {
        let matrix = self.matrix(label, &[linear.weight], Stacking::Rows)?;
        for (w, segment) in self.segments(matrix) {
            let params = op::matvec::Params {
                rows: segment.rows,
                groups: segment.groups,
                row0: segment.row0 + first,
                second_row: segment.second_row,
                third_row: segment.third_row,
                // No norm: the factor is 1 / sqrt(0 + 1).
                square_vectors: 0,
                inv_cols: 0.0,
                eps: 1.0,
                has_bias: 1,
                y_stride: 0,
            };
            let [x, y] = [x, y].map(Bind::Buffer);
            let bindings = op::matvec::Bindings {
                w,
                x,
                squares: x,
                list: x,
                bias: Bind::Vector(bias),
                y,
            };
            self.emit(label, params, bindings);
        }
        Ok(())
    }
}

fn velocity(b: &mut Builder, (config, dit): (&DitConfig, &Dit), plan: &DitPlan, scratch: &Scratch) -> Result<()> {
    let [caption, image, all] = plan.batches;
    let hidden = config.hidden;
    let h = b.rows("h", hidden, scratch.tokens)?;
    let rows = |x| Rows { batch: image, x };
    b.linear("image.embed", &dit.patches, rows(plan.patches), h)?;
    b.tap(h);
    let stream = |batch| Stream {
        batch,
        h,
        table: plan.table,
    };
    let noise = placed("noise", &dit.noise, Some(0), hidden);
    blocks(b, config, &noise, stream(image), scratch)?;
    let params = op::copy_rows::Params {
        vectors: vectors_of(hidden),
        first: plan.image_tokens as u32,
    };
    let [batch, x, y] = [caption, plan.caption, h].map(Bind::Buffer);
    b.emit("caption.copy", params, op::copy_rows::Bindings { batch, x, y });
    let layers = placed("layer", &dit.layers, Some(dit.noise.len() as u32), hidden);
    blocks(b, config, &layers, stream(all), scratch)?;
    let params = op::norm_mod::Params {
        vectors: vectors_of(hidden),
        cols: hidden as u32,
        eps: OUT_EPS,
        centred: 1,
        scale_at: ((dit.noise.len() + dit.layers.len()) * hidden) as u32,
    };
    let [batch, x, mods, y] = [image, h, scratch.mods, scratch.x].map(Bind::Buffer);
    let g = b.bias(None);
    b.emit("out.norm", params, op::norm_mod::Bindings { batch, x, g, mods, y });
    b.linear("out", &dit.out, rows(scratch.x), plan.velocity)?;
    b.program("velocity", plan.velocity);
    Ok(())
}
