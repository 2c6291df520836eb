// Reads a buffer once and writes almost nothing: an upper limit for how fast weights can be read.
// data [vectors], out [workgroups]; a thread reads every (GROUPS * THREADS)th vector.
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
    // The condition uses all sums, so that no load can be optimised away. It is almost never true for threads other
    // than 0.
    if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x12345678u || thread == 0u) {
        out[group.x] = sum.x;
    }
}
