//! The macro that declares an operator, and the names that the files of all operators use.

pub(super) use super::grid::Grid;
pub(super) use super::host::{Operands, activation, halves, scaled};
pub(super) use super::operator::{Bound, ExpertUse, KvRead, Operator, WeightRead, block_share};
pub(super) use super::spec::{Access, Bind, Binding, Spec};
pub(super) use super::tolerance::Tolerance;
pub(super) use crate::error::{Result, bail};

/// Declares an operator: `Params`, `Bindings`, `SPEC`, and `Operator` for the parameters. The WGSL file of the same
/// name contains the rest of the kernel. The host implementation is a function `run(p: &Params, o: &mut Operands)`
/// beside the declaration.
///
/// A parameter without a text has the meaning that the list below gives it. `weight` and the clauses
/// from `experts` on are optional, and so is `shares true`. Every clause after `threads` becomes the method of `Operator` of that name.
macro_rules! operator {
    (
        $name:ident
        $(weight $w:ident)?
        params { $($field:ident: $ty:ident $(= $doc:literal)?),* $(,)? }
        bindings { $($access:ident $($binding:ident: $wgsl:ty),+;)* }
        threads $threads:expr,
        $(shares $shares:literal,)?
        grid |$grid_p:pat_param| $grid:expr,
        tolerance |$tolerance_p:pat_param| $tolerance:expr,
        $(experts $experts:ident,)?
        $(weight_read |$read_p:pat_param| $read:expr,)?
        $(masked_grid |$masked_p:pat_param, $counts:pat_param| $masked:expr,)?
        $(masked_share |$share_p:pat_param, $share_counts:pat_param| $share:expr,)?
        $(kv_read |$kv_p:pat_param| $kv:expr,)?
        $(loop_steps |$loop_p:pat_param| $loops:expr,)?
    ) => {
        #[doc = concat!("Parameters of `", stringify!($name), "`.")]
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
        pub struct Params { $(#[doc = $crate::op::define::meaning!($field $($doc)?)] pub $field: $ty),* }

        #[doc = concat!("Bindings of `", stringify!($name), "`, as its WGSL names them.")]
        #[allow(missing_docs, reason = "the WGSL file describes each operand")]
        #[derive(Clone, Copy, Debug)]
        pub struct Bindings { $(pub $w: Bind,)? $($(pub $binding: Bind),+),* }

        impl From<Bindings> for Vec<Bind> {
            fn from(bindings: Bindings) -> Vec<Bind> {
                vec![$(bindings.$w,)? $($(bindings.$binding),+),*]
            }
        }

        impl Bound for Params {
            type Bindings = Bindings;
        }

        /// The operator's declaration.
        pub const SPEC: Spec = Spec {
            name: stringify!($name),
            text: include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/shaders/op/", stringify!($name), ".wgsl")),
            params: &[$((stringify!($field), stringify!($ty))),*],
            bindings: &[
                $(Binding { name: stringify!($w), access: Access::Read, wgsl: "" },)?
                $($(Binding {
                    name: stringify!($binding),
                    access: $crate::op::define::access!($access),
                    wgsl: stringify!($wgsl),
                }),+),*
            ],
            threads: $threads,
            shares: false $(|| $shares)?,
        };

        impl Operator for Params {
            fn bytes(&self) -> &[u8] {
                bytemuck::bytes_of(self)
            }

            fn grid(&self) -> Grid {
                let $grid_p = self;
                $grid
            }

            fn tolerance(&self) -> Tolerance {
                let $tolerance_p = self;
                $tolerance
            }

            $(fn experts(&self) -> Option<ExpertUse> {
                Some(ExpertUse::$experts)
            })?

            $(fn weight_read(&self) -> WeightRead {
                let $read_p = self;
                $read
            })?

            $(fn masked_grid(&self, $counts: [u32; 2]) -> Grid {
                let $masked_p = self;
                $masked
            })?

            $(fn masked_share(&self, $share_counts: [u32; 2]) -> [u64; 2] {
                let $share_p = self;
                $share
            })?

            $(fn kv_read(&self) -> Option<KvRead> {
                let $kv_p = self;
                $kv
            })?

            $(fn loop_steps(&self) -> u64 {
                let $loop_p = self;
                $loops
            })?

            fn run(&self, o: &mut Operands) -> Result<()> {
                run(self, o)
            }
        }
    };
}

/// Declares the meanings of parameters that several operators have.
macro_rules! meanings {
    ($($field:ident = $doc:literal),* $(,)?) => {
        macro_rules! meaning {
            $(($field) => { $doc };)*
            ($other:ident $text:literal) => { $text };
        }
    };
}

meanings! {
    vectors = "Vectors of 4 in a token's row.",
    inv_cols = "1 / number of elements under the norm.",
    eps = "Added to the mean of squares.",
    heads = "Query heads.",
    kv_heads = "Key-value heads.",
    head_vectors = "Vectors of 4 in a head.",
    slot_pages = "Pages in the table of one slot.",
    blocks = "Blocks that `partial` holds for a head.",
    scale = "Factor of every score.",
    softcap = "Soft cap of scores; 0 = none.",
    window = "Positions that a query sees; 0 = all.",
    query_vectors = "Vectors of 4 from one query head to the next.",
    y_stride = "Vectors of 4 from one token's outputs to the next.",
    stride = "Elements from one token's logits to the next.",
    vocab = "Tokens of the vocabulary.",
    rows = "Rows stored in this segment.",
    groups = "Groups of 32 columns in a row.",
    row0 = "First row of this segment in the output.",
    gelu = "1 = gelu_tanh, 0 = silu.",
    second_row = "First row of the second stacked tensor in this segment.",
    third_row = "First row of the third stacked tensor in this segment.",
    has_bias = "1 = add the bias.",
    outputs = "Rows of each expert in this segment.",
    bias_up = "Element of `bias` at which the up biases begin.",
    square_vectors = "Vectors of 4 sums of squares; 0 = no norm.",
    top_k = "Experts that a token takes.",
    routes_at = "Word of `router` at which the places and weights of the chosen experts begin.",
    placed = "Experts in this segment.",
    shared_outputs = "Outputs of the shared expert in this segment; 0 = the segment has none.",
    tiles = "Tiles that the lists can hold.",
    gate_at = "Vector of `mods` at which the gates begin.",
    scale_at = "Vector of `mods` at which the scales begin.",
    width = "Pixels of a row.",
    x_entries = "Entries that share a row of x: the experts that a token takes.",
}

macro_rules! access {
    (read) => {
        Access::Read
    };
    (write) => {
        Access::Write
    };
}

pub(super) use {access, meaning, operator};
