// The routes of a decoding run: the place and the weight of the expert that each token takes at each rank. The first
// workgroup of a token writes them to `router` [tokens, top_k] of (place, weight) from word `routes_at`, where
// moe_down.wgsl reads them.
// Needs: `experts`, `router` [tokens, stride] of logits as bits; params.stride, .routes_at.

#import route

fn write_routes(thread: u32, token: u32) {
    let base = token * params.stride;
    let softmax = softmax_of(thread, base);
    if (thread >= experts.top_k) { return; }
    let at = params.routes_at + 2u * (token * experts.top_k + thread);
    router[at] = experts.all[chosen[thread]].place;
    router[at + 1u] = bitcast<u32>(route_weight(base, thread, softmax));
}

// The place in this bank of the expert that token `workgroup.z` takes at rank `workgroup.y`. Also writes the token's
// routes.
fn place_of_rank(workgroup: vec3<u32>, thread: u32) -> u32 {
    rank_experts(thread, workgroup.z * params.stride);
    let expert = workgroupUniformLoad(&chosen[workgroup.y]);
    if (workgroup.x == 0u && workgroup.y == 0u) { write_routes(thread, workgroup.z); }
    return experts.all[expert].place;
}
