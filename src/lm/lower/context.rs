//! The state of a lowering, which emits the steps of decode and prefill side by side.

use super::builder::Builder;
use crate::graph::{Condition, Masked, Segment, Step, SwitchId};
use crate::lm::masks::Masking;
use crate::lm::plan::RunBuffers;
use crate::model::Model;
use crate::op::{Bind, Bound, BufferId, MatrixId, Op, VectorId};
use crate::source::TensorId;
use std::collections::BTreeMap;
use std::fmt;

/// Which of the two programs a step belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Decode,
    Prefill,
}

impl Phase {
    pub const BOTH: [Phase; 2] = [Phase::Decode, Phase::Prefill];
}

/// Index of each phase in pairs such as [`Streams::h`].
pub(super) const DECODE: usize = Phase::Decode as usize;
pub(super) const PREFILL: usize = Phase::Prefill as usize;

/// Buffers of activations of one phase.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scratch {
    /// The tokens of the run.
    pub batch: BufferId,
    /// The normalised stream. In decode it may be the stream times the norm's weight. Then the kernel that reads it
    /// applies the factor that follows from `squares`.
    pub x: BufferId,
    pub qkv: BufferId,
    pub attn: BufferId,
    pub act: BufferId,
    /// The result of the up projection, if it has a step of its own.
    pub up: BufferId,
    /// Sums of squares of the stream.
    pub squares: BufferId,
    /// Results of attention blocks, before they are merged.
    pub partial: BufferId,
}

/// The residual stream between two steps: its buffers in both phases.
#[derive(Clone, Copy, Debug)]
pub(super) struct Streams {
    pub h: [BufferId; 2],
    /// Other buffers of the same size, for results that are normalised before they are added.
    pub other: [BufferId; 2],
    /// Whether `x` holds the normalised stream. If not, in decode `x` and `squares` hold the first half of the norm,
    /// and in prefill `x` is not set.
    pub normed: bool,
}

/// How a decoding product computes the norm of its input.
#[derive(Clone, Copy)]
pub(super) struct DecodeNorm {
    pub square_vectors: u32,
    pub inv_cols: f32,
    pub eps: f32,
}

impl DecodeNorm {
    /// No norm: the factor is 1 / sqrt(0 + 1).
    pub const NONE: DecodeNorm = DecodeNorm {
        square_vectors: 0,
        inv_cols: 0.0,
        eps: 1.0,
    };
}

/// A weight that is multiplied with activations, and its bias.
pub(super) struct Product {
    pub segments: Vec<SegmentShape>,
    pub bias: Option<Bind>,
}

/// Weights and buffers before and after the layers, which all programs use.
pub(super) struct Ends {
    pub embed: MatrixId,
    pub head: Product,
    pub logits: BufferId,
    pub final_norm: VectorId,
    /// The streams after the last layer.
    pub streams: Streams,
}

/// A layer in one pass over the stack.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerPath {
    pub layer: usize,
    /// The pass, from 0.
    pub pass: usize,
    /// Its row in task masks; `None` for the layers of a draft head.
    pub invocation: Option<usize>,
}

impl fmt::Display for LayerPath {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        if self.pass != 0 {
            write!(f, "pass.{}.", self.pass)?;
        }
        write!(f, "layer.{:02}", self.layer)
    }
}

/// Sizes of one segment of a matrix, in the units of kernel parameters.
#[derive(Clone, Copy)]
pub(super) struct SegmentShape {
    pub weight: Bind,
    pub rows: u32,
    pub groups: u32,
    pub row0: u32,
    pub second_row: u32,
    pub third_row: u32,
    /// How a product with it can be masked.
    pub masked: Option<Masked>,
}

/// What one half of a layer, its mixer or its feed-forward network, is lowered with: `h += half(norm(h))`.
#[derive(Clone, Copy)]
pub(super) struct Half {
    pub path: LayerPath,
    pub norm: VectorId,
    /// The norm of its result, if the layer has one.
    pub post_norm: Option<TensorId>,
    /// The norm that follows.
    pub next_norm: VectorId,
    pub streams: Streams,
}

impl Half {
    /// The label of a step, weight or buffer.
    pub fn name(&self, role: &str) -> String {
        format!("{}.{role}", self.path)
    }
}

/// Buffers of mixtures of experts, large enough for every layer.
#[derive(Clone, Copy)]
pub(super) struct MoeScratch {
    /// Router logits of decoded tokens, then the places and weights of the chosen experts.
    pub router: BufferId,
    /// Activations of the shared expert for decoded tokens, then those of the chosen experts.
    pub act: BufferId,
    /// Router logits of a chunk.
    pub chunk_router: BufferId,
    /// Experts and weights of the tokens of a chunk.
    pub routes: BufferId,
    /// The tokens of a chunk, grouped by expert.
    pub lists: BufferId,
    /// Activations of the experts for a chunk.
    pub chunk_act: BufferId,
    /// Outputs of the experts for a chunk, without weights.
    pub expert_y: BufferId,
    /// Outputs of the shared expert for a chunk.
    pub shared_y: BufferId,
}

/// Buffers for rotated inputs.
pub(super) struct RotationBuffers {
    /// Inputs of decode and prefill.
    pub rotated: [BufferId; 2],
    /// Signs by width.
    pub signs: BTreeMap<usize, BufferId>,
}

