//! Rigs of rotary positions and attention, with caches that hold nothing past the run's end.

use super::random::words;
use super::{CTL, Maker, POSITIONS, UNSET};
use crate::container::Tensors;
use crate::error::Result;
use crate::kernel::{self, Kv, Op};
use crate::parity::cases::{Attention, Part, Rope};
use crate::program::{ATTENTION_BLOCK, Bind, Content, Fill};
use half::f16;
use std::sync::Arc;

/// The heads that a list leaves.
fn attended(head: usize) -> bool {
    head % 2 == 1
}

impl Maker {
    /// A cache of which the positions before `end` are set, of every head that is `read`.
    fn cache(&mut self, kv_heads: u32, head_dim: u32, end: u32, read: &dyn Fn(usize) -> bool) -> Vec<u32> {
        let (head, all) = (
            (POSITIONS * head_dim) as usize,
            (kv_heads * POSITIONS * head_dim) as usize,
        );
        let mut values = self.random.floats(all, 1.0);
        for (number, kv_head) in values.chunks_exact_mut(head).enumerate() {
            let set = if read(number) { end * head_dim } else { 0 };
            kv_head[set as usize..].fill(f32::from_bits(UNSET));
        }
        match self.kv {
            Kv::F32 => words(&values),
            Kv::F16 => {
                let half = |value: f32| u32::from(f16::from_f32(value).to_bits());
                values
                    .chunks_exact(2)
                    .map(|pair| half(pair[0]) | half(pair[1]) << 16)
                    .collect()
            }
        }
    }

    fn cache_words(&self, kv_heads: u32, head_dim: u32) -> usize {
        (u64::from(kv_heads * POSITIONS * head_dim) * self.kv.bytes() / 4) as usize
    }

    pub(super) fn rope(&mut self, spec: &Rope) -> Result<Arc<dyn Tensors>> {
        self.kv = spec.kv;
        let most = spec.runs.iter().map(|run| run.1).max().unwrap_or(1);
        let query = if spec.gated { 2 * spec.head_dim } else { spec.head_dim };
        let stride = spec.heads * query + 2 * spec.kv_heads * spec.head_dim;
        let q_norm = self.vector("q_norm", spec.head_dim as usize)?;
        let k_norm = self.vector("k_norm", spec.head_dim as usize)?;
        let table = self.buffer("table", (POSITIONS * spec.rot) as usize);
        let qkv = self.buffer("qkv", (stride * most) as usize);
        let cache_words = self.cache_words(spec.kv_heads, spec.head_dim);
        let (k_cache, v_cache) = (self.buffer("k_cache", cache_words), self.buffer("v_cache", cache_words));
        let op = Op::Rope(kernel::Rope {
            heads: spec.heads,
            kv_heads: spec.kv_heads,
            head_vectors: spec.head_dim / 4,
            rot_vectors: spec.rot / 8,
            positions: POSITIONS,
            eps: 1e-2,
            qk_norm: spec.qk_norm,
            v_norm: u32::from(spec.v_norm),
            query_vectors: query / 4,
        });
        let buffers = [qkv, k_cache, v_cache].map(Bind::Buffer);
        let first = [Bind::Buffer(CTL), Bind::Buffer(table), q_norm, k_norm];
        self.step(op, [&first[..], &buffers].concat());
        let fill = Fill::Rope {
            inv_freq: (0..spec.rot / 2)
                .map(|i| 0.7 * 100f32.powf(-2.0 * i as f32 / spec.rot as f32))
                .collect(),
            factor: 1.1,
            positions: POSITIONS,
        };
        let rows: Vec<f32> = (0..POSITIONS).flat_map(|position| fill.rope_row(position)).collect();
        for &(pos, columns) in &spec.runs {
            let values = self.random.words((stride * columns) as usize, 1.0);
            self.round(pos, columns, vec![(table, words(&rows)), (qkv, values)]);
        }
        self.tensors()
    }

