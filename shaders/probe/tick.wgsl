// Adds 1 to each of the first limit[0] words of out: a dispatch whose only cost is to wait for the previous one.
@group(0) @binding(0) var<storage, read> limit: array<u32>;
@group(0) @binding(1) var<storage, read_write> out: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x >= limit[0]) { return; }
    out[id.x] += 1u;
}
