// Chooses the experts of every column of this run: routes[c] = index and weight of each, by rank, then 0 and the weight of
// the shared expert. router [columns, stride]: logits as bits. A workgroup takes one column.
struct Params {
    stride: u32,  // elements from one column's logits to the next
    shared_expert: u32,  // 1 = there is a shared expert, 0 = its weight is 0
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ctl: Ctl;
@group(0) @binding(2) var<storage, read> experts: Experts;
@group(0) @binding(3) var<storage, read> router: array<u32>;
@group(0) @binding(4) var<storage, read_write> routes: array<u32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let c = group.x;
    if (c >= ctl.columns) { return; }
    let base = c * params.stride;
    rank_experts(thread, base);
    workgroupBarrier();
    let softmax = softmax_of(thread, base);
    let at = c * (experts.top_k + 1u) * 2u;
    if (thread < experts.top_k) {
        routes[at + 2u * thread] = chosen[thread];
        routes[at + 2u * thread + 1u] = bitcast<u32>(route_weight(base, thread, softmax));
    }
    if (thread == 0u) {
        routes[at + 2u * experts.top_k] = 0u;
        routes[at + 2u * experts.top_k + 1u] = bitcast<u32>(select(0.0, shared_weight(base), params.shared_expert != 0u));
    }
}
