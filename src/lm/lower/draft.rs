//! The draft head (multi-token prediction) as steps, and speculative steps made of drafting and verifying.
//!
//! With h[p] the network's hidden state at position p and t[p] the token there, the head computes
//! `y[p] = block(eh_proj · [enorm(embed(t[p + 1])); hnorm(h[p])])`, with keys and values of its own, and drafts t[p + 2]
//! from `lm_head · norm(y[p])`. For further drafts y replaces h. A speculative step begins with the positions that were
//! decoded since the last one, with the network's h. Cache entries of rejected drafts are at later positions and are
//! overwritten.

use super::context::{
    DECODE, DecodeNorm, LayerPath, Lowering, PREFILL, Phase, Product, Scratch, Stream, Streams, vectors_of,
};
use crate::error::{Result, bail};
use crate::graph::{Stacking, Step};
use crate::model::{HeadInput, Mixer, Mtp};
use crate::op::{self, Bind, BufferId, MatrixId, Op, VectorId};

/// Weights and buffers of the network that the head uses.
pub(super) struct Shared {
    pub embed: MatrixId,
    pub lm_head: Product,
    pub logits: BufferId,
    pub final_norm: VectorId,
    /// The network's streams after its last layer.
    pub streams: Streams,
}

/// The head's steps.
pub(super) struct DraftHead {
    /// The steps that draft, before the network verifies the drafts.
    pub speculate: Vec<Step>,
    /// The steps that fill the head's cache, after a prefill of the network.
    pub prefill: Vec<Step>,
}

/// Buffers and weights of the head alone.
#[derive(Clone, Copy)]
struct Head {
    /// `[embedding; hidden state]`, in both phases.
    pair: [BufferId; 2],
    /// The head's own stream, in both phases.
    own: Streams,
    /// The stream of the token that the first draft follows.
    last: BufferId,
    enorm: VectorId,
    hnorm: VectorId,
    norm: VectorId,
    eh_proj: Product,
    input: HeadInput,
}

/// The hidden states that the head reads.
enum Input {
    /// Those of the network, in one phase.
    Network(Phase),
    /// Those of the head.
    Head(BufferId),
}

