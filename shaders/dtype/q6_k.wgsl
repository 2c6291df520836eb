// 6-bit codes q with the value (q - 32) d (step - 128); an f16 d for 8 groups, 8-bit steps for half groups.
// The constants of block.wgsl.
const CODE_BITS: u32 = 6u;
const LEVELS: u32 = LINEAR;
const CODE_ZERO: f32 = 32.0;
const SCALE: u32 = HALF;
const SCALE_GROUPS: u32 = 8u;
const STEP_BITS: u32 = 8u;
const STEP_ZERO: f32 = 128.0;
const HALF_GROUPS: bool = true;
