//! From a [`Model`] to a [`Plan`]: buffers and weights are listed, then one walk over the layers writes the programs.

use super::delta_net::projected;
use super::draft::Network;
use super::masking::{Visit, When};
use super::place::Place;
use super::walk::{Mode, Scratch, Walk};
use super::{
    ATTENTION_BLOCK, Buffer, BufferId, Fill, Fixed, HeadBuffers, Matrix, MatrixId, Piece, Plan, Program, Stacking,
};
use super::{Measured, Paged, Routed, Vector, VectorId, bank, moe, weights};
use crate::container::{Mask, TensorId, Tensors};
use crate::dtype::planes::Planes;
use crate::error::{Result, bail};
use crate::kernel::{Kv, MAX_COLUMNS};
use crate::model::{FeedForward, Layer, Linear, Mixer, Model};
use crate::sampling;
use std::sync::Arc;

/// What the device and the caller decide about a plan.
#[derive(Clone, Copy, Debug)]
pub struct PlanOptions {
    /// Positions of the context.
    pub ctx: u32,
    /// Columns of a prefill chunk, a multiple of 8.
    pub chunk: u32,
    /// Type of the caches.
    pub kv: Kv,
    /// Largest storage binding, in bytes; larger weights are cut into segments.
    pub max_binding: u64,
    /// Whether to plan the program that makes the logits of every prompt column.
    pub all_logits: bool,
    /// Most drafts of a speculative round, at most 7; 0 = no speculation. The model's draft head makes them, where it has one,
    /// else the session's caller. Recurrent layers keep one state more than that.
    pub drafts: u32,
    /// What is done about mixtures of experts.
    pub experts: ExpertOptions,
}

/// What a plan does about mixtures of experts besides running them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertOptions {
    /// Whether it counts how often each expert is chosen: see [`Plan::routed`].
    pub counted: bool,
    /// Most experts of each bank that are on the device at a time, at least as many as a token takes; `None` = all. See
    /// [`Plan::paged`].
    pub slots: Option<usize>,
}

/// Lowers the network. Errors: `UnsupportedTensorType` for weights without kernels, `OutOfMemory` when a buffer exceeds the
/// largest binding, `UnsupportedModel` for shapes no kernel serves, `Usage` for a context that the file has no rotation for.
pub fn plan(model: &Model, tensors: &dyn Tensors, options: &PlanOptions) -> Result<Plan> {
    plan_with(model, tensors, options, &Measured::default())
}

