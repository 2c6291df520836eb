// Counts the experts that the columns of this run take: counts[expert] += 1 for each of them. router [columns, stride]: logits
// as bits. A workgroup takes one column.
struct Params {
    stride: u32,  // elements from one column's logits to the next
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ctl: Ctl;
@group(0) @binding(2) var<storage, read> experts: Experts;
@group(0) @binding(3) var<storage, read> router: array<u32>;
@group(0) @binding(4) var<storage, read_write> counts: array<atomic<u32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let c = group.x;
    if (c >= ctl.columns) { return; }
    rank_experts(thread, c * params.stride);
    workgroupBarrier();
    if (thread < experts.top_k) { atomicAdd(&counts[chosen[thread]], 1u); }
}
