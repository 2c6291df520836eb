//! Rotary positions, the key-value caches, and attention: whole, or in the blocks that a decode step is cut into.

use super::{Bound, part};
use crate::error::{Result, bail};
use crate::kernel::{self, Kv};
use crate::program::ATTENTION_BLOCK;
use cmf_kernels_ref::op::attention::{Block, attend, block, join};
use cmf_kernels_ref::op::delta_net::sigmoid;
use cmf_kernels_ref::op::rms_norm::rms_norm;
use cmf_kernels_ref::op::rope::rotate_half;
use half::f16;
use rayon::prelude::*;
use std::ops::Range;

/// What the attention operators have in common.
#[derive(Clone, Copy)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    /// Elements of a head.
    head: usize,
    /// Positions the caches hold.
    positions: usize,
    scale: f64,
    softcap: Option<f64>,
    window: usize,
    /// Elements from one query head to the next; more than a head has: its gate follows.
    query: usize,
}

/// The shape that parameters describe; the operators' structs have the same fields.
macro_rules! shape {
    ($p:expr, $positions:expr) => {
        Shape {
            heads: $p.heads as usize,
            kv_heads: $p.kv_heads as usize,
            head: $p.head_vectors as usize * 4,
            positions: $positions as usize,
            scale: f64::from($p.scale),
            softcap: ($p.softcap != 0.0).then_some(f64::from($p.softcap)),
            window: $p.window as usize,
            query: $p.query_vectors as usize * 4,
        }
    };
}

impl Shape {
    /// The positions that a query at `pos` sees.
    fn visible(&self, pos: usize) -> Range<usize> {
        let first = match self.window {
            0 => 0,
            window => (pos + 1).saturating_sub(window),
        };
        first..pos + 1
    }

    fn kv_head(&self, head: usize) -> usize {
        head / (self.heads / self.kv_heads)
    }
}

/// Keys and values of one key-value head.
struct Cached {
    head: usize,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Cached {
    fn k(&self, position: usize) -> &[f32] {
        &self.k[position * self.head..][..self.head]
    }

    fn v(&self, position: usize) -> &[f32] {
        &self.v[position * self.head..][..self.head]
    }
}

impl Bound<'_> {
    /// Elements `at..at + len` of a cache.
    fn cached(&self, i: usize, at: usize, len: usize) -> Result<Vec<f32>> {
        Ok(match self.plan.kv {
            Kv::F32 => part(self.floats(i)?, at, len, "cache")?.to_vec(),
            Kv::F16 => {
                let halves: &[u16] = bytemuck::cast_slice(self.words(i)?);
                let halves = part(halves, at, len, "cache")?;
                halves.iter().map(|&bits| f16::from_bits(bits).to_f32()).collect()
            }
        })
    }

    /// Rounds elements to the cache's type and stores them from element `at`.
    fn append(&mut self, i: usize, at: usize, values: &[f64]) -> Result<()> {
        match self.plan.kv {
            Kv::F32 => self.store(i, at, values),
            Kv::F16 => {
                if !at.is_multiple_of(2) || !values.len().is_multiple_of(2) {
                    bail!(Usage, "{} halves from {at} are no whole words", values.len());
                }
                let to = self.words_mut(i, at / 2, values.len() / 2)?;
                for (word, pair) in to.iter_mut().zip(values.chunks_exact(2)) {
                    // The device rounds what it computed in f32.
                    let [low, high] = [pair[0], pair[1]].map(|v| u32::from(f16::from_f32(v as f32).to_bits()));
                    *word = low | high << 16;
                }
                Ok(())
            }
        }
    }

    /// Keys (binding 2) and values (binding 3) of every key-value head, up to the last position of this run.
    fn caches(&self, shape: &Shape, end: usize) -> Result<Vec<Cached>> {
        if shape.kv_heads == 0 || !shape.heads.is_multiple_of(shape.kv_heads) || end > shape.positions {
            let Shape {
                heads,
                kv_heads,
                positions,
                ..
            } = shape;
            bail!(Usage, "{heads} heads over {kv_heads}, {end} of {positions} positions");
        }
        let read = |i: usize, kv_head: usize| self.cached(i, kv_head * shape.positions * shape.head, end * shape.head);
        let one = |kv_head: usize| {
            Ok(Cached {
                head: shape.head,
                k: read(2, kv_head)?,
                v: read(3, kv_head)?,
            })
        };
        (0..shape.kv_heads).map(one).collect()
    }

