//! Constants that Rust and WGSL share. Every shader contains all of them; unused ones are removed when it is compiled.

pub use super::grid::{GRID_WIDTH, KV_PAGE};

/// Largest number of tokens in one run of the decoding kernels.
pub const MAX_WIDTH: u32 = 8;
/// Tokens that a workgroup of prefill attention computes together.
pub const CHUNK_TOKENS: u32 = 32;
/// Queries that a workgroup of full attention computes together.
pub const FULL_QUERIES: u32 = 16;
/// Vectors of a head's values that a workgroup of full attention computes.
pub const FULL_VECTORS: u32 = 32;
/// Rows of the weight that a workgroup of a convolution computes.
pub const CONV_ROWS: u32 = 64;
/// Pixels that a workgroup of a convolution computes.
pub const CONV_PIXELS: u32 = 32;
/// Largest number of entries in a tile of tokens grouped by expert.
pub const EXPERT_TILE: u32 = 8;
/// Elements that a workgroup of the Hadamard transform computes: also the largest block.
pub const HADAMARD_TILE: u32 = 4096;
/// Largest number of experts in a layer.
pub const MAX_EXPERTS: u32 = 512;
/// Largest number of experts that a token takes.
pub const MAX_TOP_K: u32 = 64;
/// Words of a table of experts before the experts, see `Experts` in `shaders/lib/experts.wgsl`.
pub const TABLE_HEADER: usize = 8;
/// Words of a mask list before its entries.
pub const LIST_HEADER: u32 = 4;
/// The place of an expert that a bank does not hold, and the index of a logit that does not exist.
pub const ABSENT: u32 = u32::MAX;
/// Lower than every score and every logit. It is finite because drivers with fast math may not support infinity.
pub const LOWEST: f32 = -3.0e38;

/// The constants as WGSL declarations.
pub(crate) fn declarations() -> String {
    let words = [
        ("GRID_WIDTH", GRID_WIDTH),
        ("KV_PAGE", KV_PAGE),
        ("MAX_WIDTH", MAX_WIDTH),
        ("CHUNK_TOKENS", CHUNK_TOKENS),
        ("FULL_QUERIES", FULL_QUERIES),
        ("FULL_VECTORS", FULL_VECTORS),
        ("CONV_ROWS", CONV_ROWS),
        ("CONV_PIXELS", CONV_PIXELS),
        ("EXPERT_TILE", EXPERT_TILE),
        ("MAX_EXPERTS", MAX_EXPERTS),
        ("MAX_TOP_K", MAX_TOP_K),
        ("LIST_HEADER", LIST_HEADER),
        ("HADAMARD_TILE", HADAMARD_TILE),
        ("ABSENT", ABSENT),
        // The value of an unused overlay entry.
        ("NO_VALUE", crate::dtype::planes::NO_ENTRY >> 16),
    ];
    let declared = words.map(|(name, value)| format!("const {name}: u32 = {value}u;\n"));
    declared.concat() + &format!("const LOWEST: f32 = {LOWEST:e};\n")
}
