//! The draft head (multi-token prediction) as steps, and speculative steps made of drafting and verifying.
//!
//! With h[p] the network's hidden state at position p and t[p] the token there, the head computes
//! `y[p] = block(eh_proj · [enorm(embed(t[p + 1])); hnorm(h[p])])`, with keys and values of its own, and drafts t[p + 2]
//! from `lm_head · norm(y[p])`. For further drafts y replaces h. A speculative step begins with the positions that were
//! decoded since the last one, with the network's h. Cache entries of rejected drafts are at later positions and are
//! overwritten.

use super::context::vectors_of;
use super::context::{DECODE, DecodeNorm, Ends, LayerPath, Lowering, PREFILL, Phase, Product, Scratch, Streams};
use crate::error::{Result, bail};
use crate::graph::Step;
use crate::model::{HeadInput, Mixer, Mtp};
use crate::op::{self, Bind, BufferId, Op, VectorId};

/// Buffers and weights of the head alone.
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

impl Lowering<'_> {
    /// Lowers the head: the steps that draft, before the network verifies the drafts, and the steps that fill the
    /// head's cache, after a prefill of the network. Errors: those of the builder, and `UnsupportedModel` for hidden
    /// sizes that are not whole groups of 32.
    pub fn draft_head(&mut self, mtp: &Mtp, ends: &Ends) -> Result<[Vec<Step>; 2]> {
        let Some(batch) = self.buffers.draft_batch else {
            bail!(Internal, "no batch for the draft head");
        };
        let head = self.head_buffers(mtp, ends)?;
        let network = self.scratch;
        self.scratch = network.map(|scratch| Scratch { batch, ..scratch });
        let result = self.draft_steps(mtp, ends, &head);
        self.scratch = network;
        result
    }

    fn head_buffers(&mut self, mtp: &Mtp, ends: &Ends) -> Result<Head> {
        let hidden = self.model.hidden;
        if !hidden.is_multiple_of(32) {
            bail!(
                UnsupportedModel,
                "a draft head with hidden size {hidden}, expected a multiple of 32; the model runs without speculation"
            );
        }
        let tokens = [self.b.width(), self.b.options.chunk as usize];
        let eh_proj = self.linear("draft.eh_proj", &mtp.eh_proj, None)?;
        let pair = [
            self.b.rows("draft.pair", 2 * hidden, tokens[DECODE])?,
            self.b.rows("draft.prefill.pair", 2 * hidden, tokens[PREFILL])?,
        ];
        let last = self.b.rows("draft.last", hidden, 1)?;
        let own = [
            self.b.rows("draft.h", hidden, tokens[DECODE])?,
            self.b.rows("draft.prefill.h", hidden, tokens[PREFILL])?,
        ];
        Ok(Head {
            pair,
            own: Streams {
                h: own,
                other: ends.streams.other,
                normed: false,
            },
            last,
            enorm: self.norm_weight("draft.enorm", mtp.enorm),
            hnorm: self.norm_weight("draft.hnorm", mtp.hnorm),
            norm: self.norm_weight("draft.norm", mtp.norm),
            eh_proj,
            input: mtp.input.unwrap_or(self.b.options.draft_input),
        })
    }

    fn draft_steps(&mut self, mtp: &Mtp, ends: &Ends, head: &Head) -> Result<[Vec<Step>; 2]> {
        let (width, depth) = (self.b.width() as u32, self.b.options.drafts);
        let wide = |steps: Vec<Step>| steps.into_iter().map(move |step| Step { width, ..step });
        let (block, block_prefill, after) = self.draft_block(mtp, head)?;
        let batch = self.scratch[DECODE].batch;
        let bindings = op::speculate_begin::Bindings {
            slots: Bind::Buffer(self.buffers.slots),
            batch: Bind::Buffer(self.buffers.batch),
            draft_batch: Bind::Buffer(batch),
        };
        let begin = op::speculate_begin::Params { depth };
        self.emit(Phase::Decode, "draft.begin", begin, bindings);
        let mut steps = self.take(Phase::Decode);

        // Run the positions that were decoded since the last step, and draft from the last of them.
        self.draft_input(head, ends, Phase::Decode, (ends.streams.h[DECODE], ends.final_norm))?;
        steps.extend(wide(self.take(Phase::Decode)));
        steps.extend(wide(block.clone()));
        self.last_token(after.h[DECODE], head.last, batch);
        self.pre_norm(head.last, head.norm);
        self.draft_token(ends, self.stream_norm(), 1);
        for number in 2..=depth {
            let y = if number == 2 { head.last } else { after.h[DECODE] };
            self.draft_input(head, ends, Phase::Decode, (y, head.norm))?;
            steps.extend(self.take(Phase::Decode));
            steps.extend(block.iter().cloned());
            self.draft_token(ends, self.decode_norm(&after), number);
        }
        steps.extend(self.take(Phase::Decode));

        self.draft_input(head, ends, Phase::Prefill, (ends.streams.h[PREFILL], ends.final_norm))?;
        let mut prefill = self.take(Phase::Prefill);
        prefill.extend(block_prefill);
        Ok([steps, prefill])
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
        self.pre_norm(head.own.h[DECODE], norms[0]);
        let mut streams = head.own;
        for (i, layer) in mtp.layers.iter().enumerate() {
            if let Mixer::DeltaNet(_) = layer.mixer {
                bail!(UnsupportedModel, "a draft head with linear attention");
            }
            let path = LayerPath {
                layer: first + i,
                pass: 0,
                invocation: None,
            };
            streams = self.layer(path, layer, [norms[i], norms[i + 1]], streams)?;
        }
        let mut prefill = self.take(Phase::Prefill);
        // A prefill only fills the head's cache. The steps after the last keys and values are not needed.
        let last_keys = prefill.iter().rposition(|step| matches!(step.op, Op::Rope(_)));
        prefill.truncate(last_keys.map_or(0, |last| last + 1));
        Ok((self.take(Phase::Decode), prefill, streams))
    }

    /// Computes the head's stream from tokens and hidden states: a buffer, and the norm that follows there.
    fn draft_input(
        &mut self,
        head: &Head,
        ends: &Ends,
        phase: Phase,
        (mut source, norm): (BufferId, VectorId),
    ) -> Result<()> {
        let vectors = vectors_of(self.model.hidden);
        let pair = head.pair[phase as usize];
        if head.input == HeadInput::Normed {
            self.norm_to_x(phase, source, norm, "draft.hidden");
            source = self.scratch[phase as usize].x;
        }
        self.norm_into(phase, source, head.hnorm, (pair, 2 * vectors, vectors), "draft.hnorm");
        // The embedding may overwrite the hidden state, which is no longer needed.
        let h = head.own.h[phase as usize];
        self.embed(phase, ends.embed, h)?;
        self.norm_into(phase, h, head.enorm, (pair, 2 * vectors, 0), "draft.enorm");
        let (label, from, y) = ("draft.eh_proj", &head.eh_proj, (h, vectors));
        match phase {
            Phase::Decode => self.matvec(label, from, pair, DecodeNorm::NONE, y),
            Phase::Prefill => self.matmul(label, from, pair, y),
        }
        Ok(())
    }

    /// Computes the logits of one token and drafts from them. A soft cap is not needed: it does not change which
    /// logit is the largest.
    fn draft_token(&mut self, ends: &Ends, norm: DecodeNorm, number: u32) {
        let scratch = self.scratch[DECODE];
        let y = (ends.logits, vectors_of(self.model.vocab));
        self.matvec("draft.head", &ends.head, scratch.x, norm, y);
        let params = op::draft::Params {
            vocab: self.model.vocab as u32,
            number,
        };
        let bindings = op::draft::Bindings {
            logits: Bind::Buffer(ends.logits),
            slots: Bind::Buffer(self.buffers.slots),
            batch: Bind::Buffer(self.buffers.batch),
            draft_batch: Bind::Buffer(scratch.batch),
        };
        self.emit(Phase::Decode, "draft", params, bindings);
    }
}
