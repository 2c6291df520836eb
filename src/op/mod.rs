//! The operators: one Rust file for each file in `shaders/op`.
//!
//! The Rust file declares the parameters and bindings, from which the WGSL declarations are generated, and gives the
//! grid, the cost, the tolerance and the host implementation. Formula and shapes are at the head of the WGSL file.

mod attention;
pub(crate) mod constants;
mod define;
mod experts;
mod frame;
mod grid;
pub mod host;
mod kv;
mod list;
mod modulation;
mod operator;
mod spec;
mod tokens;
mod tolerance;

pub use constants::*;
pub use frame::Frame;
pub use grid::{BatchShape, Grid};
pub use kv::Kv;
pub use list::{blocks_list, heads_list, heads_list_len, outputs_list};
pub use operator::{Bound, ExpertUse, KvRead, Operator, WeightRead};
pub use spec::{Access, Bind, Binding, BufferId, MatrixId, Spec, VectorId};
pub use tokens::{BATCH_HEADER, SlotState, Token, batch_len, batch_words};
pub use tolerance::Tolerance;

use std::ops::Deref;

/// Declares the modules of all operators, and the enums over them.
macro_rules! operators {
    ($($variant:ident = $module:ident),* $(,)?) => {
        $(pub mod $module;)*

        /// An operator, without parameters.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(missing_docs, reason = "each operator's WGSL file describes it")]
        pub enum Kernel { $($variant),* }

        impl Kernel {
            /// Every operator.
            pub const ALL: &[Kernel] = &[$(Kernel::$variant),*];

            /// The operator's declaration.
            pub fn spec(self) -> &'static Spec {
                match self { $(Kernel::$variant => &$module::SPEC),* }
            }

            /// The operator with parameters: `bytes` in the form that [`Operator::bytes`] returns.
            pub fn with_bytes(self, bytes: &[u8]) -> Op {
                match self { $(Kernel::$variant => Op::$variant(bytemuck::pod_read_unaligned(bytes))),* }
            }
        }

        /// An operator with the parameters of one step.
        #[derive(Clone, Copy, Debug, PartialEq)]
        #[allow(missing_docs, reason = "each operator's WGSL file describes it")]
        pub enum Op { $($variant($module::Params)),* }

        $(impl From<$module::Params> for Op {
            fn from(params: $module::Params) -> Op {
                Op::$variant(params)
            }
        })*

        impl Op {
            /// The operator.
            pub fn kernel(&self) -> Kernel {
                match self { $(Op::$variant(_) => Kernel::$variant),* }
            }
        }

        impl Deref for Op {
            type Target = dyn Operator;

            fn deref(&self) -> &(dyn Operator + 'static) {
                match self { $(Op::$variant(params) => params),* }
            }
        }
    };
}

operators! {
    Embed = embed,
    PreNorm = pre_norm,
    Norm = norm,
    Hadamard = hadamard,
    AddNorm = add_norm,
    Matvec = matvec,
    MatvecAdd = matvec_add,
    MatvecGlu = matvec_glu,
    Matmul = matmul,
    MatmulAdd = matmul_add,
    MatmulGlu = matmul_glu,
    Glu = glu,
    ZeroMasked = zero_masked,
    Rope = rope,
    AttnBlock = attn_block,
    AttnMerge = attn_merge,
    AttnChunk = attn_chunk,
    DeltaNet = delta_net,
    MoeGlu = moe_glu,
    MoeMatvec = moe_matvec,
    MoeDown = moe_down,
    MoeRoute = moe_route,
    MoeCount = moe_count,
    MoeLists = moe_lists,
    MoeMatmulGlu = moe_matmul_glu,
    MoeMatmulUp = moe_matmul_up,
    MoeMatmul = moe_matmul,
    MoeCombine = moe_combine,
    Cap = cap,
    Sample = sample,
    LastToken = last_token,
    SpeculateBegin = speculate_begin,
    Draft = draft,
    NormMod = norm_mod,
    AddNormMod = add_norm_mod,
    RopePairs = rope_pairs,
    AttnFull = attn_full,
    CopyRows = copy_rows,
    Conv = conv,
    ChannelStats = channel_stats,
    GroupMerge = group_merge,
    GroupNorm = group_norm,
}