/// The same, with what earlier plans of these tensors measured.
pub fn plan_with(model: &Model, tensors: &dyn Tensors, options: &PlanOptions, measured: &Measured) -> Result<Plan> {
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
    if let Some(ends) = model.rope_ends.filter(|&ends| ends < options.ctx as usize) {
        bail!(
            Usage,
            "a context of {} positions, but the file has the model's rotation for contexts of up to {ends} only; longer ones \
             need other factors for every position (LongRoPE), which such files do not hold",
            options.ctx
        );
    }
    let chunk = options.chunk as usize;
    if options.drafts >= MAX_COLUMNS {
        bail!(
            Usage,
            "{} drafts a round, wanted at most {}",
            options.drafts,
            MAX_COLUMNS - 1
        );
    }
    if options.drafts != 0 && model.has_experts() {
        // Drafts that do not stand would be counted; and a bank is ready for the experts of one token at a time.
        if options.experts.counted {
            bail!(Usage, "choices of experts are counted without drafts only");
        }
        if options.experts.slots.is_some() {
            bail!(Usage, "experts are paged without drafts only");
        }
    }
    let columns = b.columns_decoded();
    let mut fixed = Fixed {
        ctl: b.words("ctl", 64)?,
        settings: b.words("settings", sampling::SETTINGS_WORDS)?,
        tokens: b.words("tokens", chunk)?,
        seen: b.words("seen", model.vocab)?,
        head: None,
    };
    let head = model.mtp.as_ref().filter(|_| options.drafts != 0);
    if head.is_some() {
        fixed.head = Some(HeadBuffers {
            ctl: b.words("draft.ctl", 64)?,
            next_tokens: b.words("draft.tokens", chunk)?,
        });
    }
    let logits = b.columns("decode.logits", model.vocab, columns as usize)?;
    let [decode, prefill] = b.scratch(model, fixed.ctl, columns as usize)?;
    let moe_scratch = moe::scratch(&mut b, model)?;
    let mut ropes = Vec::new();
    for (i, rope) in model.ropes.iter().enumerate() {
        let bytes = rope.inv_freq.len() as u64 * 8 * u64::from(options.ctx);
        let fill = Fill::Rope {
            inv_freq: rope.inv_freq.clone(),
            factor: rope.factor,
            positions: options.ctx,
        };
        ropes.push(b.buffer(format!("rope.{i}"), bytes, fill)?);
    }
    let embed = b.matrix("embed".into(), &[model.embed], Stacking::Rows)?;
    let lm_head = if model.lm_head.weight == model.embed {
        embed
    } else {
        b.matrix("lm_head".into(), &[model.lm_head.weight], Stacking::Rows)?
    };
    let lm_bias = b.biases("lm_head.bias".into(), &[&model.lm_head])?;
    let none = b.vector("none".into(), vec![Piece { tensor: None, len: 32 }], 0.0);

    let mut walk = Walk::new(b, model, fixed, ropes, none, [decode, prefill]);
    walk.moe = moe_scratch;
    walk.embed(Mode::Decode, embed, fixed.ctl);
    walk.embed(Mode::Prefill, embed, fixed.tokens);
    let norm_of = |layer: Option<&Layer>| layer.map_or(model.final_norm, |layer| layer.attn_norm);
    let mut norm = walk.norm_vector(0, norm_of(model.layers.first()));
    walk.prep(decode.h, norm);
    for pass in 0..model.loops {
        for (i, layer) in model.layers.iter().enumerate() {
            let place = Place {
                layer: i,
                pass,
                visit: Some(pass * model.layers.len() + i),
            };
            let next = match i + 1 < model.layers.len() || pass + 1 == model.loops {
                true => i + 1,
                false => 0,
            };
            let next_norm = walk.norm_vector(next, norm_of(model.layers.get(next)));
            walk.layer(place, layer, [norm, next_norm])?;
            norm = next_norm;
        }
        if model.loop_norm && pass + 1 < model.loops {
            let between = walk.norm_vector(model.layers.len(), model.final_norm);
            walk.between_passes(between, norm, pass);
        }
    }

    let trunk = walk.take(Mode::Decode);
    let decode_normed = walk.decode_normed;
    // What follows the trunk is the same for a decoded token and for the last token of a prompt.
    let streams = [walk.decode.h, walk.prefill.h];
    walk.last_column(streams[1], streams[0], fixed.ctl);
    walk.prep(streams[0], norm);
    walk.head(lm_head, lm_bias, logits);
    let head_program = Program {
        logits: Some(logits),
        ..walk.take(Mode::Decode)
    };
    walk.decode_normed = decode_normed;
    walk.put(Mode::Decode, trunk);
    walk.head(lm_head, lm_bias, logits);
    let decode_program = Program {
        logits: Some(logits),
        ..walk.take(Mode::Decode)
    };
    let prefill_program = walk.take(Mode::Prefill);
    let mut with_logits = Program::default();
    if options.all_logits {
        let all = walk.b.columns("prefill.logits", model.vocab, chunk)?;
        walk.put(Mode::Prefill, prefill_program.clone());
        walk.all_logits(lm_head, lm_bias, norm, all);
        with_logits = walk.take(Mode::Prefill);
        with_logits.logits = Some(all);
    }
    let mut rounds = [Program::default(), Program::default()];
    let mut prefills = [prefill_program, Program::default()];
    if options.drafts != 0 {
        let judge = decode_program.widened(columns);
        rounds[0] = judge.clone();
        if let Some(mtp) = head {
            let network = Network {
                embed,
                lm_head,
                lm_bias,
                logits,
                final_norm: norm,
            };
            let head = walk.draft_head(mtp, &network, options.drafts, columns)?;
            (rounds, prefills) = head.programs(&judge, &prefills[0]);
        }
    }
    let [round, other_round] = rounds;
    let [prefill_program, other_prefill] = prefills;
    let Walk { b, mut masking, .. } = walk;
    let recurs = model
        .layers
        .iter()
        .any(|layer| matches!(layer.mixer, Mixer::DeltaNet(_)));
    let kept_states = b.kept_states();
    let plan = Plan {
        buffers: b.buffers,
        matrices: b.matrices,
        vectors: b.vectors,
        programs: [
            decode_program,
            prefill_program,
            head_program,
            with_logits,
            round,
            other_prefill,
            other_round,
        ],
        drafts: options.drafts,
        fixed,
        ctx: options.ctx,
        chunk: options.chunk,
        kv: options.kv,
        vocab: model.vocab as u32,
        hidden: model.hidden as u32,
        kept_states: recurs.then_some(kept_states),
        masking: None,
        lists: Vec::new(),
        routed: b.routed,
        paged: b.paged,
    };
    if model.masks.masks.iter().all(Mask::is_open) {
        return Ok(plan);
    }
    masking.programs = plan.programs.clone();
    masking.visits = visits(model);
    let plan = Plan {
        masking: Some(Arc::new(masking)),
        ..plan
    };
    plan.with_mask(None)
}

