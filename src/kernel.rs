//! The catalogue of GPU kernels: one row per file in `shaders/op`, and the parameters each takes.
//!
//! Knows weight types, not models or devices. A test holds every row against its WGSL: bindings, parameter offsets and
//! workgroup size.

use crate::dtype::planes::Planes;
use bytemuck::{Pod, Zeroable};

/// How a kernel uses a storage binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// `var<storage, read>`
    Read,
    /// `var<storage, read_write>`
    Write,
}

/// One storage binding: its WGSL name and how it is used.
pub type Binding = (&'static str, Access);

/// One row of the catalogue.
pub struct Row {
    /// The stem of the file in `shaders/op`, and the kernel's name everywhere.
    pub stem: &'static str,
    /// The files of `shaders/lib` composed in front of it.
    pub libs: &'static [&'static str],
    /// Storage bindings in order, from binding 1 (binding 0 is the parameters). A kernel with weights begins with `codes, scales`.
    pub bindings: &'static [Binding],
    /// Threads of a workgroup; `None` for the matvec family, whose team variant decides.
    pub threads: Option<u32>,
    /// Whether it is composed with a weight type.
    pub weights: bool,
    /// Whether it is composed with a type of the key-value cache.
    pub kv: bool,
}

use Access::{Read, Write};

const TEAM_LIBS: &[&str] = &["vector", "weights", "parts", "grid", "canon", "norm_scale", "matvec"];
const MATMUL_LIBS: &[&str] = &["vector", "weights", "parts", "ctl", "matmul", "matmul_tile"];

/// A kernel of the catalogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "each is described at the head of its WGSL file")]
pub enum Kernel {
    Embed,
    Prep,
    Norm,
    AddNorm,
    Matvec,
    MatvecAdd,
    MatvecGlu,
    MatvecSome,
    MatvecAddSome,
    MatvecGluSome,
    Silence,
    Matmul,
    MatmulAdd,
    MatmulGlu,
    Glu,
    Rope,
    AttnBlock,
    AttnMerge,
    AttnChunk,
    DeltaNet,
    MoeGlu,
    MoeDown,
    MoeRoute,
    MoeLists,
    MoeMatmulGlu,
    MoeMatmul,
    MoeCombine,
    Cap,
    Sample,
    LastColumn,
    RoundBegin,
    Draft,
}

impl Kernel {
    /// Every kernel.
    pub const ALL: [Kernel; 32] = [
        Kernel::Embed,
        Kernel::Prep,
        Kernel::Norm,
        Kernel::AddNorm,
        Kernel::Matvec,
        Kernel::MatvecAdd,
        Kernel::MatvecGlu,
        Kernel::MatvecSome,
        Kernel::MatvecAddSome,
        Kernel::MatvecGluSome,
        Kernel::Silence,
        Kernel::Matmul,
        Kernel::MatmulAdd,
        Kernel::MatmulGlu,
        Kernel::Glu,
        Kernel::Rope,
        Kernel::AttnBlock,
        Kernel::AttnMerge,
        Kernel::AttnChunk,
        Kernel::DeltaNet,
        Kernel::MoeGlu,
        Kernel::MoeDown,
        Kernel::MoeRoute,
        Kernel::MoeLists,
        Kernel::MoeMatmulGlu,
        Kernel::MoeMatmul,
        Kernel::MoeCombine,
        Kernel::Cap,
        Kernel::Sample,
        Kernel::LastColumn,
        Kernel::RoundBegin,
        Kernel::Draft,
    ];

