//! Softmax attention as steps: projections, rotation and cache, blocks and merge (decode) or chunks (prefill), output.

use super::context::{Half, Lowering, Phase, Streams, vectors_of};
use super::masking::MaskUse;
use crate::error::{Result, bail};
use crate::graph::{Fill, Masked, Stacking, may_follow};
use crate::lm::masks::{Content, MaskAxis, Shared};
use crate::model::{Attention, Linear};
use crate::op::{self, Bind, BufferId, KV_PAGE};

/// Heads and caches of one layer, in the units of kernel parameters.
#[derive(Clone, Copy)]
struct Heads {
    heads: u32,
    kv_heads: u32,
    head_vectors: u32,
    query_vectors: u32,
    /// The caches of keys and values.
    k: BufferId,
    v: BufferId,
    slot_pages: u32,
}

impl Lowering<'_> {
    /// h += attention(norm(h)).
    pub fn attention(&mut self, half: &Half, attention: &Attention) -> Result<Streams> {
        let head_dim = attention.head_dim;
        let slot_pages = self.b.options.ctx.div_ceil(KV_PAGE);
        let elements = u64::from(slot_pages) * u64::from(KV_PAGE) * (attention.kv_heads * head_dim) as u64;
        let bytes = elements * self.b.options.kv.bytes();
        let query_elements = if attention.gated { 2 * head_dim } else { head_dim };
        let heads = Heads {
            heads: attention.heads as u32,
            kv_heads: attention.kv_heads as u32,
            head_vectors: (head_dim / 4) as u32,
            query_vectors: (query_elements / 4) as u32,
            k: self.b.buffer(half.name("attn.k_cache"), bytes, Fill::Zero)?,
            v: self.b.buffer(half.name("attn.v_cache"), bytes, Fill::Zero)?,
            slot_pages,
        };

        self.prefill_norm(&half.streams, half.norm, &half.name("attn.norm"));
        // A mask also leaves out keys and values that no active query head reads.
        let shared = Shared {
            by: attention.heads.checked_div(attention.kv_heads).unwrap_or(0),
            per: head_dim,
            count: attention.kv_heads,
        };
        let queries = self.masked_units(half.path, MaskAxis::Heads, attention.heads, query_elements);
        let queries = queries.map(|mut queries| {
            queries.elements.shared = Some(shared);
            MaskUse::Rows(queries)
        });
        let siblings: Vec<&Linear> = attention.projections.iter().collect();
        self.projections(&half.name("attn.qkv"), &siblings, &half.streams, queries)?;
        self.rope(half, attention, heads);

        let units = self.masked_units(half.path, MaskAxis::Heads, attention.heads, head_dim);
        let content = Content::Heads {
            heads: attention.heads,
            kv_heads: attention.kv_heads,
        };
        let list = units.map(|units| self.mask_list(half.name("attn.heads.list"), &units, content));
        let list = list.transpose()?;
        self.attend(half, attention, heads, list);
        let x = self.scratch.map(|scratch| scratch.attn);
        let columns = attention.heads * head_dim;
        self.zero_masked(&[Phase::Prefill], &half.name("attn.heads"), x, units, columns)?;
        self.residual(&half.name("attn.o"), &attention.o, x, half, units.map(MaskUse::Cols))
    }

    fn rope(&mut self, half: &Half, attention: &Attention, heads: Heads) {
        let norms = match [attention.q_norm, attention.k_norm] {
            [Some(q), Some(k)] => Some([
                self.norm_weight(half.name("attn.q_norm"), q),
                self.norm_weight(half.name("attn.k_norm"), k),
            ]),
            _ => None,
        };
        let params = op::rope::Params {
            heads: heads.heads,
            kv_heads: heads.kv_heads,
            head_vectors: heads.head_vectors,
            rot_vectors: (self.model.ropes[attention.rope].inv_freq.len() / 4) as u32,
            slot_pages: heads.slot_pages,
            positions: self.b.options.ctx,
            eps: self.model.eps,
            qk_norm: match (&norms, attention.norm_after_rope) {
                (None, _) => 0,
                (Some(_), false) => 1,
                (Some(_), true) => 2,
            },
            v_norm: u32::from(attention.v_norm),
            query_vectors: heads.query_vectors,
        };
        let [q_norm, k_norm] = norms.unwrap_or([self.zeros; 2]);
        for phase in Phase::BOTH {
            let scratch = self.scratch[phase as usize];
            let bindings = op::rope::Bindings {
                batch: Bind::Buffer(scratch.batch),
                table: Bind::Buffer(self.ropes[attention.rope]),
                q_norm: Bind::Vector(q_norm),
                k_norm: Bind::Vector(k_norm),
                qkv: Bind::Buffer(scratch.qkv),
                k_cache: Bind::Buffer(heads.k),
                v_cache: Bind::Buffer(heads.v),
                pages: Bind::Buffer(self.buffers.pages),
            };
            self.emit(phase, &half.name("attn.rope"), params, bindings);
        }
    }

    /// Attention in blocks and their merge for decoding, in chunks for prefill.
    fn attend(&mut self, half: &Half, attention: &Attention, heads: Heads, masked: Option<Masked>) {
        let Heads {
            heads,
            kv_heads,
            head_vectors,
            query_vectors,
            k,
            v,
            slot_pages,
        } = heads;
        let (scale, softcap) = (attention.scale, attention.softcap);
        let window = attention.window.unwrap_or(0) as u32;
        let y_stride = vectors_of(attention.heads * attention.head_dim);
        let [decode, prefill] = self.scratch;
        let (list, pages) = (self.list(masked), Bind::Buffer(self.buffers.pages));
        let block = op::attn_block::Params {
            heads,
            kv_heads,
            head_vectors,
            slot_pages,
            // A block has as many positions as a page.
            blocks: slot_pages,
            scale,
            softcap,
            window,
            query_vectors,
        };
        let bindings = op::attn_block::Bindings {
            batch: Bind::Buffer(decode.batch),
            qkv: Bind::Buffer(decode.qkv),
            k_cache: Bind::Buffer(k),
            v_cache: Bind::Buffer(v),
            pages,
            list,
            partial: Bind::Buffer(decode.partial),
        };
        self.emit_masked(Phase::Decode, &half.name("attn.block"), block, bindings, masked);
        let merge = op::attn_merge::Params {
            heads,
            kv_heads,
            head_vectors,
            blocks: slot_pages,
            scale,
            softcap,
            window,
            y_stride,
            query_vectors,
        };
        let bindings = op::attn_merge::Bindings {
            batch: Bind::Buffer(decode.batch),
            partial: Bind::Buffer(decode.partial),
            qkv: Bind::Buffer(decode.qkv),
            list,
            y: Bind::Buffer(decode.attn),
        };
        self.emit_masked(Phase::Decode, &half.name("attn.merge"), merge, bindings, masked);
        let chunk = op::attn_chunk::Params {
            heads,
            kv_heads,
            head_vectors,
            slot_pages,
            scale,
            softcap,
            window,
            y_stride,
            query_vectors,
        };
        let bindings = op::attn_chunk::Bindings {
            batch: Bind::Buffer(prefill.batch),
            qkv: Bind::Buffer(prefill.qkv),
            k_cache: Bind::Buffer(k),
            v_cache: Bind::Buffer(v),
            pages,
            list,
            y: Bind::Buffer(prefill.attn),
        };
        self.emit_masked(Phase::Prefill, &half.name("attn.chunk"), chunk, bindings, masked);
    }

    /// Sibling projections of the normalised stream into `qkv`, one after another. Siblings with the same layout are
    /// stacked. Returns the vectors of 4 from one token's row to the next.
    pub fn projections(
        &mut self,
        label: &str,
        siblings: &[&Linear],
        streams: &Streams,
        mask: Option<MaskUse>,
    ) -> Result<u32> {
        let total: usize = siblings.iter().map(|linear| linear.rows).sum();
        let stride = total.div_ceil(4) as u32;
        let bias = self.b.biases(format!("{label}.bias"), siblings);
        let norm = self.decode_norm(streams);
        let (x, y) = (self.scratch.map(|phase| phase.x), self.scratch.map(|phase| phase.qkv));
        // All rotated siblings read the same rotated input.
        let rotated = siblings.iter().find(|linear| self.is_rotated(linear.weight));
        let rotated = rotated.map(|linear| self.inputs(label, (linear.weight, linear.cols), x));
        let rotated = rotated.transpose()?.unwrap_or(x);
        let mut first = 0usize;
        let mut rest = siblings;
        while let [head, ..] = rest {
            let planes = self.b.planes(head.weight)?;
            // Outputs are stored as whole vectors.
            if !first.is_multiple_of(4) {
                bail!(
                    UnsupportedModel,
                    "{label}: a projection that is not stacked begins at output {first} of {total}, expected a multiple of 4"
                );
            }
            // With column scales, kernels support at most three stacked tensors.
            let most = if planes.has_column_scales() {
                rest.len().min(3)
            } else {
                rest.len()
            };
            let mut rows = head.rows;
            let mut same = 1;
            for next in &rest[1..most] {
                let same_input = self.is_rotated(next.weight) == self.is_rotated(head.weight);
                if self.b.planes(next.weight)? != planes || !may_follow(planes, rows) || !same_input {
                    break;
                }
                rows += next.rows;
                same += 1;
            }
            let (stacked, others) = rest.split_at(same);
            let tensors: Vec<_> = stacked.iter().map(|linear| linear.weight).collect();
            let matrix = self.b.matrix(label, &tensors, Stacking::Rows)?;
            let from = self.operand(label, (matrix, first as u32), bias, mask)?;
            let x = if self.is_rotated(head.weight) { rotated } else { x };
            self.product(label, &from, x, norm, (y, stride));
            first += rows;
            rest = others;
        }
        Ok(stride)
    }
}