/// What masks can restrict, by visit.
fn visits(model: &Model) -> Vec<Visit> {
    let visit = |(layer, of): (usize, &Layer)| Visit {
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
        .flat_map(|_| model.layers.iter().enumerate().map(visit))
        .collect()
}

impl Walk<'_> {
    /// One layer, and what stands for it where a mask turns it off.
    fn layer(&mut self, place: Place, layer: &Layer, [norm, next_norm]: [VectorId; 2]) -> Result<()> {
        let from = [Mode::Decode, Mode::Prefill].map(|mode| self.at(mode));
        let ffn_norm = self.vector(format!("layer.{:02}.ffn.norm", place.layer), layer.ffn_norm);
        match &layer.mixer {
            Mixer::Attention(attention) => self.attention(place, layer, attention, [norm, ffn_norm])?,
            Mixer::DeltaNet(net) => self.delta_net(place, layer, net, [norm, ffn_norm])?,
        }
        self.ffn(place, layer, ffn_norm, next_norm)?;
        if self.may_be_off(place) {
            for mode in [Mode::Decode, Mode::Prefill] {
                self.only(mode, from[mode as usize], When::Layer(place.layer));
                let bypass = self.at(mode);
                self.ready(mode, next_norm, &format!("{place}.off"));
                self.only(mode, bypass, When::Bypass(place.layer));
            }
        }
        self.end_layer();
        Ok(())
    }
}

/// The lists of a plan while it is made.
pub(super) struct Builder<'a> {
    pub(super) tensors: &'a dyn Tensors,
    pub(super) options: &'a PlanOptions,
    pub(super) measured: &'a Measured,
    buffers: Vec<Buffer>,
    pub(super) matrices: Vec<Matrix>,
    vectors: Vec<Vector>,
    pub(super) routed: Vec<Routed>,
    pub(super) paged: Vec<Paged>,
}

