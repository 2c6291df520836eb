// Adds one to one word: a dispatch that waits for the one before it and does nothing else.
@group(0) @binding(0) var<storage, read> limit: array<u32>;
@group(0) @binding(1) var<storage, read_write> out: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x >= limit[0]) { return; }
    out[id.x] += 1u;
}
