//! The catalogue of GPU kernels: one row per file in `shaders/op`, and the parameters each takes.
//!
//! Knows weight types, not models or devices. A test holds every row against its WGSL: bindings, parameter offsets and
//! workgroup size.

mod params;
mod variant;

pub use params::*;
pub use variant::{Kv, MAX_COLUMNS, Team, Variant};

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

const TEAM_LIBS: &[&str] = &[
    "vector",
    "weights",
    "parts",
    "grid",
    "canon",
    "norm_scale",
    "every_unit",
    "matvec",
];
const MATMUL_LIBS: &[&str] = &[
    "vector",
    "weights",
    "parts",
    "ctl",
    "matmul",
    "tile_every",
    "matmul_tile",
];
const LISTED_LIBS: &[&str] = &[
    "vector",
    "weights",
    "parts",
    "ctl",
    "matmul",
    "tile_listed",
    "matmul_tile",
];

/// Of the decoding kernels that multiply gates and up projections.
const PAIR_LIBS: &[&str] = &[
    "vector",
    "weights",
    "grid",
    "canon",
    "norm_scale",
    "every_unit",
    "matvec",
    "glu",
];
/// Of the decoding kernels that choose experts themselves: `moe_glu`, `moe_matvec`.
const CHOOSING_LIBS: &[&str] = &[
    "vector",
    "weights",
    "grid",
    "canon",
    "norm_scale",
    "every_unit",
    "matvec",
    "glu",
    "experts",
    "route",
    "routes",
];
const CHOOSING_BINDINGS: &[Binding] = &[
    ("codes", Read),
    ("scales", Read),
    ("x", Read),
    ("squares", Read),
    ("experts", Read),
    ("router", Write),
    ("y", Write),
];
/// Of the kernels of a chunk that multiply gates and up projections of experts.
const GATED_TILE_LIBS: &[&str] = &[
    "vector",
    "weights",
    "ctl",
    "matmul",
    "moe_tile",
    "experts",
    "glu",
    "moe_gated",
];
/// Of all kernels of a chunk that compute tiles of experts.
const TILE_BINDINGS: &[Binding] = &[
    ("codes", Read),
    ("scales", Read),
    ("ctl", Read),
    ("experts", Read),
    ("lists", Read),
    ("x", Read),
    ("y", Write),
];

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
    MatmulSome,
    MatmulAddSome,
    MatmulGluSome,
    Glu,
    Rope,
    AttnBlock,
    AttnMerge,
    AttnChunk,
    AttnBlockSome,
    AttnMergeSome,
    AttnChunkSome,
    DeltaNet,
    MoeGlu,
    MoeMatvec,
    MoeDown,
    MoeRoute,
    MoeCount,
    MoeLists,
    MoeMatmulGlu,
    MoeMatmulUp,
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
    pub const ALL: [Kernel; 41] = [
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
        Kernel::MatmulSome,
        Kernel::MatmulAddSome,
        Kernel::MatmulGluSome,
        Kernel::Glu,
        Kernel::Rope,
        Kernel::AttnBlock,
        Kernel::AttnMerge,
        Kernel::AttnChunk,
        Kernel::AttnBlockSome,
        Kernel::AttnMergeSome,
        Kernel::AttnChunkSome,
        Kernel::DeltaNet,
        Kernel::MoeGlu,
        Kernel::MoeMatvec,
        Kernel::MoeDown,
        Kernel::MoeRoute,
        Kernel::MoeCount,
        Kernel::MoeLists,
        Kernel::MoeMatmulGlu,
        Kernel::MoeMatmulUp,
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
                libs: &["vector", "weights", "parts", "grid", "canon", "every_unit", "matvec"],
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
                libs: PAIR_LIBS,
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
                    "listed",
                    "matvec",
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
                libs: &["vector", "weights", "parts", "grid", "canon", "listed", "matvec"],
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
                libs: PAIR_LIBS,
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
                libs: &["vector", "weights", "ctl", "matmul", "glu", "matmul_pair"],
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
            Kernel::MatmulSome => &Row {
                stem: "matmul_some",
                libs: LISTED_LIBS,
                bindings: &[
                    ("codes", Read),
                    ("scales", Read),
                    ("ctl", Read),
                    ("x", Read),
                    ("list", Read),
                    ("bias", Read),
                    ("y", Write),
                ],
                threads: Some(32),
                weights: true,
                kv: false,
            },
            Kernel::MatmulAddSome => &Row {
                stem: "matmul_add_some",
                libs: LISTED_LIBS,
                bindings: &[
                    ("codes", Read),
                    ("scales", Read),
                    ("ctl", Read),
                    ("x", Read),
                    ("list", Read),
                    ("bias", Read),
                    ("h", Write),
                ],
                threads: Some(32),
                weights: true,
                kv: false,
            },
            Kernel::MatmulGluSome => &Row {
                stem: "matmul_glu_some",
                libs: &["vector", "weights", "ctl", "matmul", "glu", "matmul_pair"],
                bindings: &[
                    ("codes", Read),
                    ("scales", Read),
                    ("ctl", Read),
                    ("x", Read),
                    ("list", Read),
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
                libs: &["vector", "ctl", "attention", "gate", "attention_merge"],
                bindings: &[("ctl", Read), ("part", Read), ("qkv", Read), ("y", Write)],
                threads: Some(64),
                weights: false,
                kv: false,
            },
            Kernel::AttnChunk => &Row {
                stem: "attn_chunk",
                libs: &["vector", "ctl", "attention", "gate", "attention_chunk"],
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
            Kernel::AttnBlockSome => &Row {
                stem: "attn_block_some",
                libs: &["vector", "ctl", "attention"],
                bindings: &[
                    ("ctl", Read),
                    ("qkv", Read),
                    ("k_cache", Read),
                    ("v_cache", Read),
                    ("list", Read),
                    ("part", Write),
                ],
                threads: Some(64),
                weights: false,
                kv: true,
            },
            Kernel::AttnMergeSome => &Row {
                stem: "attn_merge_some",
                libs: &["vector", "ctl", "attention", "gate", "attention_merge"],
                bindings: &[
                    ("ctl", Read),
                    ("part", Read),
                    ("qkv", Read),
                    ("list", Read),
                    ("y", Write),
                ],
                threads: Some(64),
                weights: false,
                kv: false,
            },
            Kernel::AttnChunkSome => &Row {
                stem: "attn_chunk_some",
                libs: &["vector", "ctl", "attention", "gate", "attention_chunk"],
                bindings: &[
                    ("ctl", Read),
                    ("qkv", Read),
                    ("k_cache", Read),
                    ("v_cache", Read),
                    ("list", Read),
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
                libs: CHOOSING_LIBS,
                bindings: CHOOSING_BINDINGS,
                threads: None,
                weights: true,
                kv: false,
            },
            Kernel::MoeMatvec => &Row {
                stem: "moe_matvec",
                libs: CHOOSING_LIBS,
                bindings: CHOOSING_BINDINGS,
                threads: None,
                weights: true,
                kv: false,
            },
            Kernel::MoeDown => &Row {
                stem: "moe_down",
                libs: &["vector", "weights", "grid", "canon", "every_unit", "matvec", "experts"],
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
            Kernel::MoeCount => &Row {
                stem: "moe_count",
                libs: &["ctl", "experts", "route"],
                bindings: &[("ctl", Read), ("experts", Read), ("router", Read), ("counts", Write)],
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
                libs: GATED_TILE_LIBS,
                bindings: TILE_BINDINGS,
                threads: Some(32),
                weights: true,
                kv: false,
            },
            Kernel::MoeMatmulUp => &Row {
                stem: "moe_matmul_up",
                libs: GATED_TILE_LIBS,
                bindings: TILE_BINDINGS,
                threads: Some(32),
                weights: true,
                kv: false,
            },
            Kernel::MoeMatmul => &Row {
                stem: "moe_matmul",
                libs: &["vector", "weights", "ctl", "matmul", "moe_tile", "experts"],
                bindings: TILE_BINDINGS,
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
        matches!(
            self,
            Kernel::Matvec
                | Kernel::MatvecAdd
                | Kernel::MatvecGlu
                | Kernel::MatvecSome
                | Kernel::MatvecAddSome
                | Kernel::MatvecGluSome
        )
    }

    /// The kernel's name.
    pub fn stem(self) -> &'static str {
        self.row().stem
    }
}
