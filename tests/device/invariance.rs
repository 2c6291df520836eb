//! A token's results do not depend on how many tokens run with it, nor on the kernel that computes them: bit by bit, on the
//! device.

use cmf_gpu::dtype::Dtype;
use cmf_gpu::op::BufferId;
use cmf_gpu::parity::{self, Rig, Round};
use std::ops::Range;

fn rig(name: &str) -> Rig {
    crate::case(name).rig(crate::device().max_binding()).unwrap()
}

/// Words of a token's row of a buffer.
fn row_words(rig: &Rig, label: &str) -> usize {
    let buffer = rig.buffer(label).unwrap();
    let rows = rig.rows.iter().find(|rows| rows.buffer == buffer).unwrap();
    assert_eq!(rows.first, 0, "{label}");
    rows.words
}

/// The round with 64 tokens.
fn long(rig: &Rig) -> &Round {
    rig.rounds.iter().find(|round| round.tokens.len() == 64).unwrap()
}

/// A round of some tokens of another round.
fn part(rig: &Rig, round: &Round, tokens: Range<usize>) -> Round {
    let input = |(buffer, words): &(BufferId, Vec<u32>)| {
        let rows = rig.rows.iter().find(|rows| rows.buffer == *buffer);
        let words = match rows {
            Some(rows) => &words[tokens.start * rows.words..tokens.end * rows.words],
            None => &words[..],
        };
        (*buffer, words.to_vec())
    };
    Round::new(
        round.tokens[tokens.clone()].to_vec(),
        round.inputs.iter().map(input).collect(),
    )
}

/// The words that one round leaves in the only buffer that the rig writes.
fn output(rig: &Rig, round: Round) -> Vec<u32> {
    let rig = Rig {
        rounds: vec![round],
        ..rig.clone()
    };
    let mut all = parity::outputs(&crate::device(), &rig).unwrap();
    assert_eq!(all.len(), 1);
    all.remove(0)
}

#[test]
fn tokens_do_not_depend_on_each_other() {
    for kind in ["matmul", "matmul_add", "matmul_glu"] {
        for dtype in Dtype::all() {
            let (dtype, cols) = (dtype.name(), 96usize.next_multiple_of(dtype.row_multiple()));
            let name = match kind {
                "matmul_glu" => format!("{kind}.{dtype} 5+5x{cols} bias gelu"),
                _ => format!("{kind}.{dtype} 5x{cols} bias"),
            };
            let rig = rig(&name);
            let stride = row_words(&rig, if kind == "matmul_add" { "h" } else { "y" });
            let run = |tokens: Range<usize>| {
                let words = output(&rig, part(&rig, long(&rig), tokens.clone()));
                words[..tokens.len() * stride].to_vec()
            };
            let all = run(0..64);
            for (first, count) in [(0, 1), (63, 1), (5, 3), (8, 9), (31, 33)] {
                let wanted = &all[first * stride..(first + count) * stride];
                assert!(
                    run(first..first + count) == wanted,
                    "{name}: {count} tokens from {first}"
                );
            }
        }
    }
}

#[test]
fn attention_in_blocks_and_in_chunks_gives_the_same_bits() {
    for kv in ["f16", "f32"] {
        for what in [
            "9/3 heads of 64",
            "9/3 heads of 64 window 8",
            "14/2 heads of 64 window 64 softcap",
            "2/1 heads of 256 window 100",
            "7/1 heads of 48 softcap",
        ] {
            let chunk = rig(&format!("attn_chunk.{kv} {what}"));
            let block = rig(&format!("attn_block.{kv} {what}"));
            let merge = rig(&format!("attn_merge {what}"));
            let long = long(&chunk);
            let y = output(&chunk, long.clone());
            let (stride, partial_words) = (row_words(&chunk, "y"), row_words(&block, "partial"));
            for t in [0, 1, 2, 3, 7, 31, 63] {
                let one = part(&chunk, long, t..t + 1);
                // The same inputs, by their labels.
                let inputs_of = |rig: &Rig| -> Vec<(BufferId, Vec<u32>)> {
                    let label = |buffer: BufferId| &chunk.graph.buffers[buffer].label;
                    let input =
                        |(buffer, words): &(BufferId, Vec<u32>)| (rig.buffer(label(*buffer)).unwrap(), words.clone());
                    one.inputs.iter().map(input).collect()
                };
                let mut partial = output(&block, Round::new(one.tokens.clone(), inputs_of(&block)));
                partial.truncate(partial_words);
                let partial = (merge.buffer("partial").unwrap(), partial);
                let found = output(&merge, Round::new(one.tokens.clone(), vec![partial]));
                assert!(found[..stride] == y[t * stride..][..stride], "{kv} {what}: token {t}");
            }
        }
    }
}
