//! Lowers a [`Model`] to a [`Plan`]: one walk over the layers lists weights and emits the steps of decode and prefill
//! side by side.

mod attention;
mod banks;
mod builder;
mod context;
mod delta_net;
mod draft;
mod ffn;
mod linear;
mod masking;
mod moe;
mod moe_steps;
mod options;
mod rotation;

pub use options::{ExpertOptions, LowerOptions};

use super::masks::{Invocation, Masking};
use super::plan::{Plan, ProgramKind, RunBuffers};
use crate::error::{Result, bail};
use crate::graph::{Fill, Graph, Measured, Program, Selection, Stacking, Step};
use crate::model::{FeedForward, Layer, Mixer, Model};
use crate::op::{BufferId, KV_PAGE, MAX_WIDTH, MatrixId, SlotState, VectorId, batch_len};
use crate::sampling;
use crate::source::{Mask, Tensors};
use builder::Builder;
use context::{DECODE, Ends, Half, LayerPath, Lowering, PREFILL, Phase, Scratch, Streams};
use std::sync::Arc;

/// Lowers the network, and selects no mask. `measured` keeps sizes of rows between lowerings of the same tensors.
///
/// Errors: `UnsupportedTensorType` for weights without kernels, `OutOfMemory` for a buffer that exceeds the largest
/// binding, `UnsupportedModel` for shapes that no kernel supports, `Usage` for a context for which the file has no
/// rotation.
pub fn lower(model: &Model, tensors: &dyn Tensors, options: &LowerOptions, measured: &Measured) -> Result<Plan> {
    check(model, options)?;
    let mut b = Builder {
        tensors,
        options,
        measured,
        buffers: Vec::new(),
        matrices: Vec::new(),
        vectors: Vec::new(),
        routed: Vec::new(),
        paged: Vec::new(),
    };
    let buffers = run_buffers(&mut b, model)?;
    let logits = b.rows("decode.logits", model.vocab, b.width())?;
    let (scratch, streams) = scratch(&mut b, model, buffers.batch)?;
    let moe = moe::scratch(&mut b, model)?;
    let ropes = ropes(&mut b, model)?;
    let rotation = rotation::buffers(&mut b, model)?;
    let zeros = b.vector("zeros.32", &[(None, 32)], 0.0);
    let mut lowering = Lowering {
        b,
        model,
        buffers,
        ropes,
        zeros,
        scratch,
        moe,
        rotation,
        masking: Masking::default(),
        steps: Default::default(),
        taps: Default::default(),
        conditions: Vec::new(),
    };
    let embed = lowering.b.matrix("embed", &[model.embed], Stacking::Rows)?;
    let head = lowering.linear("lm_head", &model.lm_head, None)?;
    let (streams, final_norm) = lowering.backbone(embed, streams)?;
    let ends = Ends {
        embed,
        head,
        logits,
        final_norm,
        streams,
    };
    let programs = lowering.programs(&ends)?;
    Ok(lowering.finish(programs))
}

fn check(model: &Model, options: &LowerOptions) -> Result<()> {
    if let Some(ends) = model.rope_ends.filter(|&ends| ends < options.ctx as usize) {
        bail!(
            Usage,
            "a context of {} positions: the file contains the model's rotation for contexts of up to {ends} only; \
             longer contexts need other factors for every position (LongRoPE)",
            options.ctx
        );
    }
    if options.drafts >= MAX_WIDTH {
        let most = MAX_WIDTH - 1;
        bail!(
            Usage,
            "{} drafts in one speculative step, expected at most {most}",
            options.drafts
        );
    }
    if options.drafts != 0 && model.has_experts() {
        // The experts of rejected drafts would be counted, and a paged bank has slots for the experts of one token
        // only.
        if options.experts.counted {
            bail!(Usage, "choices of experts cannot be counted with speculation");
        }
        if options.experts.slots.is_some() {
            bail!(Usage, "experts cannot be paged with speculation");
        }
    }
    Ok(())
}

