// 4-bit codes of a table, times an f16 for each group.
// The constants of block.wgsl.
const CODE_BITS: u32 = 4u;
const LEVELS: u32 = NONLINEAR;
const CODE_ZERO: f32 = 0.0;
const SCALE: u32 = HALF;
const SCALE_GROUPS: u32 = 1u;
const STEP_BITS: u32 = 0u;
const STEP_ZERO: f32 = 0.0;
const HALF_GROUPS: bool = false;
