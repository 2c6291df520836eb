//! The draft head (multi-token prediction) as steps, and rounds of drafting and judging made of them.
//!
//! With h[p] the network's hidden state at position p, the head computes y[p] = block(eh_proj · [enorm(embed(t[p + 1]));
//! hnorm(h[p])]), with keys and values of its own, and drafts t[p + 2] from lm_head · norm(y[p]). For further drafts y takes
//! the place of h. A round begins with the positions that were decoded since the last one, now with the network's own h;
//! whatever a rejected draft left in the caches lies behind the position and is overwritten.

use super::place::Place;
use super::walk::{AS_IT_IS, DecodeNorm, Mode, Scratch, Source, Walk};
use super::{Bind, BufferId, MatrixId, Program, Stacking, Step, VectorId};
use crate::error::{Result, bail};
use crate::kernel::{self, Op};
use crate::model::{HeadInput, Mixer, Mtp};

/// What the head shares with the network.
pub(super) struct Network {
    pub embed: MatrixId,
    pub lm_head: MatrixId,
    pub lm_bias: Option<VectorId>,
    pub logits: BufferId,
    pub final_norm: VectorId,
}

/// The head's steps for each reading of hidden states, the first one in use first.
pub(super) struct DraftHead {
    rounds: Vec<Vec<Step>>,
    prefills: Vec<Vec<Step>>,
}

impl DraftHead {
    /// Rounds and prefills: the head's steps with those that judge, and after those that fill the network's caches.
    pub(super) fn programs(self, judge: &Program, prefill: &Program) -> ([Program; 2], [Program; 2]) {
        let mut rounds = [judge.clone(), Program::default()];
        let mut prefills = [prefill.clone(), Program::default()];
        for (i, (round, head)) in self.rounds.into_iter().zip(self.prefills).take(2).enumerate() {
            rounds[i] = judge.after(round);
            prefills[i] = prefill.clone();
            prefills[i].steps.extend(head);
        }
        (rounds, prefills)
    }
}

/// Buffers and weights that the head has for itself.
#[derive(Clone, Copy)]
struct Head {
    /// The network's hidden states, in a decoding run and in a prefill.
    hidden: [BufferId; 2],
    /// `[embedding; hidden state]`, in both modes.
    pair: [BufferId; 2],
    /// The column of the first draft.
    last: BufferId,
    enorm: VectorId,
    hnorm: VectorId,
    norm: VectorId,
    eh_proj: MatrixId,
}

