//! A column's result does not depend on how many columns run with it, nor on the kernel that computes it: to the bit, on the
//! device.

use cmf_gpu::dtype::Dtype;
use cmf_gpu::parity::{self, Rig, Round};
use cmf_gpu::program::{BufferId, Ctl, Extent};
use std::collections::BTreeMap;

fn rig(name: &str) -> Rig {
    crate::case(name).rig(crate::device().max_binding()).unwrap()
}

fn buffer(rig: &Rig, label: &str) -> BufferId {
    let found = rig.plan.buffers.iter().position(|buffer| buffer.label == label);
    found.unwrap_or_else(|| panic!("no buffer {label}"))
}

/// A run of `columns` from `pos` over these buffers.
fn round(rig: &Rig, pos: u32, columns: u32, inputs: &[(&str, Vec<u32>)]) -> Round {
    let ctl = Ctl {
        pos,
        columns,
        ..Ctl::default()
    };
    let named = inputs.iter().map(|(label, words)| (buffer(rig, label), words.clone()));
    let ctl = (rig.plan.fixed.ctl, bytemuck::cast_slice(&[ctl]).to_vec());
    Round {
        name: String::new(),
        inputs: named.chain([ctl]).collect(),
        extent: Extent {
            columns,
            end: pos + columns,
        },
    }
}

/// What one round leaves in the only buffer that the rig writes.
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
fn columns_do_not_see_each_other() {
    for kind in ["matmul", "matmul_add", "matmul_glu"] {
        for dtype in Dtype::all().map(Dtype::name) {
            let name = match kind {
                "matmul_glu" => format!("{kind}.{dtype} 5+5x96 bias gelu"),
                _ => format!("{kind}.{dtype} 5x96 bias"),
            };
            let rig = rig(&name);
            let most = rig.rounds.iter().max_by_key(|round| round.extent.columns).unwrap();
            let inputs: BTreeMap<_, _> = most.inputs.iter().cloned().collect();
            let (x, y) = (buffer(&rig, "x"), buffer(&rig, "y"));
            let y_stride = 32;
            let run = |first: usize, columns: usize| {
                let part = |buffer: BufferId, stride: usize| -> Vec<u32> {
                    let words = inputs.get(&buffer).map_or(&[][..], Vec::as_slice);
                    match words.is_empty() {
                        true => Vec::new(),
                        false => words[first * stride..(first + columns) * stride].to_vec(),
                    }
                };
                let inputs = [("x", part(x, 96)), ("y", part(y, y_stride))];
                let words = output(&rig, round(&rig, 0, columns as u32, &inputs));
                words[..columns * y_stride].to_vec()
            };
            let all = run(0, 64);
            for (first, columns) in [(0, 1), (63, 1), (5, 3), (8, 9), (31, 33)] {
                let wanted = &all[first * y_stride..(first + columns) * y_stride];
                assert!(run(first, columns) == wanted, "{name}: {columns} columns from {first}");
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
            let long = chunk.rounds.iter().find(|round| round.extent.columns == 64).unwrap();
            let (pos, columns) = (long.extent.end - 64, 64);
            let input = |label: &str| {
                let id = buffer(&chunk, label);
                let found = long.inputs.iter().find(|(buffer, _)| *buffer == id);
                found.unwrap().1.clone()
            };
            let (qkv, k, v) = (input("qkv"), input("k_cache"), input("v_cache"));
            let y = output(&chunk, long.clone());
            let stride = qkv.len() / columns;
            let words: Vec<u32> = what.split(['/', ' ']).filter_map(|word| word.parse().ok()).collect();
            let y_len = (words[0] * words[2]) as usize;
            for c in [0, 1, 2, 3, 7, 31, 63] {
                let q = qkv[c * stride..][..stride].to_vec();
                let at = pos + c as u32;
                let inputs = [("qkv", q), ("k_cache", k.clone()), ("v_cache", v.clone())];
                let part = output(&block, round(&block, at, 1, &inputs));
                let found = output(&merge, round(&merge, at, 1, &[("part", part)]));
                // A column of y has one vector to spare.
                let wanted = &y[c * (y_len + 4)..][..y_len];
                assert!(&found[..y_len] == wanted, "{kv} {what}: column {c}");
            }
        }
    }
}
