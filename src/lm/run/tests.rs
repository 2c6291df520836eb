//! Prefill in parts, and answers with and without drafts.

use super::fake::{CHUNK, FakeExecutor, Log, STEPS, VOCAB, plan};
use super::{Cancel, DraftMode, DraftNotice, Finish, Generation, Session};
use crate::error::Kind;
use crate::sampling::Sampling;
use std::ops::ControlFlow;
use std::time::Duration;

fn prefilling(step: Duration, cancelled_at: usize, kept_states: Option<u32>) -> (Session, Cancel, Log) {
    let plan = plan(512, 0, false, kept_states);
    let mut executor = FakeExecutor::new(&plan);
    (executor.step, executor.cancelled_at) = (step, cancelled_at);
    let (cancel, log) = (executor.cancel.clone(), executor.log.clone());
    (Session::new(plan, Box::new(executor)), cancel, log)
}

/// Every chunk runs every step once and in order, in submissions that grow as far as the device is fast enough.
#[test]
fn a_fast_device_gets_a_chunk_at_once_and_a_slow_one_in_parts() {
    for (step, parts_of_a_late_chunk) in [(Duration::ZERO, 1..2), (Duration::from_millis(5), 3..12)] {
        let (mut session, cancel, log) = prefilling(step, usize::MAX, None);
        let chunks = 5;
        let (run, flow) = session.prefill(&[1; CHUNK as usize * 5], &cancel).unwrap();
        assert_eq!((run, flow), (CHUNK as usize * chunks, ControlFlow::Continue(())));
        let log = log.lock().unwrap();
        let steps: Vec<usize> = log.iter().cloned().flatten().collect();
        assert_eq!(steps, (0..chunks).flat_map(|_| 0..STEPS).collect::<Vec<_>>());
        let last = log.len() - log.iter().rposition(|part| part.start == 0).unwrap();
        assert!(parts_of_a_late_chunk.contains(&last), "{step:?}: {log:?}");
    }
}

/// A cancel ends the prefill in the middle of a chunk, which then does not count.
#[test]
fn a_cancel_does_not_wait_for_the_chunk() {
    let (mut session, cancel, log) = prefilling(Duration::from_millis(20), 4, None);
    let result = session.prefill(&[1; 20], &cancel).unwrap();
    assert_eq!(result, (0, ControlFlow::Break(())));
    assert_eq!(log.lock().unwrap().len(), 4);
    assert!(session.cached().is_empty());
    let mut emit = |_| ControlFlow::Continue(());
    let err = session.generate(&greedy(1), &Cancel::new(), &mut emit).unwrap_err();
    assert_eq!(err.kind, Kind::Usage);
    // The next prompt begins with an empty cache, at the first step.
    let (run, flow) = session.prefill(&[1; 3], &Cancel::new()).unwrap();
    assert_eq!((run, flow), (3, ControlFlow::Continue(())));
    assert_eq!(log.lock().unwrap()[4].start, 0);
}

/// A cancel in the middle of a chunk would leave recurrent states that belong to no position.
#[test]
fn a_cancel_waits_for_a_chunk_that_overwrites_states() {
    let chunk = CHUNK as usize;
    for (kept, run) in [(CHUNK, chunk), (CHUNK + 1, 0)] {
        let (mut session, cancel, log) = prefilling(Duration::from_millis(10), 2, Some(kept));
        assert_eq!(
            session.prefill(&[1; 3 * CHUNK as usize], &cancel).unwrap(),
            (run, ControlFlow::Break(()))
        );
        assert_eq!(session.cached().len(), run);
        let steps = log.lock().unwrap().iter().map(ExactSizeIterator::len).sum::<usize>();
        assert_eq!(steps == STEPS, run > 0, "{steps} steps");
    }
}

/// How a caller ends an answer after some tokens.
#[derive(Clone, Copy, Debug)]
enum End {
    Never,
    Break(usize, Finish),
    Cancel(usize),
}

#[derive(Debug, PartialEq)]
struct Answer {
    tokens: Vec<u32>,
    finish: Finish,
    /// Tokens of the prompt that were run.
    run: usize,
    cached: Vec<u32>,
}

