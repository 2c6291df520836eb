//! Token records and page tables: results depend neither on the pages that hold the key-value cache nor on the order of a run's
//! tokens.

use crate::masks::{greedy, logits};
use crate::{PLACES, Place};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::lm::run::Session;
use cmf_gpu::lm::{LowerOptions, Plan, ProgramKind};
use cmf_gpu::op::{KV_PAGE, Kv, Token, batch_words};
use cmf_gpu::source::Tensors;
use std::sync::Arc;

/// Positions of the context: five pages, of which the last one is not full.
const CTX: u32 = 300;
/// The page of each block of 64 positions.
const PERMUTED: [u32; 5] = [3, 0, 4, 1, 2];

/// A session with another page table.
fn session(place: Place, plan: &Plan, tensors: Arc<dyn Tensors>, pages: [u32; 5]) -> Session {
    assert_eq!(plan.ctx.div_ceil(KV_PAGE), 5);
    let mut executor = crate::executor(place, plan, tensors);
    executor.write(plan.buffers.pages, &pages).unwrap();
    Session::new(plan.clone(), executor)
}

/// The pages of a cache.
fn pages(session: &mut Session, label: &str) -> Vec<Vec<u32>> {
    let id = crate::buffer(session.plan(), label);
    let count = session.plan().graph.buffers[id].bytes as usize / 4;
    let words = session.read_buffer(id, 0, count).unwrap();
    words.chunks(count / 5).map(<[u32]>::to_vec).collect()
}

fn text(plan: &Plan, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|i| i * 211 % plan.vocab).collect()
}

#[test]
fn any_page_may_hold_any_block_of_positions() {
    for name in ["qwen3", "gemma2", "qwen3_5"] {
        let (tensors, _guard) = crate::golden(name, Dtype::F16);
        for kv in [Kv::F16, Kv::F32] {
            let options = LowerOptions {
                kv,
                all_logits: true,
                ..crate::options(CTX)
            };
            let plan = crate::plan_of(&tensors, &options);
            // Four pages and a part of the last one; decoding crosses a page boundary.
            let tokens = text(&plan, 270);
            for place in PLACES {
                let what = format!("{name}, {} cache, {place:?}", kv.name());
                let run = |pages| {
                    let mut session = session(place, &plan, tensors.clone(), pages);
                    let logits = logits(&mut session, &tokens, 240);
                    (session, logits)
                };
                let (mut plain, wanted) = run([0, 1, 2, 3, 4]);
                let (mut permuted, found) = run(PERMUTED);
                assert!(found == wanted, "{what}");
                let last = plan
                    .graph
                    .buffers
                    .iter()
                    .rfind(|buffer| buffer.label.ends_with("v_cache"));
                let [plain, permuted] = [&mut plain, &mut permuted].map(|session| pages(session, &last.unwrap().label));
                for (block, page) in PERMUTED.into_iter().enumerate() {
                    assert!(permuted[page as usize] == plain[block], "{what}, block {block}");
                }
                // Two blocks in one page: the last tokens overwrite keys and values that they read.
                let (_, faulty) = run([0, 1, 2, 3, 0]);
                assert!(
                    faulty[..256] == wanted[..256] && faulty[256..] != wanted[256..],
                    "{what}"
                );
            }
        }
    }
}

#[test]
fn the_draft_head_uses_the_page_table() {
    let (tensors, _guard) = crate::golden("qwen3_mtp", Dtype::F16);
    let options = LowerOptions {
        kv: Kv::F16,
        drafts: 3,
        ..crate::options(CTX)
    };
    let plan = crate::plan_of(&tensors, &options);
    let [plain, permuted] = [[0, 1, 2, 3, 4], PERMUTED].map(|pages| {
        let mut session = session(Place::Device, &plan, tensors.clone(), pages);
        let answers = [200, 250].map(|tokens| {
            let answer = greedy(&mut session, &text(&plan, tokens));
            (answer, session.speculated())
        });
        answers.to_vec()
    });
    assert_eq!(permuted, plain);
    assert!(plain.iter().all(|(_, speculated)| speculated.drafted > 0));
}

/// Caches hold every token of a run before the first one is attended, so each finds the ones before it.
#[test]
fn tokens_of_a_run_may_come_in_any_order() {
    let (tensors, _guard) = crate::golden("gemma2", Dtype::F16);
    let options = LowerOptions {
        all_logits: true,
        drafts: 7,
        ..crate::options(CTX)
    };
    let plan = crate::plan_of(&tensors, &options);
    let stride = (plan.vocab as usize).next_multiple_of(32);
    for place in PLACES {
        for (kind, order) in [
            (
                ProgramKind::PrefillLogits,
                &[3, 4, 5, 6, 0, 15, 1, 14, 2, 7, 8, 9, 13, 12, 10, 11][..],
            ),
            (ProgramKind::Speculate, &[3, 0, 7, 1, 2, 6, 5, 4]),
        ] {
            let mut executor = crate::executor(place, &plan, tensors.clone());
            let executor = &mut *executor;
            crate::write_greedy(executor, &plan);
            let (before, ids) = (text(&plan, 16), text(&plan, order.len() as u32));
            let mut run = |order: Option<&[usize]>| {
                let shape = crate::begin(executor, &plan, &before, 0);
                crate::run(executor, &plan, ProgramKind::Prefill, shape).unwrap();
                let shape = crate::begin(executor, &plan, &ids, 16);
                if let Some(order) = order {
                    let token = |&i: &usize| Token {
                        id: ids[i],
                        position: 16 + i as u32,
                        ..Token::default()
                    };
                    let tokens: Vec<Token> = order.iter().map(token).collect();
                    executor.write(plan.buffers.batch, &batch_words(&tokens)).unwrap();
                }
                crate::run(executor, &plan, kind, shape).unwrap();
                let logits = plan.program(kind).output.unwrap();
                executor.read(logits, 0, stride * ids.len()).unwrap()
            };
            let (wanted, found) = (run(None), run(Some(order)));
            for (row, &token) in order.iter().enumerate() {
                let [found, wanted] =
                    [(&found, row), (&wanted, token)].map(|(all, row)| &all[row * stride..][..stride]);
                assert!(found == wanted, "{place:?}, {}, token {token}", kind.name());
            }
        }
    }
}