    /// The kernel's row.
    pub fn row(self) -> &'static Row {
        match self {
            Kernel::Embed => &Row {
                stem: "embed",
                libs: &["vector", "weights", "ctl"],
                bindings: &[
                    ("codes", Read),
                    ("scales", Read),
                    ("ctl", Read),
                    ("tokens", Read),
                    ("h", Write),
                ],
                threads: Some(64),
                weights: true,
                kv: false,
            },
            Kernel::Prep => &Row {
                stem: "prep",
                libs: &["vector", "ctl"],
                bindings: &[
                    ("ctl", Read),
                    ("source", Read),
                    ("g", Read),
                    ("hg", Write),
                    ("squares", Write),
                ],
                threads: Some(64),
                weights: false,
                kv: false,
            },
            Kernel::Norm => &Row {
                stem: "norm",
                libs: &["vector", "ctl"],
                bindings: &[("ctl", Read), ("x", Read), ("g", Read), ("y", Write)],
                threads: Some(64),
                weights: false,
                kv: false,
            },
            Kernel::AddNorm => &Row {
                stem: "add_norm",
                libs: &["vector", "ctl"],
                bindings: &[
                    ("ctl", Read),
                    ("y", Read),
                    ("post", Read),
                    ("g", Read),
                    ("h", Write),
                    ("x", Write),
                ],
                threads: Some(64),
                weights: false,
                kv: false,
            },
            Kernel::Matvec => &Row {
                stem: "matvec",
                libs: TEAM_LIBS,
                bindings: &[
                    ("codes", Read),
                    ("scales", Read),
                    ("x", Read),
                    ("squares", Read),
                    ("bias", Read),
                    ("y", Write),
                ],
                threads: None,
                weights: true,
                kv: false,
            },
            Kernel::MatvecAdd => &Row {
                stem: "matvec_add",
                libs: &["vector", "weights", "parts", "grid", "canon", "matvec"],
                bindings: &[
                    ("codes", Read),
                    ("scales", Read),
                    ("x", Read),
                    ("bias", Read),
                    ("g", Read),
                    ("h", Write),
                    ("hg", Write),
                    ("squares", Write),
                ],
                threads: None,
                weights: true,
                kv: false,
            },
            Kernel::MatvecGlu => &Row {
                stem: "matvec_glu",
                libs: &["vector", "weights", "grid", "canon", "norm_scale", "matvec", "glu"],
                bindings: &[
                    ("codes", Read),
                    ("scales", Read),
                    ("x", Read),
                    ("squares", Read),
                    ("bias", Read),
                    ("y", Write),
                ],
                threads: None,
                weights: true,
                kv: false,
            },
            Kernel::MatvecSome => &Row {
                stem: "matvec_some",
                libs: &[
                    "vector",
                    "weights",
                    "parts",
                    "grid",
                    "canon",
                    "norm_scale",
                    "matvec",
                    "listed",
                ],
                bindings: &[
                    ("codes", Read),
                    ("scales", Read),
                    ("x", Read),
                    ("squares", Read),
                    ("list", Read),
                    ("bias", Read),
                    ("y", Write),
                ],
                threads: None,
                weights: true,
                kv: false,
            },
            Kernel::MatvecAddSome => &Row {
                stem: "matvec_add_some",
                libs: &["vector", "weights", "parts", "grid", "canon", "matvec", "listed"],
                bindings: &[
                    ("codes", Read),
                    ("scales", Read),
                    ("x", Read),
                    ("list", Read),
                    ("g", Read),
                    ("h", Write),
                    ("hg", Write),
                    ("squares", Write),
                ],
                threads: None,
                weights: true,
                kv: false,
            },
            Kernel::MatvecGluSome => &Row {
                stem: "matvec_glu_some",
                libs: &["vector", "weights", "grid", "canon", "norm_scale", "matvec", "glu"],
                bindings: &[
                    ("codes", Read),
                    ("scales", Read),
                    ("x", Read),
                    ("squares", Read),
                    ("list", Read),
                    ("bias", Read),
                    ("y", Write),
                ],
                threads: None,
                weights: true,
                kv: false,
            },
            Kernel::Silence => &Row {
                stem: "silence",
                libs: &["ctl"],
                bindings: &[("ctl", Read), ("bits", Read), ("y", Write)],
                threads: Some(64),
                weights: false,
                kv: false,
            },
            Kernel::Matmul => &Row {
                stem: "matmul",
                libs: MATMUL_LIBS,
                bindings: &[
                    ("codes", Read),
                    ("scales", Read),
                    ("ctl", Read),
                    ("x", Read),
                    ("bias", Read),
                    ("y", Write),
                ],
                threads: Some(32),
                weights: true,
                kv: false,
            },
            Kernel::MatmulAdd => &Row {
                stem: "matmul_add",
                libs: MATMUL_LIBS,
                bindings: &[
                    ("codes", Read),
                    ("scales", Read),
                    ("ctl", Read),
                    ("x", Read),
                    ("bias", Read),
                    ("h", Write),
                ],
                threads: Some(32),
                weights: true,
                kv: false,
            },
            Kernel::MatmulGlu => &Row {
                stem: "matmul_glu",
                libs: &["vector", "weights", "ctl", "matmul", "glu"],
                bindings: &[
                    ("codes", Read),
                    ("scales", Read),
                    ("ctl", Read),
                    ("x", Read),
                    ("bias", Read),
                    ("y", Write),
                ],
                threads: Some(32),
                weights: true,
                kv: false,
            },
            Kernel::Glu => &Row {
                stem: "glu",
                libs: &["ctl", "glu"],
                bindings: &[("ctl", Read), ("up", Read), ("y", Write)],
                threads: Some(64),
                weights: false,
                kv: false,
            },
            Kernel::Rope => &Row {
                stem: "rope",
                libs: &["vector", "ctl"],
                bindings: &[
                    ("ctl", Read),
                    ("table", Read),
                    ("q_norm", Read),
                    ("k_norm", Read),
                    ("qkv", Write),
                    ("k_cache", Write),
                    ("v_cache", Write),
                ],
                threads: Some(32),
                weights: false,
                kv: true,
            },
            Kernel::AttnBlock => &Row {
                stem: "attn_block",
                libs: &["vector", "ctl", "attention"],
                bindings: &[
                    ("ctl", Read),
                    ("qkv", Read),
                    ("k_cache", Read),
                    ("v_cache", Read),
                    ("part", Write),
                ],
                threads: Some(64),
                weights: false,
                kv: true,
            },
            Kernel::AttnMerge => &Row {
                stem: "attn_merge",
                libs: &["vector", "ctl", "attention", "gate"],
                bindings: &[("ctl", Read), ("part", Read), ("qkv", Read), ("y", Write)],
                threads: Some(64),
                weights: false,
                kv: false,
            },
            Kernel::AttnChunk => &Row {
                stem: "attn_chunk",
                libs: &["vector", "ctl", "attention", "gate"],
                bindings: &[
                    ("ctl", Read),
                    ("qkv", Read),
                    ("k_cache", Read),
                    ("v_cache", Read),
                    ("y", Write),
                ],
                threads: Some(64),
                weights: false,
                kv: true,
            },
            Kernel::DeltaNet => &Row {
                stem: "delta_net",
                libs: &["vector", "ctl"],
                bindings: &[
                    ("ctl", Read),
                    ("proj", Read),
                    ("conv", Read),
                    ("gates", Read),
                    ("norm", Read),
                    ("ring", Write),
                    ("state", Write),
                    ("y", Write),
                ],
                threads: Some(256),
                weights: false,
                kv: false,
            },
            Kernel::MoeGlu => &Row {
                stem: "moe_glu",
                libs: &[
                    "vector",
                    "weights",
                    "grid",
                    "canon",
                    "norm_scale",
                    "matvec",
                    "glu",
                    "experts",
                    "route",
                ],
                bindings: &[
                    ("codes", Read),
                    ("scales", Read),
                    ("x", Read),
                    ("squares", Read),
                    ("experts", Read),
                    ("router", Write),
                    ("y", Write),
                ],
                threads: None,
                weights: true,
                kv: false,
            },
            Kernel::MoeDown => &Row {
                stem: "moe_down",
                libs: &["vector", "weights", "grid", "canon", "matvec", "experts"],
                bindings: &[
                    ("codes", Read),
                    ("scales", Read),
                    ("router", Read),
                    ("x", Read),
                    ("g", Read),
                    ("h", Write),
                    ("hg", Write),
                    ("squares", Write),
                ],
                threads: None,
                weights: true,
                kv: false,
            },
            Kernel::MoeRoute => &Row {
                stem: "moe_route",
                libs: &["ctl", "experts", "route"],
                bindings: &[("ctl", Read), ("experts", Read), ("router", Read), ("routes", Write)],
                threads: Some(64),
                weights: false,
                kv: false,
            },
            Kernel::MoeLists => &Row {
                stem: "moe_lists",
                libs: &["ctl", "experts"],
                bindings: &[("ctl", Read), ("experts", Read), ("routes", Read), ("lists", Write)],
                threads: Some(256),
                weights: false,
                kv: false,
            },
            Kernel::MoeMatmulGlu => &Row {
                stem: "moe_matmul_glu",
                libs: &["vector", "weights", "ctl", "matmul", "moe_tile", "experts", "glu"],
                bindings: &[
                    ("codes", Read),
                    ("scales", Read),
                    ("ctl", Read),
                    ("experts", Read),
                    ("lists", Read),
                    ("x", Read),
                    ("y", Write),
                ],
                threads: Some(32),
                weights: true,
                kv: false,
            },
            Kernel::MoeMatmul => &Row {
                stem: "moe_matmul",
                libs: &["vector", "weights", "ctl", "matmul", "moe_tile", "experts"],
                bindings: &[
                    ("codes", Read),
                    ("scales", Read),
                    ("ctl", Read),
                    ("experts", Read),
                    ("lists", Read),
                    ("x", Read),
                    ("y", Write),
                ],
                threads: Some(32),
                weights: true,
                kv: false,
            },
            Kernel::MoeCombine => &Row {
                stem: "moe_combine",
                libs: &["ctl"],
                bindings: &[
                    ("ctl", Read),
                    ("routes", Read),
                    ("parts", Read),
                    ("shared_y", Read),
                    ("h", Write),
                ],
                threads: Some(64),
                weights: false,
                kv: false,
            },
            Kernel::Cap => &Row {
                stem: "cap",
                libs: &["ctl"],
                bindings: &[("ctl", Read), ("y", Write)],
                threads: Some(64),
                weights: false,
                kv: false,
            },
            Kernel::Sample => &Row {
                stem: "sample",
                libs: &["ctl"],
                bindings: &[("settings", Read), ("logits", Read), ("ctl", Write), ("seen", Write)],
                threads: Some(256),
                weights: false,
                kv: false,
            },
            Kernel::LastColumn => &Row {
                stem: "last_column",
                libs: &["ctl"],
                bindings: &[("source", Read), ("to", Write), ("ctl", Write)],
                threads: Some(256),
                weights: false,
                kv: false,
            },
            Kernel::RoundBegin => &Row {
                stem: "round_begin",
                libs: &["ctl"],
                bindings: &[("ctl", Write), ("draft", Write)],
                threads: Some(32),
                weights: false,
                kv: false,
            },
            Kernel::Draft => &Row {
                stem: "draft",
                libs: &["ctl"],
                bindings: &[("logits", Read), ("ctl", Write), ("draft", Write)],
                threads: Some(256),
                weights: false,
                kv: false,
            },
        }
    }

    /// Whether it can compute several columns side by side: the matvec family.
    pub fn is_wide(self) -> bool {
        matches!(self, Kernel::Matvec | Kernel::MatvecAdd | Kernel::MatvecGlu)
    }

    /// The kernel's name.
    pub fn stem(self) -> &'static str {
        self.row().stem
    }
}

