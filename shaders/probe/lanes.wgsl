// For each thread of a workgroup: its lane, the size of its subgroup, and the thread in the lane next to it.
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@compute @workgroup_size(128)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
    @builtin(subgroup_invocation_id) lane: u32,
    @builtin(subgroup_size) size: u32,
) {
    out[group.x * 128u + thread] = lane | (size << 8u) | (subgroupShuffleXor(thread, 1u) << 16u);
}
