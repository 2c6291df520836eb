// routes[c] = expert and weight at each rank, then 0 and the weight of the shared expert, for the tokens c of this
// run.
// router [tokens, stride]: logits as bits; routes [tokens, top_k + 1, 2].
// A workgroup computes one token.

#import tokens
#import route

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let c = workgroup.x;
    if (c >= batch.count) { return; }
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
