// counts[expert] += 1, for each expert that a token of this run takes.
// router [tokens, stride]: logits as bits.
// A workgroup works for one token.

#import tokens
#import route

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let c = workgroup.x;
    if (c >= batch.count) { return; }
    rank_experts(thread, c * params.stride);
    workgroupBarrier();
    if (thread < experts.top_k) { atomicAdd(&counts[chosen[thread]], 1u); }
}