impl Lowering<'_> {
    /// Lowers the head for up to `depth` drafts in one step. Errors: those of the builder, and `UnsupportedModel` for
    /// hidden sizes that are not whole groups of 32.
    pub fn draft_head(&mut self, mtp: &Mtp, shared: &Shared, depth: u32) -> Result<DraftHead> {
        let Some(batch) = self.buffers.draft_batch else {
            bail!(Internal, "no batch for the draft head");
        };
        let head = self.head_buffers(mtp, shared)?;
        let network = self.scratch;
        self.scratch = network.map(|scratch| Scratch { batch, ..scratch });
        let result = self.draft_steps(mtp, shared, &head, depth, batch);
        self.scratch = network;
        result
    }

    fn head_buffers(&mut self, mtp: &Mtp, shared: &Shared) -> Result<Head> {
        let hidden = self.model.hidden;
        if !hidden.is_multiple_of(32) {
            bail!(
                UnsupportedModel,
                "a draft head with hidden size {hidden}, expected a multiple of 32; the model runs without speculation"
            );
        }
        let tokens = [self.b.width(), self.b.options.chunk as usize];
        let others = shared.streams.map(|stream| stream.other);
        let stream = |h: BufferId, other: BufferId| Stream {
            h,
            other,
            normed: false,
        };
        let matrix = self.b.matrix("draft.eh_proj", &[mtp.eh_proj.weight], Stacking::Rows)?;
        Ok(Head {
            pair: [
                self.b.rows("draft.pair", 2 * hidden, tokens[DECODE])?,
                self.b.rows("draft.prefill.pair", 2 * hidden, tokens[PREFILL])?,
            ],
            last: self.b.rows("draft.last", hidden, 1)?,
            enorm: self.norm_weight("draft.enorm".into(), mtp.enorm),
            hnorm: self.norm_weight("draft.hnorm".into(), mtp.hnorm),
            norm: self.norm_weight("draft.norm".into(), mtp.norm),
            eh_proj: Product::plain(matrix),
            own: [
                stream(self.b.rows("draft.h", hidden, tokens[DECODE])?, others[DECODE]),
                stream(
                    self.b.rows("draft.prefill.h", hidden, tokens[PREFILL])?,
                    others[PREFILL],
                ),
            ],
            input: mtp.input.unwrap_or(self.b.options.draft_input),
        })
    }

    fn draft_steps(
        &mut self,
        mtp: &Mtp,
        shared: &Shared,
        head: &Head,
        depth: u32,
        batch: BufferId,
    ) -> Result<DraftHead> {
        let width = self.b.width() as u32;
        let wide = |steps: Vec<Step>| steps.into_iter().map(move |step| Step { width, ..step });
        let (block, block_prefill, after) = self.draft_block(mtp, head)?;
        let after_block = self.decode_norm(&after);
        let bindings = op::speculate_begin::Bindings {
            slots: Bind::Buffer(self.buffers.slots),
            batch: Bind::Buffer(self.buffers.batch),
            draft_batch: Bind::Buffer(batch),
        };
        let begin = op::speculate_begin::Params { depth };
        self.emit(Phase::Decode, "draft.begin", begin, bindings);
        let mut steps = self.take(Phase::Decode);

        // Run the positions that were decoded since the last step, and draft from the last of them.
        self.draft_input(head, shared, Input::Network(Phase::Decode))?;
        steps.extend(wide(self.take(Phase::Decode)));
        steps.extend(wide(block.clone()));
        self.last_token(after[DECODE].h, head.last, batch);
        self.pre_norm(head.last, head.norm);
        let norm = self.decode_norm(&after.map(|stream| stream.with_normed(false)));
        self.draft_token(shared, norm, 1, batch);
        for number in 2..=depth {
            let y = if number == 2 { head.last } else { after[DECODE].h };
            self.draft_input(head, shared, Input::Head(y))?;
            steps.extend(self.take(Phase::Decode));
            steps.extend(block.iter().cloned());
            self.draft_token(shared, after_block, number, batch);
        }
        steps.extend(self.take(Phase::Decode));

        self.draft_input(head, shared, Input::Network(Phase::Prefill))?;
        let mut prefill = self.take(Phase::Prefill);
        prefill.extend(block_prefill);
        Ok(DraftHead {
            speculate: steps,
            prefill,
        })
    }

    /// The head's layers in both phases, over its own stream, and the streams after them.
    fn draft_block(&mut self, mtp: &Mtp, head: &Head) -> Result<(Vec<Step>, Vec<Step>, Streams)> {
        // The numbers of the head's layers follow those of the network's layers.
        let first = self.model.layers.len();
        let mut norms = Vec::new();
        for (i, layer) in mtp.layers.iter().enumerate() {
            norms.push(self.norm_weight(format!("layer.{:02}.attn.norm", first + i), layer.attn_norm));
        }
        norms.push(head.norm);
        self.pre_norm(head.own[DECODE].h, norms[0]);
        let mut streams = head.own;
        for (i, layer) in mtp.layers.iter().enumerate() {
            let path = LayerPath {
                layer: first + i,
                pass: 0,
                invocation: None,
            };
            let ffn_norm = self.norm_weight(format!("layer.{:02}.ffn.norm", first + i), layer.ffn_norm);
            let Mixer::Attention(attention) = &layer.mixer else {
                bail!(UnsupportedModel, "a draft head with linear attention");
            };
            streams = self.attention(path, layer, attention, [norms[i], ffn_norm], streams)?;
            streams = self.ffn(path, layer, [ffn_norm, norms[i + 1]], streams)?;
        }
        let mut prefill = self.take(Phase::Prefill);
        // A prefill only fills the head's cache. The steps after the last keys and values are not needed.
        let last_keys = prefill.iter().rposition(|step| matches!(step.op, Op::Rope(_)));
        prefill.truncate(last_keys.map_or(0, |last| last + 1));
        Ok((self.take(Phase::Decode), prefill, streams))
    }

    /// Computes the head's stream from hidden states and tokens.
    fn draft_input(&mut self, head: &Head, shared: &Shared, input: Input) -> Result<()> {
        let (phase, mut source, norm) = match input {
            Input::Network(phase) => (phase, shared.streams[phase as usize].h, shared.final_norm),
            Input::Head(y) => (Phase::Decode, y, head.norm),
        };
        let vectors = vectors_of(self.model.hidden);
        let pair = head.pair[phase as usize];
        if head.input == HeadInput::Normed {
            self.norm_to_x(phase, source, norm, "draft.hidden");
            source = self.scratch[phase as usize].x;
        }
        self.norm_into(phase, source, head.hnorm, (pair, 2 * vectors, vectors), "draft.hnorm");
        // The embedding may overwrite the hidden state, which is no longer needed.
        let h = head.own[phase as usize].h;
        self.embed(phase, shared.embed, h);
        self.norm_into(phase, h, head.enorm, (pair, 2 * vectors, 0), "draft.enorm");
        let lists = self.lists("draft.eh_proj", head.eh_proj.matrix, 0, None)?;
        match phase {
            Phase::Decode => {
                let norm = DecodeNorm::NONE;
                self.matvec("draft.eh_proj", head.eh_proj, pair, norm, (h, vectors), &lists);
            }
            Phase::Prefill => self.matmul("draft.eh_proj", head.eh_proj, pair, (h, vectors), &lists),
        }
        Ok(())
    }

    /// Computes the logits of one token and drafts from them. A soft cap is not needed: it does not change which
    /// logit is the largest.
    fn draft_token(&mut self, shared: &Shared, norm: DecodeNorm, number: u32, batch: BufferId) {
        let stride = vectors_of(self.model.vocab);
        let lists = vec![None; self.b.matrices[shared.lm_head.matrix].segments.len()];
        let x = self.scratch[DECODE].x;
        self.matvec("draft.head", shared.lm_head, x, norm, (shared.logits, stride), &lists);
        let params = op::draft::Params {
            vocab: self.model.vocab as u32,
            number,
        };
        let bindings = op::draft::Bindings {
            logits: Bind::Buffer(shared.logits),
            slots: Bind::Buffer(self.buffers.slots),
            batch: Bind::Buffer(self.buffers.batch),
            draft_batch: Bind::Buffer(batch),
        };
        self.emit(Phase::Decode, "draft", params, bindings);
    }
}
