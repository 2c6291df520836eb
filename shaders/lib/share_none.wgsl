// Every thread loads all vectors that it needs itself, see share_subgroup.wgsl. Nothing calls the functions.
const SHARES: bool = false;
fn shared_from(own: vec4<f32>, lane: u32) -> vec4<f32> { return own; }
fn shared_max(v: vec4<f32>, apart: u32) -> vec4<f32> { return v; }
