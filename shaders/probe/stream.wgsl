// Reads a buffer once and keeps next to nothing: how fast weights could be read at best.
// data [vectors], out [THREADS of all workgroups]; a thread reads every (groups * 256)th vector.
@group(0) @binding(0) var<storage, read> data: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> out: array<u32>;
const THREADS: u32 = 256u;
const GROUPS: u32 = 2048u;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first = group.x * THREADS + thread;
    var sum = vec4<u32>(0u);
    for (var i = first; i < arrayLength(&data); i += THREADS * GROUPS) {
        sum ^= data[i];
    }
    // One word a workgroup, so that nothing is optimised away and nothing much is written.
    if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x12345678u || thread == 0u) {
        out[group.x] = sum.x;
    }
}
