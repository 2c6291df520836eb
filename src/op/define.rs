//! The macro that declares an operator.

/// Declares an operator: `Params`, `Bindings`, `SPEC`, and `Operator` for the parameters. The WGSL file of the same
/// name contains the rest of the kernel. The host implementation is a function `run(p: &Params, o: &mut Operands)`
/// beside the declaration.
///
/// The clauses from `experts` on are optional. Each is a method of `Operator`.
macro_rules! operator {
    (
        $name:ident
        $(weight $w:ident)?
        params { $($field:ident: $ty:ident = $doc:literal),* $(,)? }
        bindings { $($binding:ident: $access:ident $wgsl:ty),* $(,)? }
        threads $threads:expr,
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
        pub struct Params { $(#[doc = $doc] pub $field: $ty),* }

        #[doc = concat!("Bindings of `", stringify!($name), "`, as its WGSL names them.")]
        #[allow(missing_docs, reason = "the WGSL file describes each operand")]
        #[derive(Clone, Copy, Debug)]
        pub struct Bindings { $(pub $w: $crate::op::spec::Bind,)? $(pub $binding: $crate::op::spec::Bind),* }

        impl IntoIterator for Bindings {
            type Item = $crate::op::spec::Bind;
            type IntoIter = std::vec::IntoIter<$crate::op::spec::Bind>;

            fn into_iter(self) -> Self::IntoIter {
                vec![$(self.$w,)? $(self.$binding),*].into_iter()
            }
        }

        /// The operator's declaration.
        pub const SPEC: $crate::op::spec::Spec = $crate::op::spec::Spec {
            name: stringify!($name),
            text: include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/shaders/op/", stringify!($name), ".wgsl")),
            params: &[$((stringify!($field), stringify!($ty))),*],
            bindings: &[
                $($crate::op::spec::Binding { name: stringify!($w), access: $crate::op::spec::Access::Read, wgsl: "" },)?
                $($crate::op::spec::Binding {
                    name: stringify!($binding),
                    access: $crate::op::define::access!($access),
                    wgsl: stringify!($wgsl),
                }),*
            ],
            threads: $threads,
        };

        impl $crate::op::operator::Operator for Params {
            type Bindings = Bindings;

            fn grid(&self) -> $crate::op::grid::Grid {
                let $grid_p = self;
                $grid
            }

            fn tolerance(&self) -> $crate::op::tolerance::Tolerance {
                let $tolerance_p = self;
                $tolerance
            }

            $(fn experts(&self) -> Option<$crate::op::operator::ExpertUse> {
                Some($crate::op::operator::ExpertUse::$experts)
            })?

            $(fn weight_read(&self) -> $crate::op::operator::WeightRead {
                let $read_p = self;
                $read
            })?

            $(fn masked_grid(&self, $counts: [u32; 2]) -> $crate::op::grid::Grid {
                let $masked_p = self;
                $masked
            })?

            $(fn masked_share(&self, $share_counts: [u32; 2]) -> [u64; 2] {
                let $share_p = self;
                $share
            })?

            $(fn kv_read(&self) -> Option<$crate::op::operator::KvRead> {
                let $kv_p = self;
                $kv
            })?

            $(fn loop_steps(&self) -> u64 {
                let $loop_p = self;
                $loops
            })?

            fn run(&self, o: &mut $crate::op::host::Operands) -> $crate::error::Result<()> {
                run(self, o)
            }
        }
    };
}

macro_rules! access {
    (read) => {
        $crate::op::spec::Access::Read
    };
    (write) => {
        $crate::op::spec::Access::Write
    };
}

pub(super) use {access, operator};
