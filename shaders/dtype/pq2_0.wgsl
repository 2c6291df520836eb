// 2-bit codes q with the value (q - 1) d; an f16 d for 4 groups.
// The constants of block.wgsl.
const CODE_BITS: u32 = 2u;
const LEVELS: u32 = LINEAR;
const CODE_ZERO: f32 = 1.0;
const SCALE: u32 = HALF;
const SCALE_GROUPS: u32 = 4u;
const STEP_BITS: u32 = 0u;
const STEP_ZERO: f32 = 0.0;
const HALF_GROUPS: bool = false;
