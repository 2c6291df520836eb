// 4-bit codes q with the value q d + m; the f16 d and m of a group are a word.
// The constants of block.wgsl.
const CODE_BITS: u32 = 4u;
const LEVELS: u32 = LINEAR;
const CODE_ZERO: f32 = 0.0;
const SCALE: u32 = HALF_AND_MINIMUM;
const SCALE_GROUPS: u32 = 1u;
const STEP_BITS: u32 = 0u;
const STEP_ZERO: f32 = 0.0;
const HALF_GROUPS: bool = false;
