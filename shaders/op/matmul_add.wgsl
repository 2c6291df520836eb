// h[c][r] += sum_k w[r][k] * x[c][k] + bias[r], for the tokens c of this run.
// w [rows, 32*groups]; x [tokens, 32*groups]; bias [rows]; h [tokens, y_stride vectors].
// A thread computes 4 rows and 8 tokens.
// Masked: summed over the groups that `list` names, see groups_masked.wgsl.

#import matmul_tile

fn put(token: u32, first: u32, value: vec4<f32>) {
    if (token >= batch.count || first >= params.rows) { return; }
    let i = token * params.y_stride + ((params.row0 + first) >> 2u);
    h[i] += select(vec4<f32>(0.0), value, four_from(first) < vec4<u32>(params.rows));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let lane = thread % LANES;
    let block = workgroup.x * THREADS + thread;
    let token0 = workgroup.y * 8u;
    // The lanes of a subgroup stay together, because they share activations.
    if ((block - lane) * 4u >= params.rows || token0 >= batch.count) { return; }
    put_rows(block * 4u, token0, lane);
}