macro_rules! params {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $ty:ident),* $(,)? })*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
            pub struct $name { $($(#[$field_doc])* pub $field: $ty),* }
        )*

        /// One dispatch's kernel with its parameters, laid out as the WGSL `Params` of the same kernel.
        #[derive(Clone, Copy, Debug, PartialEq)]
        #[allow(missing_docs, reason = "one variant per kernel")]
        pub enum Op { $($name($name)),* }

        impl Op {
            /// Which kernel runs.
            pub fn kernel(&self) -> Kernel {
                match self { $(Op::$name(_) => Kernel::$name),* }
            }

            /// The parameters as the uniform buffer holds them.
            pub fn bytes(&self) -> &[u8] {
                match self { $(Op::$name(params) => bytemuck::bytes_of(params)),* }
            }
        }

        impl Kernel {
            /// Names and types of the parameters, in order; each takes 4 bytes.
            pub fn fields(self) -> &'static [(&'static str, &'static str)] {
                match self { $(Kernel::$name => &[$((stringify!($field), stringify!($ty))),*]),* }
            }
        }
    };
}

params! {
    /// Parameters of `embed`.
    Embed {
        /// Rows stored in this segment.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// First token of this segment.
        row0: u32,
        /// Factor of every embedding.
        multiplier: f32,
    }
    /// Parameters of `prep`.
    Prep {
        /// Vectors of 4 in a column.
        vectors: u32,
    }
    /// Parameters of `norm`.
    Norm {
        /// Vectors of 4 in a column.
        vectors: u32,
        /// 1 / number of elements under the norm.
        inv_cols: f32,
        /// Added to the mean of squares.
        eps: f32,
        /// Vectors of 4 from one output column to the next.
        y_stride: u32,
        /// Where in an output column the result begins, in vectors of 4.
        y_first: u32,
    }
    /// Parameters of `add_norm`.
    AddNorm {
        /// Vectors of 4 in a column.
        vectors: u32,
        /// 1 / number of elements under the norms.
        inv_cols: f32,
        /// Added to the mean of squares.
        eps: f32,
    }
    /// Parameters of `matvec`.
    Matvec {
        /// Rows stored in this segment.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// First row of this segment in the output.
        row0: u32,
        /// First row of the second stacked tensor, in this segment.
        part1: u32,
        /// First row of the third.
        part2: u32,
        /// Vectors of 4 sums of squares; 0 = no norm.
        square_vectors: u32,
        /// 1 / number of elements under the norm.
        inv_cols: f32,
        /// Added to the mean of squares.
        eps: f32,
        /// 1 = add the bias.
        has_bias: u32,
        /// Vectors of 4 from one output column to the next.
        y_stride: u32,
    }
    /// Parameters of `matvec_add`.
    MatvecAdd {
        /// Rows stored in this segment.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// First row of this segment in the outputs.
        row0: u32,
        /// First row of the second stacked tensor, in this segment.
        part1: u32,
        /// First row of the third.
        part2: u32,
        /// 1 = add the bias.
        has_bias: u32,
        /// Vectors of 4 from one output column to the next.
        y_stride: u32,
    }
    /// Parameters of `matvec_glu`.
    MatvecGlu {
        /// Rows stored in this segment, gate and up together.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// First output of this segment.
        row0: u32,
        /// Outputs of this segment.
        part1: u32,
        /// Unused third part.
        part2: u32,
        /// Vectors of 4 sums of squares; 0 = no norm.
        square_vectors: u32,
        /// 1 / number of elements under the norm.
        inv_cols: f32,
        /// Added to the mean of squares.
        eps: f32,
        /// 1 = add the biases.
        has_bias: u32,
        /// Where the up biases begin.
        bias_up: u32,
        /// 1 = gelu_tanh, 0 = silu.
        gelu: u32,
        /// Vectors of 4 from one output column to the next.
        y_stride: u32,
    }
    /// Parameters of `matvec_some`: those of `matvec`.
    MatvecSome {
        /// Rows stored in this segment.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// First row of this segment in the output.
        row0: u32,
        /// First row of the second stacked tensor, in this segment.
        part1: u32,
        /// First row of the third.
        part2: u32,
        /// Vectors of 4 sums of squares; 0 = no norm.
        square_vectors: u32,
        /// 1 / number of elements under the norm.
        inv_cols: f32,
        /// Added to the mean of squares.
        eps: f32,
        /// 1 = add the bias.
        has_bias: u32,
    }
    /// Parameters of `matvec_add_some`.
    MatvecAddSome {
        /// Rows stored in this segment.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// First row of this segment in the outputs.
        row0: u32,
        /// First row of the second stacked tensor, in this segment.
        part1: u32,
        /// First row of the third.
        part2: u32,
    }
    /// Parameters of `matvec_glu_some`: those of `matvec_glu`.
    MatvecGluSome {
        /// Rows stored in this segment, gate and up together.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// First output of this segment.
        row0: u32,
        /// Outputs of this segment.
        part1: u32,
        /// Unused third part.
        part2: u32,
        /// Vectors of 4 sums of squares; 0 = no norm.
        square_vectors: u32,
        /// 1 / number of elements under the norm.
        inv_cols: f32,
        /// Added to the mean of squares.
        eps: f32,
        /// 1 = add the biases.
        has_bias: u32,
        /// Where the up biases begin.
        bias_up: u32,
        /// 1 = gelu_tanh, 0 = silu.
        gelu: u32,
    }
    /// Parameters of `silence`.
    Silence {
        /// Vectors of 4 in a column.
        vectors: u32,
    }
    /// Parameters of `matmul`.
    Matmul {
        /// Rows stored in this segment.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// First row of this segment in the output.
        row0: u32,
        /// First row of the second stacked tensor, in this segment.
        part1: u32,
        /// First row of the third.
        part2: u32,
        /// Vectors of 4 from one output column to the next.
        y_stride: u32,
        /// 1 = add the bias.
        has_bias: u32,
    }
    /// Parameters of `matmul_add`.
    MatmulAdd {
        /// Rows stored in this segment.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// First row of this segment in the output.
        row0: u32,
        /// First row of the second stacked tensor, in this segment.
        part1: u32,
        /// First row of the third.
        part2: u32,
        /// Vectors of 4 from one output column to the next.
        y_stride: u32,
        /// 1 = add the bias.
        has_bias: u32,
    }
    /// Parameters of `matmul_glu`.
    MatmulGlu {
        /// Rows stored in this segment, gate and up together.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// First output of this segment.
        row0: u32,
        /// Outputs of this segment.
        part1: u32,
        /// Unused third part.
        part2: u32,
        /// Vectors of 4 from one output column to the next.
        y_stride: u32,
        /// 1 = add the biases.
        has_bias: u32,
        /// Where the up biases begin.
        bias_up: u32,
        /// 1 = gelu_tanh, 0 = silu.
        gelu: u32,
    }
    /// Parameters of `glu`.
    Glu {
        /// Vectors of 4 in a column.
        vectors: u32,
        /// 1 = gelu_tanh, 0 = silu.
        gelu: u32,
    }
    /// Parameters of `rope`.
    Rope {
        /// Query heads.
        heads: u32,
        /// Key-value heads.
        kv_heads: u32,
        /// Vectors of 4 in a head.
        head_vectors: u32,
        /// Vectors of 4 in half of the rotated part.
        rot_vectors: u32,
        /// Positions the caches hold.
        positions: u32,
        /// Added to the mean of squares of a head.
        eps: f32,
        /// Query and key heads are normalised: 0 = not, 1 = before they turn, 2 = afterwards.
        qk_norm: u32,
        /// 1 = value heads are normalised.
        v_norm: u32,
        /// Vectors from one query head to the next.
        query_vectors: u32,
    }
    /// Parameters of `attn_block`.
    AttnBlock {
        /// Query heads.
        heads: u32,
        /// Key-value heads.
        kv_heads: u32,
        /// Vectors of 4 in a head.
        head_vectors: u32,
        /// Positions the caches hold.
        positions: u32,
        /// Blocks that the parts hold for a head.
        blocks: u32,
        /// Factor of every score.
        scale: f32,
        /// Soft cap of scores; 0 = none.
        softcap: f32,
        /// Positions a query sees; 0 = all.
        window: u32,
        /// Vectors from one query head to the next.
        query_vectors: u32,
    }
    /// Parameters of `attn_merge`.
    AttnMerge {
        /// Query heads.
        heads: u32,
        /// Key-value heads.
        kv_heads: u32,
        /// Vectors of 4 in a head.
        head_vectors: u32,
        /// Blocks that the parts hold for a head.
        blocks: u32,
        /// As in `attn_block`.
        scale: f32,
        /// As in `attn_block`.
        softcap: f32,
        /// Positions a query sees; 0 = all.
        window: u32,
        /// Vectors of 4 from one output column to the next.
        y_stride: u32,
        /// Vectors from one query head to the next; more than a head has: its gate follows.
        query_vectors: u32,
    }
    /// Parameters of `attn_chunk`.
    AttnChunk {
        /// Query heads.
        heads: u32,
        /// Key-value heads.
        kv_heads: u32,
        /// Vectors of 4 in a head.
        head_vectors: u32,
        /// Positions the caches hold.
        positions: u32,
        /// Factor of every score.
        scale: f32,
        /// Soft cap of scores; 0 = none.
        softcap: f32,
        /// Positions a query sees; 0 = all.
        window: u32,
        /// Vectors of 4 from one output column to the next.
        y_stride: u32,
        /// Vectors from one query head to the next; more than a head has: its gate follows.
        query_vectors: u32,
    }
    /// Parameters of `delta_net`.
    DeltaNet {
        /// Value heads.
        value_heads: u32,
        /// Neighbouring value heads that share a key head.
        group: u32,
        /// Vectors of 4 in a key head, at most 64.
        key_vectors: u32,
        /// Vectors of 4 in a value head, at most 64.
        value_vectors: u32,
        /// Positions under the convolution.
        taps: u32,
        /// Positions whose inputs are kept.
        ring: u32,
        /// States that are kept.
        slots: u32,
        /// Vectors of 4 from one column of the projections to the next.
        stride: u32,
        /// Vectors from one key head's q to the next one's, and likewise of k.
        key_stride: u32,
        /// Where the first key head's k begins, in vectors.
        k_at: u32,
        /// Where the first value head's v begins, in vectors.
        v_at: u32,
        /// Where its z begins.
        z_at: u32,
        /// Vectors from the v of one key head's value heads to that of the next one's, and likewise of z.
        value_stride: u32,
        /// Where the first value head's b is, in elements.
        b_at: u32,
        /// Where its a is.
        a_at: u32,
        /// Elements from the b of one key head's value heads to that of the next one's, and likewise of a.
        gate_stride: u32,
        /// Factor of q after it is divided by its length.
        q_scale: f32,
        /// Added to the squares of q and k before the root.
        length_eps: f32,
        /// Added to the mean of squares of a head's output.
        eps: f32,
        /// Vectors of 4 from one output column to the next.
        y_stride: u32,
    }
    /// Parameters of `moe_glu`.
    MoeGlu {
        /// Rows stored in this segment.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// Outputs of each expert in this segment.
        outputs: u32,
        /// Experts in this segment.
        placed: u32,
        /// Outputs of the shared expert in this segment, 0 = it is not there.
        shared_outputs: u32,
        /// Slots before the shared expert's.
        first_shared: u32,
        /// First of an expert's outputs in this segment.
        row0: u32,
        /// Where the first slot's outputs begin.
        y_at: u32,
        /// Elements from one slot's outputs to the next.
        y_stride: u32,
        /// Where places and weights begin.
        routes_at: u32,
        /// Vectors of 4 sums of squares; 0, with eps 1, takes x as it is.
        square_vectors: u32,
        /// 1 / number of elements under the norm.
        inv_cols: f32,
        /// Added to the mean of squares.
        eps: f32,
        /// 1 = gelu_tanh, 0 = silu.
        gelu: u32,
    }
    /// Parameters of `moe_down`.
    MoeDown {
        /// Rows stored in this segment.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// 1 / units.
        inv_units: f32,
        /// Rows of each expert in this segment.
        outputs: u32,
        /// First row of this segment in the outputs, a multiple of 4.
        row0: u32,
        /// Slots: experts a token takes.
        slots: u32,
        /// Units before the first slot's activations.
        x_at: u32,
        /// Where places and weights begin.
        routes_at: u32,
    }
    /// Parameters of `moe_route`.
    MoeRoute {
        /// Elements from one column's logits to the next.
        stride: u32,
        /// 1 = there is a shared expert, 0 = its weight is 0.
        shared_expert: u32,
    }
    /// Parameters of `moe_lists`.
    MoeLists {
        /// Tiles there is room for.
        tiles: u32,
    }
    /// Parameters of `moe_matmul_glu`.
    MoeMatmulGlu {
        /// Rows stored in this segment.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// Outputs of each expert in this segment.
        outputs: u32,
        /// Experts in this segment.
        placed: u32,
        /// Outputs of the shared expert in this segment, 0 = it is not there.
        shared_outputs: u32,
        /// First of an expert's outputs in this segment, a multiple of 4.
        row0: u32,
        /// Vectors of 4 from one entry of y to the next.
        y_stride: u32,
        /// Entries that share a column of x: the experts a token takes.
        x_entries: u32,
        /// Tiles that lists have room for.
        tiles: u32,
        /// 1 = gelu_tanh, 0 = silu.
        gelu: u32,
    }
    /// Parameters of `moe_matmul`.
    MoeMatmul {
        /// Rows stored in this segment.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// Rows of each expert in this segment.
        outputs: u32,
        /// First row of this segment in y, a multiple of 4.
        row0: u32,
        /// Vectors of 4 from one entry of y to the next.
        y_stride: u32,
        /// Entries that share a column of x.
        x_entries: u32,
        /// Entries of a column, which bound the grid.
        top_k: u32,
        /// Tiles that lists have room for.
        tiles: u32,
    }
    /// Parameters of `moe_combine`.
    MoeCombine {
        /// Vectors of 4 in a column.
        vectors: u32,
        /// Experts of a column.
        top_k: u32,
    }
    /// Parameters of `cap`.
    Cap {
        /// Vectors of 4 in a column.
        vectors: u32,
        /// Factor of every element.
        multiplier: f32,
        /// Soft cap; 0 = none.
        cap: f32,
    }
    /// Parameters of `sample`.
    Sample {
        /// Tokens of the vocabulary.
        vocab: u32,
        /// Elements from one column of the logits to the next.
        stride: u32,
    }
    /// Parameters of `last_column`.
    LastColumn {
        /// Vectors of 4 in a column.
        vectors: u32,
    }
    /// Parameters of `round_begin`.
    RoundBegin {
        /// Most drafts of a round.
        depth: u32,
    }
    /// Parameters of `draft`.
    Draft {
        /// Tokens of the vocabulary.
        vocab: u32,
        /// Which draft of the round, from 1.
        number: u32,
    }
}