    pub(super) fn attention(&mut self, spec: &Attention) -> Result<Arc<dyn Tensors>> {
        self.kv = spec.kv;
        let Attention {
            heads,
            kv_heads,
            head_dim,
            window,
            softcap,
            gated,
            ..
        } = *spec;
        let query = if gated { 2 * head_dim } else { head_dim };
        let query_vectors = query / 4;
        let most = spec.runs.iter().map(|run| run.1).max().unwrap_or(1);
        let head_vectors = head_dim / 4;
        let scale = 1.0 / (head_dim as f32).sqrt();
        let blocks = POSITIONS.div_ceil(ATTENTION_BLOCK);
        let positions = POSITIONS;
        let stride = heads * query + 2 * kv_heads * head_dim;
        let part_len = (heads * blocks * (4 + head_dim)) as usize;
        // One vector more than a column needs.
        let y_stride = heads * head_vectors + 1;
        let qkv = self.buffer("qkv", (stride * most) as usize);
        let cache_words = self.cache_words(kv_heads, head_dim);
        let (k_cache, v_cache) = (self.buffer("k_cache", cache_words), self.buffer("v_cache", cache_words));
        let part = self.buffer("part", part_len * most as usize);
        let y = self.buffer("y", (y_stride * 4 * most) as usize);
        let content = Content::Heads { heads, kv_heads };
        let list = spec.some.then(|| self.buffer("list", content.len()));
        let (op, mut buffers) = match spec.part {
            Part::Block => {
                let params = kernel::AttnBlock {
                    heads,
                    kv_heads,
                    head_vectors,
                    positions,
                    blocks,
                    scale,
                    softcap,
                    window,
                    query_vectors,
                };
                let op = if spec.some { Op::AttnBlockSome } else { Op::AttnBlock };
                (op(params), vec![CTL, qkv, k_cache, v_cache, part])
            }
            Part::Merge => {
                let params = kernel::AttnMerge {
                    heads,
                    kv_heads,
                    head_vectors,
                    blocks,
                    scale,
                    softcap,
                    window,
                    y_stride,
                    query_vectors,
                };
                let op = if spec.some { Op::AttnMergeSome } else { Op::AttnMerge };
                (op(params), vec![CTL, part, qkv, y])
            }
            Part::Chunk => {
                let params = kernel::AttnChunk {
                    heads,
                    kv_heads,
                    head_vectors,
                    positions,
                    scale,
                    softcap,
                    window,
                    y_stride,
                    query_vectors,
                };
                let op = if spec.some { Op::AttnChunkSome } else { Op::AttnChunk };
                (op(params), vec![CTL, qkv, k_cache, v_cache, y])
            }
        };
        // The list comes before what is written.
        if let Some(list) = list {
            buffers.insert(buffers.len() - 1, list);
        }
        self.step(op, buffers.into_iter().map(Bind::Buffer).collect());
        for &(pos, columns) in &spec.runs {
            let end = pos + columns;
            let mut inputs = match spec.part {
                Part::Merge => {
                    let q = self.random.words((stride * columns) as usize, 3.0);
                    vec![(part, self.blocks(spec, pos, columns, blocks)), (qkv, q)]
                }
                Part::Block | Part::Chunk => {
                    // Large queries, so that some keys stand out.
                    let q = self.random.words((stride * columns) as usize, 8.0);
                    let read = |kv_head: usize| {
                        let group = (heads / kv_heads) as usize;
                        !spec.some || (kv_head * group..(kv_head + 1) * group).any(attended)
                    };
                    let [k, v] = [(); 2].map(|()| self.cache(kv_heads, head_dim, end, &read));
                    vec![(qkv, q), (k_cache, k), (v_cache, v)]
                }
            };
            inputs.extend(list.map(|list| (list, content.words(&attended))));
            self.round(pos, columns, inputs);
        }
        self.tensors()
    }

    /// What attn_block leaves for attn_merge: records of attended heads' visible blocks, the others unset.
    fn blocks(&mut self, spec: &Attention, pos: u32, columns: u32, blocks: u32) -> Vec<u32> {
        let mut all = Vec::new();
        for pos in pos..pos + columns {
            let first = if spec.window == 0 {
                0
            } else {
                (pos + 1).saturating_sub(spec.window)
            };
            let visible = first / ATTENTION_BLOCK..=pos / ATTENTION_BLOCK;
            let records = (0..spec.heads as usize).flat_map(|head| (0..blocks).map(move |number| (head, number)));
            for (head, number) in records {
                if !visible.contains(&number) || spec.some && !attended(head) {
                    all.resize(all.len() + 4 + spec.head_dim as usize, UNSET);
                    continue;
                }
                let largest = self.random.floats(1, 9.0)[0];
                let total = 1.0 + self.random.floats(1, 1.0)[0].abs() * 30.0;
                all.extend(words(&[largest, total, 0.0, 0.0]));
                all.extend(self.random.words(spec.head_dim as usize, total));
            }
        }
        all
    }
}
