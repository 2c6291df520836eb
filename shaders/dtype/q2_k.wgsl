// 2-bit codes q with the value q d step - e offset step; the f16 d and e of 8 groups are a word, both steps of
// half a group a byte.
// The constants of block.wgsl.
const CODE_BITS: u32 = 2u;
const LEVELS: u32 = LINEAR;
const CODE_ZERO: f32 = 0.0;
const SCALE: u32 = HALF_AND_OFFSET;
const SCALE_GROUPS: u32 = 8u;
const STEP_BITS: u32 = 4u;
const STEP_ZERO: f32 = 0.0;
const HALF_GROUPS: bool = true;
