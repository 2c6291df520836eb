// 4-bit codes of a table, times d (step - 32); an f16 d for 8 groups, 6-bit steps for groups.
// The constants of block.wgsl.
const CODE_BITS: u32 = 4u;
const LEVELS: u32 = NONLINEAR;
const CODE_ZERO: f32 = 0.0;
const SCALE: u32 = HALF;
const SCALE_GROUPS: u32 = 8u;
const STEP_BITS: u32 = 6u;
const STEP_ZERO: f32 = 32.0;
const HALF_GROUPS: bool = false;
