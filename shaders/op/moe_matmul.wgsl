// y[entry][r] = sum_k w[r][k] * x[entry / x_entries][k], with the weights of the entry's expert. Outputs of experts
// that the bank does not hold stay as they are.
// w [experts in the bank, outputs, 32*groups]; lists as moe_lists.wgsl writes them;
// x [entries / x_entries, 32*groups]; y [entries, y_stride vectors].
// A thread computes 4 rows and 8 entries of one expert.

#import moe_tile

fn store(tile: ExpertTile, i: u32, first: u32, value: vec4<f32>) {
    if (i >= tile.count || first >= params.outputs) { return; }
    let at = entry_of(tile, i) * params.y_stride + ((params.row0 + first) >> 2u);
    y[at] = select(vec4<f32>(0.0), value, four_from(first) < vec4<u32>(params.outputs));
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
    let rows = rows_from(first, params.outputs - 1u) + vec4<u32>(place * params.outputs);
    let t = tile_sums(rows, place, tile, lane);
    #each 0..8 store(tile, #u, first, t.c#);
}