impl Walk<'_> {
    /// Plans the head for rounds of up to `depth` drafts. Errors: those of the builder, and `UnsupportedModel` for widths
    /// whose halves are no whole units.
    pub(super) fn draft_head(&mut self, mtp: &Mtp, network: &Network, depth: u32, columns: u32) -> Result<DraftHead> {
        let (hidden, chunk) = (self.model.hidden, self.b.options.chunk as usize);
        let Some(buffers) = self.fixed.head else {
            bail!(Usage, "the plan has no buffers for the draft head");
        };
        if !hidden.is_multiple_of(32) {
            bail!(
                UnsupportedModel,
                "a draft head of hidden size {hidden}: wanted a multiple of 32; speculation can be turned off"
            );
        }
        let trunk = [self.decode, self.prefill];
        let head = Head {
            hidden: trunk.map(|scratch| scratch.h),
            pair: [
                self.b.columns("draft.pair", 2 * hidden, columns as usize)?,
                self.b.columns("draft.prefill.pair", 2 * hidden, chunk)?,
            ],
            last: self.b.columns("draft.last", hidden, 1)?,
            enorm: self.vector("draft.enorm".into(), mtp.enorm),
            hnorm: self.vector("draft.hnorm".into(), mtp.hnorm),
            norm: self.vector("draft.norm".into(), mtp.norm),
            eh_proj: self
                .b
                .matrix("draft.eh_proj".into(), &[mtp.eh_proj.weight], Stacking::Rows)?,
        };
        self.decode = Scratch {
            ctl: buffers.ctl,
            h: self.b.columns("draft.h", hidden, columns as usize)?,
            ..trunk[0]
        };
        self.prefill.h = self.b.columns("draft.prefill.h", hidden, chunk)?;
        let (block, mut block_prefill) = self.draft_block(mtp, head.norm)?;
        // After the last keys and values a prefill has done what it is for.
        let end = block_prefill.iter().rposition(|step| matches!(step.op, Op::Rope(_)));
        block_prefill.truncate(end.map_or(0, |end| end + 1));
        let after_block = self.decode_norm();

        let wide = |steps: Vec<Step>| steps.into_iter().map(|step| Step { columns, ..step });
        let readings = match mtp.input {
            HeadInput::Stream => vec![HeadInput::Stream],
            HeadInput::Normed => vec![HeadInput::Normed],
            HeadInput::Unsaid => vec![HeadInput::Stream, HeadInput::Normed],
        };
        let (mut rounds, mut prefills) = (Vec::new(), Vec::new());
        for reading in readings {
            let begin = Op::RoundBegin(kernel::RoundBegin { depth });
            let bindings = [self.fixed.ctl, buffers.ctl].map(Bind::Buffer).to_vec();
            self.push(Mode::Decode, "draft.begin", begin, None, bindings);
            let mut round = self.take(Mode::Decode).steps;

            // The positions decoded since the last round, and the first draft from the last of them.
            self.draft_input(&head, network, reading, Input::Network(Mode::Decode));
            let input = self.take(Mode::Decode).steps;
            round.extend(wide(input));
            round.extend(wide(block.clone()));
            self.last_column(self.decode.h, head.last, buffers.ctl);
            self.prep(head.last, head.norm);
            let norm = self.decode_norm();
            self.draft_token(network, norm, 1);
            for number in 2..=depth {
                let y = if number == 2 { head.last } else { self.decode.h };
                self.draft_input(&head, network, reading, Input::Head(y));
                let mut input = self.take(Mode::Decode);
                input.steps.extend(block.iter().cloned());
                round.append(&mut input.steps);
                self.draft_token(network, after_block, number);
            }
            round.extend(self.take(Mode::Decode).steps);
            rounds.push(round);

            self.draft_input(&head, network, reading, Input::Network(Mode::Prefill));
            let mut prefill = self.take(Mode::Prefill).steps;
            prefill.extend(block_prefill.iter().cloned());
            prefills.push(prefill);
        }
        [self.decode, self.prefill] = trunk;
        Ok(DraftHead { rounds, prefills })
    }

    /// The head's layers in both modes, over its own stream.
    fn draft_block(&mut self, mtp: &Mtp, norm_after: VectorId) -> Result<(Vec<Step>, Vec<Step>)> {
        // Labels and layers are numbered on from the network's.
        let first = self.model.layers.len();
        let layers = mtp.layers.iter().enumerate();
        let norms = layers.map(|(i, layer)| self.vector(format!("layer.{:02}.attn.norm", first + i), layer.attn_norm));
        let norms: Vec<_> = norms.chain([norm_after]).collect();
        self.prep(self.decode.h, norms[0]);
        self.prefill_normed = false;
        for (i, layer) in mtp.layers.iter().enumerate() {
            let place = Place {
                layer: first + i,
                pass: 0,
                visit: None,
            };
            let ffn_norm = self.vector(format!("layer.{:02}.ffn.norm", first + i), layer.ffn_norm);
            match &layer.mixer {
                Mixer::Attention(attention) => {
                    self.attention(place, layer, attention, [norms[i], ffn_norm])?;
                }
                Mixer::DeltaNet(_) => bail!(UnsupportedModel, "a draft head with linear attention"),
            }
            self.ffn(place, layer, ffn_norm, norms[i + 1])?;
        }
        Ok((self.take(Mode::Decode).steps, self.take(Mode::Prefill).steps))
    }

    /// From hidden states and tokens to the head's stream.
    fn draft_input(&mut self, head: &Head, network: &Network, reading: HeadInput, input: Input) {
        let (mode, mut source, norm) = match input {
            Input::Network(mode) => (mode, head.hidden[mode as usize], network.final_norm),
            Input::Head(y) => (Mode::Decode, y, head.norm),
        };
        let vectors = Self::vectors_of(self.model.hidden);
        let pair = head.pair[mode as usize];
        if reading == HeadInput::Normed {
            let x = self.scratch(mode).x;
            self.norm_into(mode, source, norm, (x, vectors, 0), "draft.hidden");
            source = x;
        }
        self.norm_into(mode, source, head.hnorm, (pair, 2 * vectors, vectors), "draft.hnorm");
        // The embedding may take the place of what was the hidden state.
        let tokens = match (mode, self.fixed.head) {
            (Mode::Prefill, Some(buffers)) => buffers.next_tokens,
            _ => self.decode.ctl,
        };
        self.embed(mode, network.embed, tokens);
        let h = self.scratch(mode).h;
        self.norm_into(mode, h, head.enorm, (pair, 2 * vectors, 0), "draft.enorm");
        let from = Source {
            matrix: head.eh_proj,
            bias: None,
            row0: 0,
        };
        match mode {
            Mode::Decode => self.matvec(from, pair, AS_IT_IS, (h, vectors), "draft.eh_proj"),
            Mode::Prefill => self.matmul(from, pair, h, vectors, "draft.eh_proj"),
        }
    }

    /// Logits of one column and the draft they stand for. A cap of the logits would not change which is the largest.
    fn draft_token(&mut self, network: &Network, norm: DecodeNorm, number: u32) {
        let from = Source {
            matrix: network.lm_head,
            bias: network.lm_bias,
            row0: 0,
        };
        let stride = Self::vectors_of(self.model.vocab);
        self.matvec(from, self.decode.x, norm, (network.logits, stride), "draft.head");
        let op = Op::Draft(kernel::Draft {
            vocab: self.model.vocab as u32,
            number,
        });
        let bindings = [network.logits, self.fixed.ctl, self.decode.ctl]
            .map(Bind::Buffer)
            .to_vec();
        self.push(Mode::Decode, "draft", op, None, bindings);
    }
}

/// Where hidden states come from.
enum Input {
    /// The network, in a decoding run or a prefill.
    Network(Mode),
    /// The head itself.
    Head(BufferId),
}