/// The buffers that a run writes or reads.
fn run_buffers(b: &mut Builder, model: &Model) -> Result<RunBuffers> {
    // A decoding run may have more tokens than a small chunk.
    let tokens = (b.options.chunk as usize).max(b.width());
    let slot_pages = b.options.ctx.div_ceil(KV_PAGE);
    let has_head = model.mtp.is_some() && b.options.drafts != 0;
    Ok(RunBuffers {
        batch: b.words("batch", batch_len(tokens))?,
        slots: b.words("slots", size_of::<SlotState>() / 4)?,
        pages: b.buffer("pages", u64::from(slot_pages) * 4, Fill::Indices(slot_pages))?,
        settings: b.words("settings", sampling::SETTINGS_WORDS)?,
        seen: b.words("seen", model.vocab)?,
        draft_batch: has_head
            .then(|| b.words("draft.batch", batch_len(tokens)))
            .transpose()?,
    })
}

/// Buffers of activations for the tokens of a decoding run and of a chunk, large enough for every layer.
fn scratch(b: &mut Builder, model: &Model, batch: BufferId) -> Result<([Scratch; 2], Streams)> {
    // Elements of attention's partial results per block, of a token's projections, of the output projection's input,
    // and of a feed-forward network's activations.
    let mut widest = [0; 4];
    let (mut unfused, mut has_other) = (false, model.loop_norm);
    for layer in b.layers(model) {
        let ffn = match &layer.ffn {
            FeedForward::Dense(ffn) => Some(ffn),
            FeedForward::Moe(moe) => moe.shared.as_ref(),
        };
        let act = ffn.map_or(0, |ffn| ffn.down.cols);
        let sizes = match &layer.mixer {
            Mixer::Attention(attention) => [
                attention.heads * (4 + attention.head_dim),
                attention.projections.iter().map(|linear| linear.rows).sum(),
                attention.o.cols,
                act,
            ],
            Mixer::DeltaNet(net) => [0, delta_net::projected(net), net.o.cols, act],
        };
        widest = [0, 1, 2, 3].map(|i| sizes[i].max(widest[i]));
        unfused |= ffn.map_or(Ok(false), |ffn| b.is_unfused(ffn))?;
        has_other |= layer.attn_post_norm.is_some() || layer.ffn_post_norm.is_some();
    }
    let [partial, qkv, attn, act] = widest;
    let (width, chunk) = (b.width(), b.options.chunk as usize);
    let blocks = b.options.ctx.div_ceil(KV_PAGE) as usize;
    let squares = b.rows("decode.squares", model.hidden / 4, width)?;
    let partial = b.words("decode.partial", width * partial * blocks)?;
    let mut of_phase = |prefix: &str, tokens: usize| -> Result<([BufferId; 2], Scratch)> {
        let mut rows = |role: &str, elements: usize| b.rows(format!("{prefix}.{role}"), elements, tokens);
        let h = rows("h", model.hidden)?;
        let other = if has_other {
            rows("other", model.hidden)?
        } else {
            squares
        };
        let scratch = Scratch {
            batch,
            x: rows("x", model.hidden)?,
            qkv: rows("qkv", qkv)?,
            attn: rows("attn", attn)?,
            act: rows("act", act)?,
            up: if unfused { rows("up", act)? } else { squares },
            squares,
            partial,
        };
        Ok(([h, other], scratch))
    };
    let (decode_streams, decode) = of_phase("decode", width)?;
    let (prefill_streams, prefill) = of_phase("prefill", chunk)?;
    let [h, other] = [0, 1].map(|i| [decode_streams[i], prefill_streams[i]]);
    let normed = false;
    Ok(([decode, prefill], Streams { h, other, normed }))
}

