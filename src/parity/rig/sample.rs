//! Rigs of the sampler: settings of every kind over logits of every kind.

use super::random::{Random, words};
use super::{CTL, Maker, Round, SETTINGS};
use crate::container::Tensors;
use crate::error::Result;
use crate::kernel::{self, Op};
use crate::parity::cases::{Logits, Sample};
use crate::program::{Bind, Ctl, Extent};
use crate::sampling::{SEEN_IN_PROMPT, Sampling};
use std::sync::Arc;

impl Maker {
    pub(super) fn sample(&mut self, spec: &Sample) -> Result<Arc<dyn Tensors>> {
        let vocab = spec.vocab as usize;
        let logits = self.buffer("logits", vocab);
        let seen = self.buffer("seen", vocab);
        self.step(
            Op::Sample(kernel::Sample { vocab: spec.vocab }),
            [SETTINGS, logits, CTL, seen].map(Bind::Buffer).to_vec(),
        );
        let all = Sampling {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            ..Sampling::default()
        };
        let with = |temperature, top_k, top_p, min_p| Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            ..Sampling::default()
        };
        let penalised = |sampling: Sampling| Sampling {
            repeat_penalty: 1.3,
            presence_penalty: 0.4,
            frequency_penalty: 0.2,
            ..sampling
        };
        let settings = [
            Sampling::greedy(),
            all,
            Sampling::default(),
            with(2.0, 1, 1.0, 0.0),
            with(1.0, 7, 1.0, 0.0),
            with(1.0, 100_000, 1.0, 0.0),
            with(1.5, 0, 0.9, 0.0),
            with(0.5, 0, 0.05, 0.0),
            with(1.0, 0, 1.0, 0.2),
            with(1.5, 40, 0.9, 0.05),
            with(0.01, 0, 1.0, 0.0),
            penalised(Sampling::greedy()),
            penalised(with(1.0, 20, 0.9, 0.01)),
        ];
        for sampling in &settings {
            for draw in 0..spec.draws {
                let mut values = self.logits(spec.logits, vocab);
                if spec.logits == Logits::Broken {
                    let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
                    values[(self.random.bits() % vocab as u64) as usize] = bad[draw as usize % 3];
                }
                let stops = match draw % 3 {
                    // Sometimes every token of a small vocabulary, the last of the list among them.
                    0 => (0..16).collect(),
                    1 => vec![(self.random.bits() % vocab as u64) as u32],
                    _ => Vec::new(),
                };
                let seed = self.random.bits();
                let settings = Sampling {
                    seed,
                    ..sampling.clone()
                };
                // Most tokens are new, some were in the prompt, some were sampled up to three times.
                let marks = |bits: u64| match bits % 8 {
                    0 => SEEN_IN_PROMPT,
                    1 => SEEN_IN_PROMPT | ((bits >> 8) as u32 % 4),
                    2 => (bits >> 8) as u32 % 4,
                    _ => 0,
                };
                let seen_before: Vec<u32> = (0..vocab).map(|_| marks(self.random.bits())).collect();
                // A round in four comes after the end of an answer, which stays as it is.
                let ctl = Ctl {
                    token: 3,
                    pos: (self.random.bits() % 5000) as u32,
                    columns: 1 + draw,
                    step: draw,
                    stop: u32::from(draw % 4 == 3),
                    sampled: 3,
                };
                self.rounds.push(Round {
                    name: format!("{settings:?} at position {}", ctl.pos),
                    inputs: vec![
                        (SETTINGS, settings.words(&stops)?),
                        (logits, words(&values)),
                        (seen, seen_before),
                        (CTL, bytemuck::cast_slice(&[ctl]).to_vec()),
                    ],
                    extent: Extent { columns: 1, end: 1 },
                });
            }
        }
        self.tensors()
    }

    fn logits(&mut self, kind: Logits, vocab: usize) -> Vec<f32> {
        let value = |bits: u64| match kind {
            Logits::Spread | Logits::Broken => Random::unit(bits) * 9.0,
            Logits::Ties => ((bits >> 40) % 5) as f32 * -0.5,
            Logits::Flat => -1.25,
        };
        let mut next = || {
            let bits = self.random.bits();
            match value(bits) {
                // Half of the zeros are negative.
                0.0 => [0.0, -0.0][(bits & 1) as usize],
                value => value,
            }
        };
        (0..vocab).map(|_| next()).collect()
    }
}
