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
mod moe_unfused;
mod options;

pub use options::{ExpertOptions, LowerOptions};

use super::masks::Invocation;
use super::plan::{Plan, ProgramKind, RunBuffers};
use crate::error::{Result, bail};
use crate::graph::{Fill, Graph, Measured, Piece, Program, Selection, Stacking, Step};
use crate::model::{FeedForward, Layer, Mixer, Model};
use crate::op::{BufferId, KV_PAGE, MAX_WIDTH, MatrixId, SlotState, VectorId, batch_len};
use crate::sampling;
use crate::source::{Mask, Tensors};
use builder::Builder;
use context::{DECODE, LayerPath, Lowering, PREFILL, Phase, Product, Scratch, Stream, Streams};
use std::sync::Arc;

/// Lowers the network, and selects no mask. `measured` keeps sizes of rows between lowerings of the same tensors.
///
/// Errors: `UnsupportedTensorType` for weights without kernels, `OutOfMemory` for a buffer that exceeds the largest
/// binding, `UnsupportedModel` for shapes that no kernel supports, `Usage` for a context for which the file has no
/// rotation.
pub fn lower(model: &Model, tensors: &dyn Tensors, options: &LowerOptions, measured: &Measured) -> Result<Plan> {
    check(model, options)?;
    let mut b = Builder::new(tensors, options, measured);
    let buffers = run_buffers(&mut b, model)?;
    let logits = b.rows("decode.logits", model.vocab, b.width())?;
    let (scratch, streams) = scratch(&mut b, model, buffers.batch)?;
    let moe = moe::scratch(&mut b, model)?;
    let ropes = ropes(&mut b, model)?;
    let zeros = vec![Piece { tensor: None, len: 32 }];
    let zeros = b.vector("zeros.32".into(), zeros, 0.0);
    let mut lowering = Lowering::new(b, model, buffers, ropes, zeros, scratch);
    lowering.moe = moe;

    let embed = lowering.b.matrix("embed", &[model.embed], Stacking::Rows)?;
    let head = lowering.head_product(embed)?;
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
        draft_batch: match has_head {
            true => Some(b.words("draft.batch", batch_len(tokens))?),
            false => None,
        },
    })
}

