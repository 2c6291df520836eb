// What a column's slots take in decoding: needs route.wgsl, and `router` [columns, stride] of logits as bits, in which from
// `routes_at` on a column's first workgroup leaves place and weight of every slot [columns, slots].
fn write_routes(thread: u32, column: u32) {
    let base = column * params.stride;
    let softmax = softmax_of(thread, base);
    if (thread >= experts.top_k) { return; }
    let at = params.routes_at + 2u * (column * experts.top_k + thread);
    router[at] = experts.all[chosen[thread]].place;
    router[at + 1u] = bitcast<u32>(route_weight(base, thread, softmax));
}

// The place in this bank of the expert that slot `group.y` of column `group.z` takes.
fn place_of_slot(group: vec3<u32>, thread: u32) -> u32 {
    rank_experts(thread, group.z * params.stride);
    let expert = workgroupUniformLoad(&chosen[group.y]);
    if (group.x == 0u && group.y == 0u) { write_routes(thread, group.z); }
    return experts.all[expert].place;
}
