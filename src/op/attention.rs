//! Shared by the host implementations of the attention operators: shapes, and the addresses of positions in the cache.

use super::constants::KV_PAGE;
use super::host::{Operands, slice};
use super::kv::Kv;
use super::operator::KvRead;
use super::tokens::Token;
use crate::error::{Result, bail};
use cmf_kernels_ref::op::delta_net::sigmoid;
use half::f16;
use std::ops::Range;

/// The shape of attention. Lengths are in elements.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub heads: usize,
    pub kv_heads: usize,
    /// Elements of a head.
    pub head: usize,
    pub scale: f64,
    pub softcap: Option<f64>,
    /// Positions that a token sees, its own included; 0 = all.
    pub window: usize,
    /// Elements from one query head to the next. If that is more than a head has, the output gate follows the query.
    pub query: usize,
}

/// The shape that an operator's parameters describe; all attention operators have these fields.
macro_rules! shape {
    ($params:expr) => {
        $crate::op::attention::Shape {
            heads: $params.heads as usize,
            kv_heads: $params.kv_heads as usize,
            head: $params.head_vectors as usize * 4,
            scale: f64::from($params.scale),
            softcap: ($params.softcap != 0.0).then_some(f64::from($params.softcap)),
            window: $params.window as usize,
            query: $params.query_vectors as usize * 4,
        }
    };
}
pub(super) use shape;

impl Shape {
    /// The positions that a query at `position` sees.
    pub fn visible(&self, position: usize) -> Range<usize> {
        let first = match self.window {
            0 => 0,
            window => (position + 1).saturating_sub(window),
        };
        first..position + 1
    }

    pub fn kv_head(&self, head: usize) -> usize {
        head / (self.heads / self.kv_heads)
    }

    pub fn kv_read(&self, tokens: u32) -> KvRead {
        KvRead {
            kv_heads: self.kv_heads as u64,
            head: self.head as u64,
            window: self.window as u32,
            tokens,
        }
    }

    /// The element of `qkv` at which one head of a token begins.
    fn query_at(&self, t: usize, head: usize) -> usize {
        t * (self.heads * self.query + 2 * self.kv_heads * self.head) + head * self.query
    }

    /// The query of one token and head.
    pub fn query(&self, qkv: &[f32], t: usize, head: usize) -> Result<Vec<f64>> {
        let q = slice(qkv, self.query_at(t, head), self.head, "qkv")?;
        Ok(q.iter().map(|&v| f64::from(v)).collect())
    }

    /// Multiplies the result of one token and head by sigmoid(gate), if there is a gate.
    pub fn gate(&self, qkv: &[f32], t: usize, head: usize, y: &mut [f64]) -> Result<()> {
        if self.query <= self.head {
            return Ok(());
        }
        let gate = slice(qkv, self.query_at(t, head) + self.head, y.len(), "gate")?;
        let gated = y.iter_mut().zip(gate);
        gated.for_each(|(y, &gate)| *y *= sigmoid(f64::from(gate)));
        Ok(())
    }
}

/// The rows of the key-value cache: `[pages, kv_heads, KV_PAGE]` rows of one head each.
pub(super) struct KvRows {
    pages: Vec<u32>,
    kv_heads: usize,
    slot_pages: usize,
}

impl KvRows {
    pub fn new(o: &Operands, kv_heads: usize, slot_pages: u32) -> Result<KvRows> {
        Ok(KvRows {
            pages: o.all_words("pages")?.to_vec(),
            kv_heads,
            slot_pages: slot_pages as usize,
        })
    }

    /// The row of one head at one position of a slot.
    pub fn row(&self, slot: u32, kv_head: usize, position: usize) -> Result<usize> {
        let (block, within) = (position / KV_PAGE as usize, position % KV_PAGE as usize);
        let pages = self.slot_pages;
        if block >= pages {
            bail!(Internal, "position {position} is past the {pages} pages of a slot");
        }
        let page = slice(&self.pages, slot as usize * pages + block, 1, "pages")?[0];
        Ok((page as usize * self.kv_heads + kv_head) * KV_PAGE as usize + within)
    }
}

/// Keys and values of one key-value head, by position.
pub(super) struct KvCache {
    head: usize,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl KvCache {
    /// The caches of every key-value head, up to the position of a token.
    pub fn read_all(o: &Operands, shape: &Shape, slot_pages: u32, token: &Token) -> Result<Vec<KvCache>> {
        let Shape { heads, kv_heads, .. } = *shape;
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            bail!(
                Internal,
                "{heads} query heads, expected a multiple of {kv_heads} key-value heads"
            );
        }
        let rows = KvRows::new(o, kv_heads, slot_pages)?;
        let end = token.position as usize + 1;
        let read = |name: &str, kv_head: usize| -> Result<Vec<f32>> {
            let mut all = Vec::with_capacity(end * shape.head);
            for first in (0..end).step_by(KV_PAGE as usize) {
                let count = (end - first).min(KV_PAGE as usize);
                let row = rows.row(token.slot, kv_head, first)?;
                all.extend(cached(o, name, row * shape.head, count * shape.head)?);
            }
            Ok(all)
        };
        let one = |kv_head: usize| {
            Ok(KvCache {
                head: shape.head,
                k: read("k_cache", kv_head)?,
                v: read("v_cache", kv_head)?,
            })
        };
        (0..kv_heads).map(one).collect()
    }

    pub fn k(&self, position: usize) -> &[f32] {
        &self.k[position * self.head..][..self.head]
    }

    pub fn v(&self, position: usize) -> &[f32] {
        &self.v[position * self.head..][..self.head]
    }
}

/// `len` elements of a cache from `at`.
fn cached(o: &Operands, name: &str, at: usize, len: usize) -> Result<Vec<f32>> {
    Ok(match o.kv {
        Kv::F32 => o.floats(name, at, len)?.to_vec(),
        Kv::F16 => {
            let halves: &[u16] = bytemuck::cast_slice(o.all_words(name)?);
            let halves = slice(halves, at, len, name)?;
            halves.iter().map(|&bits| f16::from_bits(bits).to_f32()).collect()
        }
    })
}

/// Rounds elements to the cache's type and stores them from element `at`.
pub(super) fn append(o: &mut Operands, name: &str, at: usize, values: &[f64]) -> Result<()> {
    if o.kv == Kv::F32 {
        return o.store(name, at, values);
    }
    let len = values.len();
    if !at.is_multiple_of(2) || !len.is_multiple_of(2) {
        bail!(Internal, "{len} f16 from element {at}, expected whole words");
    }
    let to = o.words_mut(name, at / 2, len / 2)?;
    for (word, pair) in to.iter_mut().zip(values.chunks_exact(2)) {
        // The device computes in f32 and rounds that.
        let [low, high] = [pair[0], pair[1]].map(|v| u32::from(f16::from_f32(v as f32).to_bits()));
        *word = low | high << 16;
    }
    Ok(())
}
