//! Cases of choosing tokens: the sampler with settings of every kind over logits of every kind, the draft head's choice,
//! and the beginning of speculative steps. The sequences are in both of two slots; the state of the other slot is unset.

use crate::error::Result;
use crate::op::{MAX_WIDTH, SlotState, batch_len, batch_words, draft, sample, speculate_begin};
use crate::parity::case::Table;
use crate::parity::judge::UNSET;
use crate::parity::maker::{Maker, token};
use crate::parity::random::{Random, words};
use crate::sampling::{Choice, SEEN_IN_PROMPT, SETTINGS_WORDS, Sampling, choose};

/// The values of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Logits {
    /// All different.
    Spread,
    /// Few values, so that many tokens are equal. The largest are zeros of both signs.
    Ties,
    /// One value.
    Flat,
    /// One of them is not a finite number.
    Broken,
}

pub fn add(table: &mut Table) {
    // Tokens of the vocabulary, draws for each setting.
    for (vocab, draws) in [(1, 1), (5, 3), (255, 3), (257, 3), (1000, 10), (49_155, 1)] {
        for (logits, what) in [
            (Logits::Spread, "spread"),
            (Logits::Ties, "ties"),
            (Logits::Flat, "flat"),
            (Logits::Broken, "not finite"),
        ] {
            if logits != Logits::Broken {
                table.add(format!("draft {vocab} {what}"), move |maker| {
                    draft_case(maker, vocab, logits)
                });
            }
            table.add(format!("sample {vocab} {what}"), move |maker| {
                sample_case(maker, vocab as usize, logits, draws)
            });
        }
    }
    for depth in [1, 3, 7] {
        let name = format!("speculate_begin {depth} drafts");
        table.add(name, move |maker| speculate_begin_case(maker, depth));
    }
}

/// Words for the states of two slots.
const SLOTS_WORDS: usize = 2 * size_of::<SlotState>() / 4;

/// The words of a slots buffer with the state of one slot.
fn slot_words(slot: u32, state: &SlotState) -> Vec<u32> {
    let mut words = vec![UNSET; slot as usize * state.words().len()];
    words.extend(state.words());
    words
}

/// Settings of every kind.
fn settings() -> [Sampling; 13] {
    let with = |temperature, top_k, top_p, min_p| Sampling {
        temperature,
        top_k,
        top_p,
        min_p,
        ..Sampling::default()
    };
    let penalised = |sampling| Sampling {
        repeat_penalty: 1.3,
        presence_penalty: 0.4,
        frequency_penalty: 0.2,
        ..sampling
    };
    [
        Sampling::greedy(),
        with(1.0, 0, 1.0, 0.0),
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
    ]
}

fn sample_case(maker: &mut Maker, vocab: usize, kind: Logits, draws: u32) -> Result<()> {
    let stride = vocab.next_multiple_of(32);
    maker.buffer("settings", SETTINGS_WORDS);
    maker.buffer("logits", stride * MAX_WIDTH as usize);
    maker.buffer("slots", SLOTS_WORDS);
    maker.buffer("seen", vocab);
    maker.step(sample::Params {
        vocab: vocab as u32,
        stride: stride as u32,
    })?;
    for (number, sampling) in settings().iter().enumerate() {
        for draw in 0..draws {
            sample_round(maker, vocab, kind, sampling, [draw, (number as u32 + draw) % 2])?;
        }
    }
    Ok(())
}

