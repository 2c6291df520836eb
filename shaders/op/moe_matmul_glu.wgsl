// y[entry][r] = act(gate[r]) * up[r], with the weights of the entry's expert. Gate and up are matrix products of x;
// act is silu or gelu_tanh. Outputs of experts that the bank does not hold stay as they are.
// w as in moe_glu.wgsl; lists as moe_lists.wgsl writes them; x [tokens, 32*groups]; y [entries, y_stride vectors].
// A thread computes 4 outputs and 8 entries of one expert. It stores the gates in y, then replaces them by the
// products.

#import moe_gated

// Stores the gates of an entry.
fn keep(tile: ExpertTile, i: u32, first: u32, gate: vec4<f32>) {
    if (i >= tile.count || first >= params.outputs) { return; }
    y[output_index(tile, i, first)] = gate;
}

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
    let gate_row = 2u * params.shared_outputs + place * params.outputs;
    let up_row = gate_row + params.placed * params.outputs;
    let tensor = place + select(0u, 2u, params.shared_outputs != 0u);
    let rows = rows_from(first, params.outputs - 1u);
    let g = tile_sums(rows + vec4<u32>(gate_row), tensor, tile, lane);
    #each 0..8 keep(tile, #u, first, g.c#);
    store_products(tile, first, tile_sums(rows + vec4<u32>(up_row), tensor + params.placed, tile, lane));
}