/// Element type of the key-value cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kv {
    /// Two bytes an element.
    F16,
    /// Four bytes an element.
    F32,
}

impl Kv {
    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        match self {
            Kv::F16 => 2,
            Kv::F32 => 4,
        }
    }

    /// The name of the option's value, and of the shader file's suffix.
    pub fn name(self) -> &'static str {
        match self {
            Kv::F16 => "f16",
            Kv::F32 => "f32",
        }
    }
}

/// How the matvec family's teams of 32 logical lanes are realised; the results are the same to the bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Team {
    /// Lanes of one subgroup: 4, 8, 16 or 32 of them, exchanging by shuffles.
    Subgroup {
        /// Physical lanes of a team.
        lanes: u32,
    },
    /// 32 threads that exchange through workgroup memory.
    Tree,
}

impl Team {
    /// Physical lanes of a team.
    pub fn lanes(self) -> u32 {
        match self {
            Team::Subgroup { lanes } => lanes,
            Team::Tree => 32,
        }
    }

    /// Threads of a workgroup.
    pub fn threads(self) -> u32 {
        match self {
            Team::Subgroup { lanes: 32 } => 128,
            Team::Subgroup { .. } | Team::Tree => 64,
        }
    }

    /// Teams of a workgroup.
    pub fn teams(self) -> u32 {
        self.threads() / self.lanes()
    }
}