/// The rotation tables.
fn ropes(b: &mut Builder, model: &Model) -> Result<Vec<BufferId>> {
    let mut ropes = Vec::new();
    for (i, rope) in model.ropes.iter().enumerate() {
        let bytes = rope.inv_freq.len() as u64 * 8 * u64::from(b.options.ctx);
        let fill = Fill::Rope {
            inv_freq: rope.inv_freq.clone(),
            factor: rope.factor,
            positions: b.options.ctx,
        };
        ropes.push(b.buffer(format!("rope.{i}"), bytes, fill)?);
    }
    Ok(ropes)
}

impl Lowering<'_> {
    /// Embedding and layers. Returns the streams after the last layer and the weight of the final norm.
    fn backbone(&mut self, embed: MatrixId, mut streams: Streams) -> Result<(Streams, VectorId)> {
        let model = self.model;
        for phase in Phase::BOTH {
            self.embed(phase, embed, streams.h[phase as usize])?;
        }
        let norm_of = |layer: Option<&Layer>| layer.map_or(model.final_norm, |layer| layer.attn_norm);
        let mut norm = self.attn_norm_weight(0, norm_of(model.layers.first()));
        self.pre_norm(streams.h[DECODE], norm);
        for pass in 0..model.loops {
            for (i, layer) in model.layers.iter().enumerate() {
                let path = LayerPath {
                    layer: i,
                    pass,
                    invocation: Some(pass * model.layers.len() + i),
                };
                let is_last = i + 1 == model.layers.len();
                let next = if is_last && pass + 1 < model.loops { 0 } else { i + 1 };
                let next_norm = self.attn_norm_weight(next, norm_of(model.layers.get(next)));
                streams = self.maskable_layer(path, layer, [norm, next_norm], streams)?;
                norm = next_norm;
            }
            if model.loop_norm && pass + 1 < model.loops {
                let between = self.attn_norm_weight(model.layers.len(), model.final_norm);
                streams = self.norm_swapped(&streams, between, &format!("pass.{pass}.norm"));
                self.pre_norm(streams.h[DECODE], norm);
            }
        }
        Ok((streams, norm))
    }

    /// One layer, and the steps that run instead if a mask leaves the layer out.
    fn maskable_layer(
        &mut self,
        path: LayerPath,
        layer: &Layer,
        norms: [VectorId; 2],
        streams: Streams,
    ) -> Result<Streams> {
        let off = self.layer_switch(path);
        let streams = self.under(off, false, |lowering| lowering.layer(path, layer, norms, streams))?;
        if off.is_some() {
            let label = format!("{path}.off");
            self.under(off, true, |lowering| lowering.prepare(&streams, norms[1], &label));
        }
        self.tap(&streams);
        Ok(streams)
    }

    /// One layer. `norms`: the one before it, and the one that follows.
    fn layer(
        &mut self,
        path: LayerPath,
        layer: &Layer,
        [norm, next_norm]: [VectorId; 2],
        streams: Streams,
    ) -> Result<Streams> {
        let ffn_norm = self.norm_weight(format!("layer.{:02}.ffn.norm", path.layer), layer.ffn_norm);
        let mixer = Half {
            path,
            norm,
            post_norm: layer.attn_post_norm,
            next_norm: ffn_norm,
            streams,
        };
        let ffn = Half {
            path,
            norm: ffn_norm,
            post_norm: layer.ffn_post_norm,
            next_norm,
            streams: match &layer.mixer {
                Mixer::Attention(attention) => self.attention(&mixer, attention)?,
                Mixer::DeltaNet(net) => self.delta_net(&mixer, net)?,
            },
        };
        match &layer.ffn {
            FeedForward::Dense(dense) => self.dense(&ffn, dense),
            FeedForward::Moe(moe) => self.mixture(&ffn, moe),
        }
    }

    /// The programs, in the order of [`ProgramKind::ALL`].
    fn programs(&mut self, ends: &Ends) -> Result<Vec<Program>> {
        let Ends { logits, streams, .. } = *ends;
        let [mut decode, mut prefill] = Phase::BOTH.map(|phase| self.take(phase));
        let [decode_taps, prefill_taps] = std::mem::take(&mut self.taps);

        // The head's steps are the same for a decoded token and for the last token of a prompt.
        self.head(ends, self.decode_norm(&streams))?;
        decode.extend(self.take(Phase::Decode));
        self.last_token(streams.h[PREFILL], streams.h[DECODE], self.buffers.batch);
        self.pre_norm(streams.h[DECODE], ends.final_norm);
        self.head(ends, self.stream_norm())?;
        let first_token = self.take(Phase::Decode);

        let program = |kind: ProgramKind, steps, taps, output| Program {
            name: kind.name(),
            steps,
            taps,
            output,
        };
        let mut with_logits = program(ProgramKind::PrefillLogits, Vec::new(), Vec::new(), None);
        if self.b.options.all_logits {
            let chunk = self.b.options.chunk as usize;
            let all = self.b.rows("prefill.logits", self.model.vocab, chunk)?;
            self.all_logits(ends, all)?;
            with_logits.steps = [prefill.clone(), self.take(Phase::Prefill)].concat();
            with_logits.taps = prefill_taps.clone();
            with_logits.output = Some(all);
        }
        let mut speculate = Vec::new();
        if self.b.options.drafts != 0 {
            if let Some(mtp) = &self.model.mtp {
                let [drafting, filling] = self.draft_head(mtp, ends)?;
                speculate = drafting;
                prefill.extend(filling);
            }
            // The network verifies all drafts in one run.
            let width = self.b.width() as u32;
            speculate.extend(decode.iter().map(|step| Step { width, ..step.clone() }));
        }
        Ok(vec![
            program(ProgramKind::Decode, decode, decode_taps, Some(logits)),
            program(ProgramKind::Prefill, prefill, prefill_taps, None),
            program(ProgramKind::Head, first_token, Vec::new(), Some(logits)),
            with_logits,
            program(ProgramKind::Speculate, speculate, Vec::new(), Some(logits)),
        ])
    }

    fn finish(self, programs: Vec<Program>) -> Plan {
        let Lowering {
            b,
            model,
            buffers,
            mut masking,
            ..
        } = self;
        let options = b.options;
        masking.invocations = invocations(model);
        let mixers = model.layers.iter().map(|layer| &layer.mixer);
        let recurs = mixers.into_iter().any(|mixer| matches!(mixer, Mixer::DeltaNet(_)));
        let kept_states = recurs.then_some(b.kept_states());
        let graph = Graph {
            buffers: b.buffers,
            matrices: b.matrices,
            vectors: b.vectors,
            programs,
            readback: buffers.slots,
            kv: options.kv,
            width: options.drafts + 1,
            routed: b.routed,
            paged: b.paged,
        };
        let has_masks = !model.masks.masks.iter().all(Mask::is_open);
        let selection = match has_masks {
            true => masking.selection(None, &graph),
            false => Selection::default(),
        };
        Plan {
            graph: Arc::new(graph),
            selection: Arc::new(selection),
            masking: has_masks.then(|| Arc::new(masking)),
            buffers,
            ctx: options.ctx,
            chunk: options.chunk,
            drafts: options.drafts,
            vocab: model.vocab as u32,
            hidden: model.hidden as u32,
            kept_states,
        }
    }
}

/// The layer invocations, and the numbers of units that masks can leave out there.
fn invocations(model: &Model) -> Vec<Invocation> {
    let invocation = |(layer, of): (usize, &Layer)| {
        let (neurons, experts) = match &of.ffn {
            FeedForward::Dense(ffn) => (Some(ffn.down.cols), None),
            FeedForward::Moe(moe) => (None, Some(moe.experts.len())),
        };
        let heads = match &of.mixer {
            Mixer::Attention(attention) => Some(attention.heads),
            Mixer::DeltaNet(_) => None,
        };
        let units = [neurons, heads, experts];
        Invocation { layer, units }
    };
    let layers = model.layers.iter().enumerate();
    layers.map(invocation).collect::<Vec<_>>().repeat(model.loops)
}