fn ask(session: &mut Session, prompt: &[u32], generation: &Generation, end: End) -> Answer {
    let cancel = Cancel::new();
    let (run, flow) = session.prefill(prompt, &cancel).unwrap();
    assert!(flow.is_continue());
    let mut tokens = Vec::new();
    let mut emit = |token| {
        tokens.push(token);
        match end {
            End::Break(count, finish) if tokens.len() == count => return ControlFlow::Break(finish),
            End::Cancel(count) if tokens.len() == count => cancel.cancel(),
            _ => {}
        }
        ControlFlow::Continue(())
    };
    let finish = session.generate(generation, &cancel, &mut emit).unwrap();
    Answer {
        tokens,
        finish,
        run,
        cached: session.cached().to_vec(),
    }
}

fn greedy(max_tokens: usize) -> Generation {
    Generation {
        sampling: Sampling::greedy(),
        stops: Vec::new(),
        max_tokens,
    }
}

fn session(ctx: u32, drafts: u32, draft_head: bool) -> Session {
    let plan = plan(ctx, drafts, draft_head, None);
    let executor = FakeExecutor::new(&plan);
    Session::new(plan, Box::new(executor))
}

const PROMPT: [u32; 11] = [3, 9, 1, 14, 3, 9, 5, 0, 7, 7, 2];

/// The drafts of a speculative step, and whether a draft head makes them.
const DRAFTING: [(u32, bool); 6] = [(1, true), (3, true), (7, true), (1, false), (4, false), (7, false)];

#[test]
fn answers_end_alike_with_and_without_drafts() {
    let path = ask(&mut session(96, 0, false), &PROMPT, &greedy(24), End::Never).tokens;
    let mut asks = Vec::new();
    for n in [1, 2, 3, 5, 8, 9] {
        asks.push((96, greedy(n), End::Never));
        asks.push((PROMPT.len() as u32 + n as u32, greedy(24), End::Never));
        let stops = Generation {
            stops: vec![path[n]],
            ..greedy(24)
        };
        asks.push((96, stops, End::Never));
        asks.push((96, greedy(24), End::Break(n, Finish::Stop)));
        asks.push((96, greedy(24), End::Break(n, Finish::Interrupted)));
        asks.push((96, greedy(24), End::Cancel(n)));
    }
    for (ctx, generation, end) in &asks {
        for (drafts, head) in DRAFTING {
            let case = format!("{drafts} drafts, head {head}, context {ctx}, {generation:?}, {end:?}");
            let (mut plain, mut drafting) = (session(*ctx, 0, false), session(*ctx, drafts, head));
            let expected = ask(&mut plain, &PROMPT, generation, *end);
            assert_eq!(ask(&mut drafting, &PROMPT, generation, *end), expected, "{case}");
            match *end {
                End::Never => assert_ne!(expected.finish, Finish::Interrupted),
                End::Break(n, finish) => assert_eq!((expected.tokens.len(), expected.finish), (n, finish)),
                End::Cancel(n) => assert_eq!((expected.tokens.len(), expected.finish), (n, Finish::Interrupted)),
            }
            // A second turn, after all emitted tokens and after half of them.
            for keep in [expected.tokens.len(), expected.tokens.len() / 2] {
                let mut prompt = [&PROMPT[..], &expected.tokens[..keep], &[9, 8]].concat();
                prompt.truncate(*ctx as usize);
                let [expected, found] =
                    [&mut plain, &mut drafting].map(|session| ask(session, &prompt, &greedy(8), End::Never));
                assert_eq!(found, expected, "{case}, second turn");
            }
        }
    }
}

#[test]
fn sampled_answers_are_the_same_with_and_without_drafts() {
    for (seed, penalty) in [(1, 1.0), (2, 1.3)] {
        let generation = Generation {
            sampling: Sampling {
                seed,
                temperature: 0.6,
                repeat_penalty: penalty,
                frequency_penalty: penalty - 1.0,
                ..Sampling::default()
            },
            stops: Vec::new(),
            max_tokens: 80,
        };
        let expected = ask(&mut session(200, 0, false), &PROMPT, &generation, End::Never);
        for (drafts, head) in DRAFTING {
            let found = ask(&mut session(200, drafts, head), &PROMPT, &generation, End::Never);
            assert_eq!(found, expected, "seed {seed}, {drafts} drafts, head {head}");
        }
    }
}