/// Columns that one run of the decoding kernels can have.
pub const MAX_COLUMNS: u32 = 8;

/// Everything that decides the text of one pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Variant {
    /// The kernel.
    pub kernel: Kernel,
    /// The weight planes, for kernels with weights.
    pub planes: Option<Planes>,
    /// The cache's type, for kernels that touch it.
    pub kv: Option<Kv>,
    /// How teams are realised, for the matvec family.
    pub team: Option<Team>,
    /// Columns that a team computes side by side, for the matvec family: 1, 2, 4 or 8; 1 for the others.
    pub columns: u32,
    /// Whether `unpack2x16float` keeps subnormals on this device.
    pub half_native: bool,
}

impl Variant {
    /// Threads of a workgroup.
    pub fn threads(&self) -> u32 {
        match (self.kernel.row().threads, self.team) {
            (Some(threads), _) => threads,
            (None, Some(team)) => team.threads(),
            (None, None) => unreachable!("a kernel of the matvec family has a team"),
        }
    }

    /// The variant's name: kernel, planes, cache type, team.
    pub fn name(&self) -> String {
        let mut name = self.kernel.stem().to_string();
        if let Some(planes) = self.planes {
            name += &format!(".{}", planes.name());
        }
        if let Some(kv) = self.kv {
            name += &format!(".kv_{}", kv.name());
        }
        match self.team {
            Some(Team::Subgroup { lanes }) => name += &format!(".sg{lanes}"),
            Some(Team::Tree) => name += ".tree",
            None => {}
        }
        if self.columns != 1 {
            name += &format!(".c{}", self.columns);
        }
        if self.half_native { name } else { name + ".exact_half" }
    }
}