pub(super) struct Lowering<'a> {
    pub b: Builder<'a>,
    pub model: &'a Model,
    pub buffers: RunBuffers,
    pub ropes: Vec<BufferId>,
    /// 32 zeros: the bias of products without one.
    pub zeros: VectorId,
    pub scratch: [Scratch; 2],
    /// Buffers of mixtures of experts, if the network has any.
    pub moe: Option<MoeScratch>,
    /// Buffers of rotated inputs, if the network has rotated weights.
    pub rotation: Option<RotationBuffers>,
    /// The switches and buffers of masks.
    pub masking: Masking,
    pub steps: [Vec<Step>; 2],
    pub taps: [Vec<(usize, BufferId)>; 2],
    /// Conditions of the steps that are emitted now.
    pub conditions: Vec<Condition>,
}

impl Lowering<'_> {
    /// The steps emitted so far, which are removed.
    pub fn take(&mut self, phase: Phase) -> Vec<Step> {
        std::mem::take(&mut self.steps[phase as usize])
    }

    /// Lets callers read the stream at this point.
    pub fn tap(&mut self, streams: &Streams) {
        for phase in Phase::BOTH {
            let at = self.steps[phase as usize].len();
            self.taps[phase as usize].push((at, streams.h[phase as usize]));
        }
    }

    pub fn emit<P: Bound + Into<Op>>(&mut self, phase: Phase, label: &str, params: P, bindings: P::Bindings) {
        self.emit_masked(phase, label, params, bindings, None);
    }

    /// Emits a step that runs as the masked variant if a switch is on.
    pub fn emit_masked<P: Bound + Into<Op>>(
        &mut self,
        phase: Phase,
        label: &str,
        params: P,
        bindings: P::Bindings,
        masked: Option<Masked>,
    ) {
        let bindings: Vec<Bind> = bindings.into();
        let planes = bindings.iter().find_map(|bind| match *bind {
            Bind::Weight(matrix, _) => Some(self.b.matrices[matrix].planes),
            _ => None,
        });
        self.steps[phase as usize].push(Step {
            label: label.into(),
            op: params.into(),
            planes,
            bindings,
            width: 1,
            conditions: self.conditions.clone(),
            masked,
        });
    }

    /// Emits steps that run only if a switch is in this position.
    pub fn under<T>(&mut self, switch: Option<SwitchId>, on: bool, emit: impl FnOnce(&mut Self) -> T) -> T {
        self.conditions.extend(switch.map(|switch| Condition { switch, on }));
        let result = emit(self);
        if switch.is_some() {
            self.conditions.pop();
        }
        result
    }

    /// The segments of a matrix.
    pub fn segments(&self, matrix: MatrixId) -> Vec<SegmentShape> {
        let segments = self.b.matrices[matrix].segments.iter().enumerate();
        let shape = |(i, segment): (usize, &Segment)| SegmentShape {
            weight: Bind::Weight(matrix, i),
            rows: segment.geometry.rows as u32,
            groups: segment.geometry.groups() as u32,
            row0: segment.row0,
            second_row: segment.part_rows[1],
            third_row: segment.part_rows[2],
            masked: None,
        };
        segments.map(shape).collect()
    }

    /// A matrix without a bias, of which no mask leaves out anything.
    pub fn plain(&self, matrix: MatrixId) -> Product {
        Product {
            segments: self.segments(matrix),
            bias: None,
        }
    }

    /// A norm weight.
    pub fn norm_weight(&mut self, label: impl Into<String>, tensor: TensorId) -> VectorId {
        let len = self.b.tensors.infos()[tensor].rows_cols().1;
        self.b.vector(label, &[(Some(tensor), len)], self.model.norm_add)
    }

    /// The norm weight at the start of a layer; after the last layer that of the head.
    pub fn attn_norm_weight(&mut self, layer: usize, tensor: TensorId) -> VectorId {
        let label = match layer == self.model.layers.len() {
            true => "head.norm".into(),
            false => format!("layer.{layer:02}.attn.norm"),
        };
        self.norm_weight(label, tensor)
    }

    /// The bias as an operand; zeros if there is none.
    pub fn bias(&self, bias: Option<Bind>) -> Bind {
        bias.unwrap_or(Bind::Vector(self.zeros))
    }

    /// The list of a masked step as an operand. A step that is never masked binds a buffer that no step writes.
    pub fn list(&self, masked: Option<Masked>) -> Bind {
        Bind::Buffer(masked.map_or(self.buffers.pages, |masked| masked.list))
    }

    /// How a decoding product computes the norm of the stream in `x`.
    pub fn decode_norm(&self, streams: &Streams) -> DecodeNorm {
        match streams.normed {
            true => DecodeNorm::NONE,
            false => self.stream_norm(),
        }
    }

    /// How a decoding product computes the norm whose first half is in `x` and `squares`.
    pub fn stream_norm(&self) -> DecodeNorm {
        DecodeNorm {
            // One sum covers 4 elements, one vector 4 sums.
            square_vectors: self.model.hidden.div_ceil(16) as u32,
            inv_cols: 1.0 / self.model.hidden as f32,
            eps: self.model.eps,
        }
    }
}

/// Vectors of 4 in a row of activations, with padding.
pub(super) fn vectors_of(elements: usize) -> u32 {
    (elements.next_multiple_of(32) / 4) as u32
}