    /// The query of one column and head.
    fn query(&self, shape: &Shape, c: usize, head: usize) -> Result<Vec<f64>> {
        let at = c * (shape.heads * shape.query + 2 * shape.kv_heads * shape.head) + head * shape.query;
        let q = part(self.floats(1)?, at, shape.head, "qkv")?;
        Ok(q.iter().map(|&v| f64::from(v)).collect())
    }

    /// Multiplies what one column and head read by sigmoid(gate), if there is a gate. `qkv` is binding `i`.
    fn gate(&self, shape: &Shape, i: usize, c: usize, head: usize, y: &mut [f64]) -> Result<()> {
        let Shape {
            heads,
            kv_heads,
            head: head_dim,
            query,
            ..
        } = *shape;
        if query <= head_dim {
            return Ok(());
        }
        let at = c * (heads * query + 2 * kv_heads * head_dim) + head * query + head_dim;
        let gate = part(self.floats(i)?, at, y.len(), "gate")?;
        y.iter_mut()
            .zip(gate)
            .for_each(|(y, &gate)| *y *= sigmoid(f64::from(gate)));
        Ok(())
    }

    pub(super) fn rope(&mut self, p: &kernel::Rope) -> Result<()> {
        let ctl = self.ctl(0)?;
        let (heads, kv_heads, head_dim) = (p.heads as usize, p.kv_heads as usize, p.head_vectors as usize * 4);
        let (pairs, positions) = (p.rot_vectors as usize * 4, p.positions as usize);
        let query = p.query_vectors as usize * 4;
        for c in 0..ctl.columns as usize {
            let pos = ctl.pos as usize + c;
            if pos >= positions {
                bail!(Usage, "position {pos} of {positions}");
            }
            let table = part(self.floats(1)?, pos * pairs * 2, pairs * 2, "table")?;
            let cos: Vec<f32> = table.iter().step_by(2).copied().collect();
            let sin: Vec<f32> = table.iter().skip(1).step_by(2).copied().collect();
            for head in 0..heads + 2 * kv_heads {
                let at = c * (heads * query + 2 * kv_heads * head_dim)
                    + match head < heads {
                        true => head * query,
                        false => heads * query + (head - heads) * head_dim,
                    };
                let x = part(self.floats(4)?, at, head_dim, "qkv")?;
                let mut values: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
                let cache = |kv_head: usize| (kv_head * positions + pos) * head_dim;
                if head >= heads + kv_heads {
                    if p.v_norm != 0 {
                        rms_norm(x, &vec![1.0; head_dim], f64::from(p.eps), &mut values);
                    }
                    self.append(6, cache(head - heads - kv_heads), &values)?;
                    continue;
                }
                let weight = part(self.floats(if head < heads { 2 } else { 3 })?, 0, head_dim, "norm");
                if p.qk_norm == 1 {
                    rms_norm(x, weight.clone()?, f64::from(p.eps), &mut values);
                }
                if 2 * pairs > head_dim {
                    bail!(Usage, "{pairs} pairs in a head of {head_dim}");
                }
                rotate_half(&mut values, &cos, &sin);
                if p.qk_norm == 2 {
                    let mean = values.iter().map(|v| v * v).sum::<f64>() / head_dim as f64;
                    let factor = 1.0 / (mean + f64::from(p.eps)).sqrt();
                    values
                        .iter_mut()
                        .zip(weight?)
                        .for_each(|(v, &w)| *v *= factor * f64::from(w));
                }
                match head < heads {
                    true => self.store(4, at, &values)?,
                    false => self.append(5, cache(head - heads), &values)?,
                }
            }
        }
        Ok(())
    }

    pub(super) fn attn_block(&mut self, p: &kernel::AttnBlock) -> Result<()> {
        let heads: Vec<usize> = (0..p.heads as usize).collect();
        self.blocks(&shape!(p, p.positions), p.blocks as usize, &heads, 4)
    }

    pub(super) fn attn_block_some(&mut self, p: &kernel::AttnBlock) -> Result<()> {
        let (heads, _) = self.listed_heads(4, p.heads)?;
        self.blocks(&shape!(p, p.positions), p.blocks as usize, &heads, 5)
    }

