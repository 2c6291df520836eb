// y[c][r] = sum_k w[r][k] * x[c][k] + bias[r], for the tokens c of this run.
// w [rows, 32*groups]; x [tokens, 32*groups]; bias [rows]; y [tokens, y_stride vectors].
// A thread computes 4 rows and 8 tokens.
// Masked: only the blocks of 4 rows that `list` names, summed over the groups that it names; zeros in the other rows.
// For the list see groups_masked.wgsl.

#import matmul_tile

fn put(token: u32, first: u32, value: vec4<f32>) {
    if (token >= batch.count || first >= params.rows) { return; }
    let i = token * params.y_stride + ((params.row0 + first) >> 2u);
    y[i] = select(vec4<f32>(0.0), value, four_from(first) < vec4<u32>(params.rows));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let block = workgroup.x * THREADS + thread;
    let blocks = (params.rows + 3u) >> 2u;
    let token0 = workgroup.y * 8u;
    // The lanes of a subgroup stay together, because they share activations.
    if (block - thread % LANES >= blocks || token0 >= batch.count) { return; }
    var first = block * 4u;
    if (MASKED) {
        if (block - thread % LANES < list[0]) {
            let kept = min(block, list[0] - 1u);
            put_rows(select(params.rows, list[list[2] + kept] * 4u, block == kept), token0, thread % LANES);
        }
        if (block < list[0] || block >= blocks) { return; }
        first = list[list[2] + block] * 4u;
        for (var i = 0u; i < 8u; i += 1u) { put(token0 + i, first, vec4<f32>(0.0)); }
        return;
    }
    put_rows(first, token0, thread % LANES);
}