impl Builder<'_> {
    /// Activations for `columns` decoded side by side and for a chunk, as wide as the widest layer needs.
    fn scratch(&mut self, model: &Model, ctl: BufferId, columns: usize) -> Result<[Scratch; 2]> {
        let drafting = model.mtp.iter().filter(|_| self.options.drafts != 0);
        let layers: Vec<&Layer> = model
            .layers
            .iter()
            .chain(drafting.flat_map(|mtp| &mtp.layers))
            .collect();
        let widest = |f: &dyn Fn(&Layer) -> usize| layers.iter().map(|layer| f(layer)).max().unwrap_or(0);
        // Heads of attention, elements of a column of projections, and of what the output projection reads.
        let mixer = |layer: &Layer| match &layer.mixer {
            Mixer::Attention(attention) => [
                attention.heads,
                attention.projections.iter().map(|linear| linear.rows).sum(),
                attention.o.cols,
            ],
            Mixer::DeltaNet(net) => [0, projected(net), net.o.cols],
        };
        let [heads, qkv, attn] = [0, 1, 2].map(|i| widest(&|layer| mixer(layer)[i]));
        let act = widest(&|layer| match &layer.ffn {
            FeedForward::Dense(ffn) => ffn.down.cols,
            FeedForward::Moe(moe) => moe.shared.as_ref().map_or(0, |ffn| ffn.down.cols),
        });
        let post_norms = layers
            .iter()
            .any(|layer| layer.attn_post_norm.is_some() || layer.ffn_post_norm.is_some());
        let mut apart = false;
        for layer in &layers {
            apart |= self.gate_up_apart(layer)?;
        }
        let blocks = self.options.ctx.div_ceil(ATTENTION_BLOCK) as usize;
        let squares = self.columns("decode.squares", model.hidden / 4, columns)?;
        let part = self.floats("decode.part", columns * heads * blocks * (4 + model.head_dim))?;
        let chunk = self.options.chunk as usize;
        let mut scratch = |prefix: &str, columns: usize| -> Result<Scratch> {
            let mut buffer = |role: &str, elements: usize| self.columns(&format!("{prefix}.{role}"), elements, columns);
            Ok(Scratch {
                ctl,
                h: buffer("h", model.hidden)?,
                x: buffer("x", model.hidden)?,
                y: if post_norms || model.loop_norm {
                    buffer("y", model.hidden)?
                } else {
                    squares
                },
                qkv: buffer("qkv", qkv)?,
                attn: buffer("attn", attn)?,
                act: buffer("act", act)?,
                up: if apart { buffer("up", act)? } else { squares },
                squares,
                part,
            })
        };
        Ok([scratch("decode", columns)?, scratch("prefill", chunk)?])
    }

    /// Whether the gate and up projections of a layer, of a mixture those of its shared expert, have different device layouts,
    /// so that no kernel does both.
    pub(super) fn gate_up_apart(&self, layer: &Layer) -> Result<bool> {
        let ffn = match &layer.ffn {
            FeedForward::Dense(ffn) => Some(ffn),
            FeedForward::Moe(moe) => moe.shared.as_ref(),
        };
        let Some(ffn) = ffn else { return Ok(false) };
        let [gate, up] = bank::gate_up_planes(self, ffn)?;
        Ok(gate != up)
    }

    /// Columns of a decoding run: those of a round, up to a width of the kernels, for a run for one draft more than that costs
    /// the next width.
    pub(super) fn columns_decoded(&self) -> u32 {
        (self.options.drafts + 1).next_power_of_two()
    }

    /// States of a recurrent layer that are kept.
    pub(super) fn kept_states(&self) -> u32 {
        self.options.drafts.saturating_add(1)
    }

    pub(super) fn buffer(&mut self, label: String, bytes: u64, fill: Fill) -> Result<BufferId> {
        // Something can be bound where a network has no use for it.
        let bytes = bytes.max(1).next_multiple_of(128);
        if bytes > self.options.max_binding {
            let limit = self.options.max_binding;
            bail!(
                OutOfMemory,
                "buffer {label} needs {bytes} bytes, the device binds {limit} at once; a smaller --ctx would help"
            );
        }
        self.buffers.push(Buffer { label, bytes, fill });
        Ok(self.buffers.len() - 1)
    }

    fn floats(&mut self, label: impl Into<String>, count: usize) -> Result<BufferId> {
        self.buffer(label.into(), count as u64 * 4, Fill::Zero)
    }

    pub(super) fn words(&mut self, label: &str, count: usize) -> Result<BufferId> {
        self.floats(label, count)
    }

    /// Columns of activations, each padded to whole units.
    pub(super) fn columns(&mut self, label: &str, elements: usize, columns: usize) -> Result<BufferId> {
        self.floats(label, elements.next_multiple_of(32) * columns)
    }

    /// A vector; the one there is, where a layer is applied again.
    pub(super) fn vector(&mut self, label: String, pieces: Vec<Piece>, add: f32) -> VectorId {
        let mut known = self.vectors.iter();
        if let Some(known) = known.position(|vector| vector.pieces == pieces && vector.add == add) {
            return known;
        }
        self.vectors.push(Vector { label, pieces, add });
        self.vectors.len() - 1
    }

    /// The stacked biases of sibling maps, or `None` if no sibling has one.
    pub(super) fn biases(&mut self, label: String, siblings: &[&Linear]) -> Result<Option<VectorId>> {
        if siblings.iter().all(|linear| linear.bias.is_none()) {
            return Ok(None);
        }
        let piece = |linear: &&Linear| Piece {
            tensor: linear.bias,
            len: linear.rows,
        };
        let pieces = siblings.iter().map(piece).collect();
        Ok(Some(self.vector(label, pieces, 0.0)))
    }

    pub(super) fn planes(&self, tensor: TensorId) -> Result<Planes> {
        weights::planes(self.tensors, tensor)
    }

    pub(super) fn matrix(&mut self, label: String, parts: &[TensorId], stacking: Stacking) -> Result<MatrixId> {
        let matrix = Matrix::stack(label, parts, stacking, self.tensors, self.options.max_binding)?;
        Ok(self.add_matrix(matrix))
    }

    /// Takes a weight in; the one there is, where a layer is applied again.
    pub(super) fn add_matrix(&mut self, matrix: Matrix) -> MatrixId {
        let mut known = self.matrices.iter();
        if let Some(known) = known.position(|known| known.is_same(&matrix)) {
            return known;
        }
        self.matrices.push(matrix);
        self.matrices.len() - 1
    }
}
