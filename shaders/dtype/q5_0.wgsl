// 5-bit codes q with the value (q - 16) d; an f16 d for each group.
// The constants of block.wgsl.
const CODE_BITS: u32 = 5u;
const LEVELS: u32 = LINEAR;
const CODE_ZERO: f32 = 16.0;
const SCALE: u32 = HALF;
const SCALE_GROUPS: u32 = 1u;
const STEP_BITS: u32 = 0u;
const STEP_ZERO: f32 = 0.0;
const HALF_GROUPS: bool = false;
