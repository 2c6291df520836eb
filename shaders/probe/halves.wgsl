// All 65,536 halves as f32. A thread converts two with the built-in function of the driver.
@group(0) @binding(0) var<storage, read_write> out: array<vec2<f32>>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    out[id.x] = unpack2x16float((2u * id.x) | ((2u * id.x + 1u) << 16u));
}