fn sample_round(
    maker: &mut Maker,
    vocab: usize,
    kind: Logits,
    sampling: &Sampling,
    [draw, slot]: [u32; 2],
) -> Result<()> {
    let stride = vocab.next_multiple_of(32);
    let count = 1 + draw % MAX_WIDTH;
    let mut values = Vec::new();
    for _ in 0..count {
        values.extend(logits(&mut maker.random, kind, vocab));
        values.resize(values.len().next_multiple_of(stride), 0.0);
    }
    if kind == Logits::Broken {
        // Of the last token, so that a token is sampled after each of the others.
        let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        let last = (count as usize - 1) * stride;
        values[last + (maker.random.bits() % vocab as u64) as usize] = bad[draw as usize % 3];
    }
    let stops = match draw % 3 {
        // For a small vocabulary every token is a stop token, the last one of the list included.
        0 => (0..16).collect(),
        1 => vec![(maker.random.bits() % vocab as u64) as u32],
        _ => Vec::new(),
    };
    let seed = maker.random.bits();
    let sampling = Sampling {
        seed,
        ..sampling.clone()
    };
    // Most tokens are new, some are in the prompt, some were sampled up to three times.
    let marks = |bits: u64| match bits % 8 {
        0 => SEEN_IN_PROMPT,
        1 => SEEN_IN_PROMPT | ((bits >> 8) as u32 % 4),
        2 => (bits >> 8) as u32 % 4,
        _ => 0,
    };
    let seen: Vec<u32> = (0..vocab).map(|_| marks(maker.random.bits())).collect();
    let position = (maker.random.bits() % 5000) as u32;
    // One round in four comes after the end of an answer, where nothing changes.
    let state = SlotState {
        step: draw,
        stop: u32::from(draw % 4 == 3),
        count: 9,
        drafted: 9,
        last: 9,
        ..SlotState::default()
    };
    // Most drafts are the tokens that will be sampled.
    let settings = sampling.words(&stops)?;
    let mut counted = seen.clone();
    let positions = position..position + count;
    let mut tokens: Vec<_> = positions.map(|position| token(3, slot, position)).collect();
    for t in 0..count as usize {
        let logits = &values[t * stride..][..vocab];
        if let Choice::Token(id) = choose(logits, &settings, &counted, tokens[t].position + 1)
            && !maker.random.bits().is_multiple_of(8)
            && let Some(next) = tokens.get_mut(t + 1)
        {
            next.id = id;
            counted[id as usize] += u32::from(sampling.penalises());
        }
    }
    let inputs = vec![
        ("settings", settings),
        ("logits", words(&values)),
        ("seen", seen),
        ("slots", slot_words(slot, &state)),
    ];
    let name = format!("{sampling:?} at position {position} of slot {slot}");
    maker.named_round(name, tokens, inputs)
}

/// The draft head's choice: in a speculative step, before its last position, and after it.
fn draft_case(maker: &mut Maker, vocab: u32, kind: Logits) -> Result<()> {
    maker.buffer("logits", vocab as usize);
    maker.buffer("draft_batch", batch_len(1));
    maker.buffer("slots", SLOTS_WORDS);
    maker.step(draft::Params { vocab, number: 3 })?;
    for (slot, count, position, last) in [(0, 1, 20, 30), (1, 1, 28, 30), (0, 1, 29, 30), (1, 0, 28, 30)] {
        let at = |position| token(5, slot, position);
        let mut drafting = batch_words(&[at(position)]);
        drafting[0] = count;
        let state = SlotState {
            last,
            ..SlotState::default()
        };
        let inputs = vec![
            ("logits", words(&logits(&mut maker.random, kind, vocab as usize))),
            ("draft_batch", drafting),
            ("slots", slot_words(slot, &state)),
        ];
        let name = format!("{count} tokens at position {position} of slot {slot}, last position {last}");
        maker.named_round(name, (17..21).map(at).collect(), inputs)?;
    }
    Ok(())
}

/// The beginning of a speculative step: after a prompt, after other steps, near the last position, and after the end.
fn speculate_begin_case(maker: &mut Maker, depth: u32) -> Result<()> {
    maker.buffer("draft_batch", batch_len(MAX_WIDTH as usize));
    maker.buffer("slots", SLOTS_WORDS);
    maker.step(speculate_begin::Params { depth })?;
    for (slot, position, count, last, stop) in [
        (0, 1, 1, 30, 0),
        (1, 20, 3, 30, 0),
        (0, 28, depth + 1, 30, 0),
        (1, 29, 1, 30, 0),
        (0, 30, 2, 30, 0),
        (1, 20, 2, 30, 1),
        (0, 20, 0, 30, 2),
    ] {
        let state = SlotState {
            sampled: [11, 12, 13, 14, 15, 16, 17, 18],
            count,
            stop,
            last,
            ..SlotState::default()
        };
        let name = format!("position {position} of slot {slot}, {state:?}");
        maker.named_round(
            name,
            vec![token(7, slot, position)],
            vec![("slots", slot_words(slot, &state))],
        )?;
    }
    Ok(())
}

fn logits(random: &mut Random, kind: Logits, vocab: usize) -> Vec<f32> {
    let value = |bits: u64| match kind {
        Logits::Spread | Logits::Broken => Random::unit(bits) * 9.0,
        Logits::Ties => ((bits >> 40) % 5) as f32 * -0.5,
        Logits::Flat => -1.25,
    };
    let next = |_| {
        let bits = random.bits();
        match value(bits) {
            // Half of the zeros are negative.
            0.0 => [0.0, -0.0][(bits & 1) as usize],
            value => value,
        }
    };
    (0..vocab).map(next).collect()
}
