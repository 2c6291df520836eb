// The 8 lanes of a subgroup load one vector each of eight vectors that all of them need. A driver that computes the
// lanes one after another when they load, such as Mesa's software Vulkan, then takes an eighth of the time. All lanes of the
// subgroup have to be active.
const SHARES: bool = true;
// The vector that a lane has loaded.
fn shared_from(own: vec4<f32>, lane: u32) -> vec4<f32> { return subgroupShuffle(own, lane); }
// The larger ones of a lane's numbers and those of the lane `apart`, 1, 2 or 4, from it.
fn shared_max(v: vec4<f32>, apart: u32) -> vec4<f32> { return max(v, subgroupShuffleXor(v, apart)); }
