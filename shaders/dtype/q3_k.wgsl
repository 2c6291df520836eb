// 3-bit codes q with the value (q - 4) d (step - 32); an f16 d for 8 groups, 6-bit steps for half groups.
// The constants of block.wgsl.
const CODE_BITS: u32 = 3u;
const LEVELS: u32 = LINEAR;
const CODE_ZERO: f32 = 4.0;
const SCALE: u32 = HALF;
const SCALE_GROUPS: u32 = 8u;
const STEP_BITS: u32 = 6u;
const STEP_ZERO: f32 = 32.0;
const HALF_GROUPS: bool = true;
