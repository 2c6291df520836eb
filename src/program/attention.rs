//! Softmax attention as steps: projections, rotation and append, blocks and merge (decode) or chunks (prefill), output.

use super::masking::{Part, Shared};
use super::place::{Masked, Place, Side};
use super::walk::{Mode, Source, Walk};
use super::weights::may_follow;
use super::{ATTENTION_BLOCK, Bind, Fill, Stacking, VectorId};
use crate::error::{Result, bail};
use crate::kernel::{self, Op};
use crate::model::{Attention, Layer, Linear};

impl Walk<'_> {
    /// Both modes of h += attention(norm(h)).
    pub(super) fn attention(
        &mut self,
        place: Place,
        layer: &Layer,
        attention: &Attention,
        [norm, next_norm]: [VectorId; 2],
    ) -> Result<()> {
        let name = |part: &str| format!("{place}.attn.{part}");
        let model = self.model;
        let (decode, prefill) = (self.decode, self.prefill);
        let head_vectors = (model.head_dim / 4) as u32;
        let query_vectors = if attention.gated {
            2 * head_vectors
        } else {
            head_vectors
        };
        let (heads, kv_heads) = (attention.heads as u32, attention.kv_heads as u32);
        let positions = self.b.options.ctx;
        let blocks = positions.div_ceil(ATTENTION_BLOCK);
        let cache_elements = (attention.kv_heads * model.head_dim) as u64 * u64::from(positions);
        let cache_bytes = cache_elements * self.b.options.kv.bytes();
        let k_cache = self.b.buffer(name("k_cache"), cache_bytes, Fill::Zero)?;
        let v_cache = self.b.buffer(name("v_cache"), cache_bytes, Fill::Zero)?;

        self.norm(norm, &name("norm"));
        let elements = query_vectors as usize * 4;
        // Keys and values that only masked heads would read are not made either.
        let shared = Shared {
            by: attention.heads.checked_div(attention.kv_heads).unwrap_or(0),
            per: model.head_dim,
            count: attention.kv_heads,
        };
        let queries = self.masked(place, Part::Heads, attention.heads, elements);
        let queries = queries.map(|queries| Masked {
            shared: Some(shared),
            ..queries
        });
        let from = [Mode::Decode, Mode::Prefill].map(|mode| self.at(mode));
        self.projections(&name("qkv"), &attention.projections.iter().collect::<Vec<_>>())?;
        self.narrow(from[0], queries, Side::Rows)?;
        self.narrow_chunk(from[1], queries, Side::Rows)?;

        let head_norms = match [attention.q_norm, attention.k_norm] {
            [Some(q), Some(k)] => Some([self.vector(name("q_norm"), q), self.vector(name("k_norm"), k)]),
            _ => None,
        };
        let rope = Op::Rope(kernel::Rope {
            heads,
            kv_heads,
            head_vectors,
            rot_vectors: (model.ropes[attention.rope].inv_freq.len() / 4) as u32,
            positions,
            eps: model.eps,
            qk_norm: match (&head_norms, attention.norm_after_rope) {
                (None, _) => 0,
                (Some(_), false) => 1,
                (Some(_), true) => 2,
            },
            v_norm: u32::from(attention.v_norm),
            query_vectors,
        });
        let [q_norm, k_norm] = head_norms.unwrap_or([self.none; 2]);
        for (mode, scratch) in [(Mode::Decode, decode), (Mode::Prefill, prefill)] {
            let bindings = vec![
                Bind::Buffer(scratch.ctl),
                Bind::Buffer(self.ropes[attention.rope]),
                Bind::Vector(q_norm),
                Bind::Vector(k_norm),
                Bind::Buffer(scratch.qkv),
                Bind::Buffer(k_cache),
                Bind::Buffer(v_cache),
            ];
            self.push(mode, &name("rope"), rope, None, bindings);
        }

        let (scale, softcap) = (model.attn_scale, model.attn_softcap);
        let window = attention.window.unwrap_or(0) as u32;
        let y_stride = Self::vectors_of(attention.heads * model.head_dim);
        let block = kernel::AttnBlock {
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
        let merge = kernel::AttnMerge {
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
        let chunk = kernel::AttnChunk {
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
        let from = [Mode::Decode, Mode::Prefill].map(|mode| self.at(mode));
        let bind = |buffers: &[usize]| buffers.iter().copied().map(Bind::Buffer).collect::<Vec<_>>();
        let to_part = bind(&[decode.ctl, decode.qkv, k_cache, v_cache, decode.part]);
        self.push(Mode::Decode, &name("block"), Op::AttnBlock(block), None, to_part);
        let to_attn = bind(&[decode.ctl, decode.part, decode.qkv, decode.attn]);
        self.push(Mode::Decode, &name("merge"), Op::AttnMerge(merge), None, to_attn);
        let to_attn = bind(&[prefill.ctl, prefill.qkv, k_cache, v_cache, prefill.attn]);
        self.push(Mode::Prefill, &name("chunk"), Op::AttnChunk(chunk), None, to_attn);

        let x = [decode.attn, prefill.attn];
        let heads = self.masked(place, Part::Heads, attention.heads, model.head_dim);
        let columns = attention.heads * model.head_dim;
        self.narrow_attention(from, heads, &name("heads"))?;
        self.silence(&[Mode::Prefill], &name("heads"), x, heads, columns)?;
        let from = [Mode::Decode, Mode::Prefill].map(|mode| self.at(mode));
        self.residual(&name("o"), &attention.o, x, layer.attn_post_norm, next_norm)?;
        self.narrow(from[0], heads, Side::Cols)?;
        self.narrow_chunk(from[1], heads, Side::Cols)
    }

    /// Sibling maps of the normalised stream into `qkv`, one behind the other: those with one device layout are stacked.
    /// Returns the vectors of 4 from one column to the next.
    pub(super) fn projections(&mut self, label: &str, siblings: &[&Linear]) -> Result<u32> {
        let total: usize = siblings.iter().map(|linear| linear.rows).sum();
        let stride = total.div_ceil(4) as u32;
        let bias = self.b.biases(format!("{label}.bias"), siblings)?;
        let mut first = 0usize;
        let mut rest = siblings;
        while let [head, ..] = rest {
            let planes = self.b.planes(head.weight)?;
            // Outputs are stored as whole vectors.
            if !first.is_multiple_of(4) {
                bail!(
                    UnsupportedModel,
                    "{label}: output {first} of {total} comes from a weight that cannot be stacked, wanted a multiple of 4"
                );
            }
            // A kernel tells three stacked tensors apart, where their scales are by column.
            let most = if planes.has_column_scales() { 3 } else { rest.len() };
            let mut same = 1;
            let mut rows = head.rows;
            while same < rest.len().min(most) && self.b.planes(rest[same].weight)? == planes && may_follow(planes, rows)
            {
                rows += rest[same].rows;
                same += 1;
            }
            let (stacked, others) = rest.split_at(same);
            let parts: Vec<_> = stacked.iter().map(|linear| linear.weight).collect();
            let matrix = self.b.matrix(label.into(), &parts, Stacking::Rows)?;
            let row0 = first as u32;
            let from = Source { matrix, bias, row0 };
            let norm = self.decode_norm();
            self.matvec(from, self.decode.x, norm, (self.decode.qkv, stride), label);
            self.matmul(from, self.prefill.x, self.prefill.qkv, stride, label);
            first += rows;
            rest = others;
        }
        Ok(stride)
    }
}
