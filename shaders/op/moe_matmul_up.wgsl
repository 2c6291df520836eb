// y[entry][r] = act(y[entry][r]) * sum_k w[r][k] * x[entry / x_entries][k], with the weights of the entry's expert.
// Before this step, moe_matmul.wgsl stores the gates in y. act is silu or gelu_tanh; operands as in moe_matmul.wgsl.
// A thread computes 4 rows and 8 entries of one expert.

#import moe_gated

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let lane = thread % LANES;
    let block = workgroup.x * THREADS + thread;
    let first = block * 4u;
    let tile = expert_tile(workgroup.y);
    // The lanes of a subgroup stay together, because they share activations.
    if ((block - lane) * 4u >= params.outputs || tile.count == 0u) { return; }
    let place = experts.all[tile.expert].place;
    if (place == ABSENT) { return; }
    let rows = rows_from(first, params.outputs - 1u) + vec4<u32>(place * params.outputs);
    store_products(tile, first, tile_sums(rows, place, tile, lane));
}