/// Buffers of activations for the tokens of a decoding run and of a chunk, large enough for every layer.
fn scratch(b: &mut Builder, model: &Model, batch: BufferId) -> Result<([Scratch; 2], Streams)> {
    let drafting = model.mtp.iter().filter(|_| b.options.drafts != 0);
    let layers: Vec<&Layer> = model
        .layers
        .iter()
        .chain(drafting.flat_map(|mtp| &mtp.layers))
        .collect();
    let widest = |f: &dyn Fn(&Layer) -> usize| layers.iter().map(|layer| f(layer)).max().unwrap_or(0);
    // Elements of attention's partial results per block, of a token's projections, and of the output projection's
    // input.
    let mixer = |layer: &Layer| match &layer.mixer {
        Mixer::Attention(attention) => [
            attention.heads * (4 + attention.head_dim),
            attention.projections.iter().map(|linear| linear.rows).sum(),
            attention.o.cols,
        ],
        Mixer::DeltaNet(net) => [0, delta_net::projected(net), net.o.cols],
    };
    let [partial, qkv, attn] = [0, 1, 2].map(|i| widest(&|layer| mixer(layer)[i]));
    let act = widest(&|layer| match &layer.ffn {
        FeedForward::Dense(ffn) => ffn.down.cols,
        FeedForward::Moe(moe) => moe.shared.as_ref().map_or(0, |ffn| ffn.down.cols),
    });
    let post_norms = layers
        .iter()
        .any(|layer| layer.attn_post_norm.is_some() || layer.ffn_post_norm.is_some());
    let mut unfused = false;
    for layer in &layers {
        unfused |= b.gate_up_unfused(layer)?;
    }
    let (width, chunk) = (b.width(), b.options.chunk as usize);
    let blocks = b.options.ctx.div_ceil(KV_PAGE) as usize;
    let squares = b.rows("decode.squares", model.hidden / 4, width)?;
    let partial = b.words("decode.partial", width * partial * blocks)?;
    let mut of_phase = |prefix: &str, tokens: usize| -> Result<(Scratch, Stream)> {
        let mut rows = |role: &str, elements: usize| b.rows(format!("{prefix}.{role}"), elements, tokens);
        let stream = Stream {
            h: rows("h", model.hidden)?,
            other: if post_norms || model.loop_norm {
                rows("other", model.hidden)?
            } else {
                squares
            },
            normed: false,
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
        Ok((scratch, stream))
    };
    let (decode, decode_stream) = of_phase("decode", width)?;
    let (prefill, prefill_stream) = of_phase("prefill", chunk)?;
    Ok(([decode, prefill], [decode_stream, prefill_stream]))
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

/// Weights and buffers before and after the layers, which all programs use.
struct Ends {
    embed: MatrixId,
    head: Product,
    logits: BufferId,
    final_norm: VectorId,
    /// The streams after the last layer.
    streams: Streams,
}

impl Lowering<'_> {
    /// The weight that makes logits.
    fn head_product(&mut self, embed: MatrixId) -> Result<Product> {
        let lm_head = &self.model.lm_head;
        let matrix = match lm_head.weight == self.model.embed {
            true => embed,
            false => self.b.matrix("lm_head", &[lm_head.weight], Stacking::Rows)?,
        };
        let bias = self.b.biases("lm_head.bias".into(), &[lm_head]);
        Ok(Product { matrix, bias, row0: 0 })
    }

    /// Embedding and layers. Returns the streams after the last layer and the weight of the final norm.
    fn backbone(&mut self, embed: MatrixId, mut streams: Streams) -> Result<(Streams, VectorId)> {
        let model = self.model;
        for phase in Phase::BOTH {
            self.embed(phase, embed, streams[phase as usize].h);
        }
        let norm_of = |layer: Option<&Layer>| layer.map_or(model.final_norm, |layer| layer.attn_norm);
        let mut norm = self.attn_norm_weight(0, norm_of(model.layers.first()));
        self.pre_norm(streams[DECODE].h, norm);
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
                streams = self.layer(path, layer, [norm, next_norm], streams)?;
                norm = next_norm;
            }
            if model.loop_norm && pass + 1 < model.loops {
                let between = self.attn_norm_weight(model.layers.len(), model.final_norm);
                streams = self.between_passes(&streams, between, norm, pass);
            }
        }
        Ok((streams, norm))
    }

    /// One layer, and the steps that run instead if a mask leaves the layer out.
    fn layer(
        &mut self,
        path: LayerPath,
        layer: &Layer,
        [norm, next_norm]: [VectorId; 2],
        streams: Streams,
    ) -> Result<Streams> {
        let ffn_norm = self.norm_weight(format!("layer.{:02}.ffn.norm", path.layer), layer.ffn_norm);
        let off = self.layer_switch(path);
        let streams = self.under(off, false, |lowering| {
            let norms = [norm, ffn_norm];
            let streams = match &layer.mixer {
                Mixer::Attention(attention) => lowering.attention(path, layer, attention, norms, streams)?,
                Mixer::DeltaNet(net) => lowering.delta_net(path, layer, net, norms, streams)?,
            };
            lowering.ffn(path, layer, [ffn_norm, next_norm], streams)
        })?;
        if off.is_some() {
            self.under(off, true, |lowering| {
                lowering.prepare(&streams, next_norm, &format!("{path}.off"));
                Ok(())
            })?;
        }
        self.tap(&streams);
        Ok(streams)
    }

    /// The programs, in the order of [`ProgramKind::ALL`].
    fn programs(&mut self, ends: &Ends) -> Result<Vec<Program>> {
        let Ends {
            head,
            logits,
            final_norm,
            streams,
            ..
        } = *ends;
        let mut decode = self.take(Phase::Decode);
        let mut prefill = self.take(Phase::Prefill);
        let taps = Phase::BOTH.map(|phase| self.take_taps(phase));

        // The head's steps are the same for a decoded token and for the last token of a prompt.
        let norm = self.decode_norm(&streams);
        self.head(head, norm, logits);
        decode.extend(self.take(Phase::Decode));
        self.last_token(streams[PREFILL].h, streams[DECODE].h, self.buffers.batch);
        self.pre_norm(streams[DECODE].h, final_norm);
        let norm = self.decode_norm(&streams.map(|stream| stream.with_normed(false)));
        self.head(head, norm, logits);
        let first_token = self.take(Phase::Decode);

        let mut with_logits = Program::default();
        if self.b.options.all_logits {
            let all = self
                .b
                .rows("prefill.logits", self.model.vocab, self.b.options.chunk as usize)?;
            self.all_logits(head, &streams, final_norm, all);
            with_logits.steps = [prefill.clone(), self.take(Phase::Prefill)].concat();
            with_logits.taps = taps[PREFILL].clone();
            with_logits.output = Some(all);
        }
        let speculate = self.speculate(ends, &decode, &mut prefill)?;
        let program = |kind: ProgramKind, steps, taps, output| Program {
            name: kind.name(),
            steps,
            taps,
            output,
        };
        let [decode_taps, prefill_taps] = taps;
        Ok(vec![
            program(ProgramKind::Decode, decode, decode_taps, Some(logits)),
            program(ProgramKind::Prefill, prefill, prefill_taps, None),
            program(ProgramKind::Head, first_token, Vec::new(), Some(logits)),
            Program {
                name: ProgramKind::PrefillLogits.name(),
                ..with_logits
            },
            program(ProgramKind::Speculate, speculate, Vec::new(), Some(logits)),
        ])
    }

    /// The program of a speculative step: the draft head, if there is one, then the network for all drafts. Also adds
    /// the steps that fill the draft head's cache to `prefill`.
    fn speculate(&mut self, ends: &Ends, decode: &[Step], prefill: &mut Vec<Step>) -> Result<Vec<Step>> {
        let (drafts, model) = (self.b.options.drafts, self.model);
        if drafts == 0 {
            return Ok(Vec::new());
        }
        let width = self.b.width() as u32;
        let verify = decode.iter().map(|step| Step { width, ..step.clone() });
        let Some(mtp) = &model.mtp else {
            return Ok(verify.collect());
        };
        let shared = draft::Shared {
            embed: ends.embed,
            lm_head: ends.head,
            logits: ends.logits,
            final_norm: ends.final_norm,
            streams: ends.streams,
        };
        let head = self.draft_head(mtp, &shared, drafts)?;
        prefill.extend(head.prefill);
        Ok(head.speculate.into_iter().chain(verify).collect())
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
        let tables: Vec<BufferId> = graph.paged.iter().flat_map(|paged| paged.tables.clone()).collect();
        let has_masks = !model.masks.masks.iter().all(Mask::is_open);
        let selection = match has_masks {
            true => masking.selection(None, &tables),
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
    let invocation = |(layer, of): (usize, &Layer)| Invocation {
        layer,
        neurons: match &of.ffn {
            FeedForward::Dense(ffn) => Some(ffn.down.cols),
            FeedForward::Moe(_) => None,
        },
        heads: match &of.mixer {
            Mixer::Attention(attention) => Some(attention.heads),
            Mixer::DeltaNet(_) => None,
        },
        experts: match &of.ffn {
            FeedForward::Dense(_) => None,
            FeedForward::Moe(moe) => Some(moe.experts.len()),
        },
    };
    (0..model.loops)
        .flat_map(|_| model.layers.iter().enumerate().map(invocation))
        .collect()
}