    /// The records of these heads' blocks, into binding `to`.
    fn blocks(&mut self, shape: &Shape, blocks: usize, heads: &[usize], to: usize) -> Result<()> {
        let ctl = self.ctl(0)?;
        let columns = ctl.columns as usize;
        let caches = self.caches(shape, ctl.pos as usize + columns)?;
        for c in 0..columns {
            let visible = shape.visible(ctl.pos as usize + c);
            let size = ATTENTION_BLOCK as usize;
            for &head in heads {
                let q = self.query(shape, c, head)?;
                let cached = &caches[shape.kv_head(head)];
                for number in visible.start / size..visible.end.div_ceil(size) {
                    let here = visible.start.max(number * size)..visible.end.min((number + 1) * size);
                    let part = block(&q, here, |p| cached.k(p), |p| cached.v(p), shape.scale, shape.softcap);
                    let mut record = vec![part.largest, part.total, 0.0, 0.0];
                    record.extend(part.sum);
                    let at = (c * shape.heads + head) * blocks + number;
                    self.store(to, at * record.len(), &record)?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn attn_merge(&mut self, p: &kernel::AttnMerge) -> Result<()> {
        let heads: Vec<usize> = (0..p.heads as usize).collect();
        self.merged(&shape!(p, 0), [p.blocks, p.y_stride].map(|n| n as usize), &heads, 3)
    }

    pub(super) fn attn_merge_some(&mut self, p: &kernel::AttnMerge) -> Result<()> {
        let (heads, others) = self.listed_heads(3, p.heads)?;
        let shape = shape!(p, 0);
        for c in 0..self.ctl(0)?.columns as usize {
            for head in &others {
                self.store(
                    4,
                    c * p.y_stride as usize * 4 + head * shape.head,
                    &vec![0.0; shape.head],
                )?;
            }
        }
        self.merged(&shape, [p.blocks, p.y_stride].map(|n| n as usize), &heads, 4)
    }

    /// The records of these heads' blocks together, into binding `to`.
    fn merged(&mut self, shape: &Shape, [blocks, y_stride]: [usize; 2], heads: &[usize], to: usize) -> Result<()> {
        let ctl = self.ctl(0)?;
        for c in 0..ctl.columns as usize {
            let visible = shape.visible(ctl.pos as usize + c);
            let size = ATTENTION_BLOCK as usize;
            for &head in heads {
                let base = (c * shape.heads + head) * blocks;
                let read = |number: usize| {
                    let length = 4 + shape.head;
                    let record = part(self.floats(1)?, (base + number) * length, length, "part")?;
                    Ok(Block {
                        largest: f64::from(record[0]),
                        total: f64::from(record[1]),
                        sum: record[4..].iter().map(|&v| f64::from(v)).collect(),
                    })
                };
                let numbers = visible.start / size..visible.end.div_ceil(size);
                let blocks = numbers.map(read).collect::<Result<Vec<_>>>()?;
                let mut y = vec![0.0; shape.head];
                join(&blocks, &mut y);
                self.gate(shape, 2, c, head, &mut y)?;
                self.store(to, c * y_stride * 4 + head * shape.head, &y)?;
            }
        }
        Ok(())
    }

    pub(super) fn attn_chunk(&mut self, p: &kernel::AttnChunk) -> Result<()> {
        let heads: Vec<usize> = (0..p.heads as usize).collect();
        self.attended(&shape!(p, p.positions), p.y_stride as usize, &heads, 4)
    }

    pub(super) fn attn_chunk_some(&mut self, p: &kernel::AttnChunk) -> Result<()> {
        let (heads, _) = self.listed_heads(4, p.heads)?;
        self.attended(&shape!(p, p.positions), p.y_stride as usize, &heads, 5)
    }

    /// What these heads read, into binding `to`.
    fn attended(&mut self, shape: &Shape, y_stride: usize, heads: &[usize], to: usize) -> Result<()> {
        let ctl = self.ctl(0)?;
        let columns = ctl.columns as usize;
        let caches = self.caches(shape, ctl.pos as usize + columns)?;
        let this = &*self;
        let place = |i: usize| (i / heads.len(), heads[i % heads.len()]);
        let results = (0..columns * heads.len()).into_par_iter().map(|i| {
            let (c, head) = place(i);
            let q = this.query(shape, c, head)?;
            let cached = &caches[shape.kv_head(head)];
            let visible = shape.visible(ctl.pos as usize + c);
            let mut y = vec![0.0; shape.head];
            attend(
                &q,
                visible,
                |p| cached.k(p),
                |p| cached.v(p),
                shape.scale,
                shape.softcap,
                &mut y,
            );
            this.gate(shape, 1, c, head, &mut y)?;
            Ok(y)
        });
        let results: Vec<Vec<f64>> = results.collect::<Result<_>>()?;
        for (i, y) in results.iter().enumerate() {
            let (c, head) = place(i);
            self.store(to, c * y_stride * 4 + head * shape.head, y)?;
        }
        Ok(())
    }
}