/// Writes and submissions of a prefill and of a decoding run.
#[test]
fn decoding_writes_nothing_and_a_prefill_each_chunk_once() {
    for (drafts, head, writes) in [(0, false, 2), (3, false, 2), (3, true, 4)] {
        let mut session = session(200, drafts, head);
        let (run, _) = session.prefill(&PROMPT, &Cancel::new()).unwrap();
        assert_eq!(run, PROMPT.len());
        assert_eq!(session.counters().write_buffer_calls, writes);
        let answer = ask(&mut session, &PROMPT, &greedy(100), End::Never);
        assert_eq!(answer.finish, Finish::Length);
        let (runs, cost) = session.decode_cost();
        let speculated = session.speculated();
        assert_eq!(cost.submits, runs);
        if drafts == 0 {
            assert_eq!((runs, speculated.mode), (99, DraftMode::Off));
        } else {
            // The last run may have been submitted before the end was known.
            assert!(speculated.steps == runs || speculated.steps + 1 == runs);
            assert_eq!(speculated.steps + speculated.accepted, 99);
            assert!(
                speculated.accepted > 20 && speculated.accepted < speculated.drafted,
                "{speculated:?}"
            );
        }
        // Without a draft head, the host writes the drafts.
        let most = if drafts != 0 && !head { runs } else { 0 };
        assert!(cost.write_buffer_calls <= most, "{cost:?}");
    }
}

#[test]
fn slow_drafting_pauses_until_the_next_conversation() {
    let plan = plan(200, 3, true, None);
    let mut executor = FakeExecutor::new(&plan);
    executor.speculative = Duration::from_millis(2);
    let mut drafting = Session::new(plan, Box::new(executor));
    drafting.draft_only_while_it_pays();
    let expected = ask(&mut session(200, 0, false), &PROMPT, &greedy(80), End::Never);
    assert_eq!(ask(&mut drafting, &PROMPT, &greedy(80), End::Never), expected);
    assert!(
        (16..20).contains(&drafting.speculated().steps),
        "{:?}",
        drafting.speculated()
    );
    assert!(matches!(drafting.take_notice(), Some(DraftNotice::Paused { .. })));
    let next = [&PROMPT[..], &expected.tokens, &[1]].concat();
    ask(&mut drafting, &next, &greedy(4), End::Never);
    assert_eq!(drafting.speculated().mode, DraftMode::Off);
    ask(&mut drafting, &[5, 6], &greedy(4), End::Never);
    assert_eq!(
        (drafting.speculated().mode, drafting.take_notice()),
        (DraftMode::Head, None)
    );
}

/// The tokens of an answer are those with the largest teacher-forced logits, however much of it is prefilled.
#[test]
fn logits_are_those_of_the_answer() {
    let answer = ask(&mut session(96, 0, false), &PROMPT, &greedy(24), End::Never).tokens;
    let tokens = [&PROMPT[..], &answer].concat();
    for prefill in [0, 1, CHUNK as usize, 20, tokens.len()] {
        let mut session = session(96, 0, false);
        let mut best = Vec::new();
        let mut sink = |position: usize, logits: &[f32], _: &[Vec<f32>]| {
            assert_eq!((position, logits.len()), (best.len(), VOCAB as usize));
            best.push(
                (0..VOCAB)
                    .max_by(|&a, &b| logits[a as usize].total_cmp(&logits[b as usize]))
                    .unwrap(),
            );
            Ok(())
        };
        session.logits(&tokens, prefill, false, &mut sink).unwrap();
        assert_eq!(best[PROMPT.len() - 1..tokens.len() - 1], answer);
        // The cached tokens can be continued.
        assert_eq!(session.prefill(&tokens, &Cancel::new()).unwrap().0, 1);
    }
}

#[test]
fn prompts_are_checked() {
    let mut session = session(16, 0, false);
    let mut kind = |tokens: &[u32]| session.prefill(tokens, &Cancel::new()).unwrap_err().kind;
    assert_eq!(kind(&[]), Kind::Usage);
    assert_eq!(kind(&[1, VOCAB]), Kind::Usage);
    assert_eq!(kind(&[1; 17]), Kind::ContextFull);
    let mut emit = |_| ControlFlow::Continue(());
    let err = session.generate(&greedy(1), &Cancel::new(), &mut emit).unwrap_err();
    assert_eq!(err.kind, Kind::Usage);
    let err = session.mean_hidden(&[1], &[1, 0], &Cancel::new()).unwrap_err();
    assert_eq!(err.kind, Kind::Usage);
}
