// 4-bit floating-point numbers, times a power of two for each group.
// The constants of block.wgsl.
const CODE_BITS: u32 = 4u;
const LEVELS: u32 = FP4;
const CODE_ZERO: f32 = 0.0;
const SCALE: u32 = POWER;
const SCALE_GROUPS: u32 = 1u;
const STEP_BITS: u32 = 0u;
const STEP_ZERO: f32 = 0.0;
const HALF_GROUPS: bool = false;
