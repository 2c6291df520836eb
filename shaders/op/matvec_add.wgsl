// h[c][r] += sum_k w[r][k] * x[c][k] + bias[r], for WIDTH tokens c. Then the first half of the next norm:
// x_scaled[c][r] = h[c][r] * g[r], and squares[c][r / 4] = the sum of h[c]^2 over 4 rows.
// w [rows, 32*groups]; x [WIDTH, 32*groups]; g [rows]; h, x_scaled [WIDTH, y_stride vectors];
// squares [WIDTH, y_stride padded to a multiple of 32].
// A team computes 4 rows.
// list: the biases [rows] as bits, if has_bias is 1.
// Masked: summed over the groups that `list` names, see groups_masked.wgsl. `list` has two purposes because a kernel
// can have only 8 storage buffers.

#import stacked
#import groups
#import matvec

const TWO_TENSORS: bool = false;

fn add(token: u32, first: u32, values: vec4<f32>) {
    let vector = (params.row0 + first) >> 2u;
    let i = token * params.y_stride + vector;
    let sum = h[i] + select(vec4<f32>(0.0), values, four_from(first) < vec4<u32>(params.rows));
    h[i] = sum;
    x_scaled[i] = sum * g[vector];
    squares[token * ((params.y_stride + 31u) & ~31u) + vector] = square_sum(sum);
}

// The biases of four rows. A masked step has no biases.
fn bias_of(first: u32) -> vec4<f32> {
    if (MASKED) { return vec4<f32>(0.0); }
    let i = (params.row0 + first) * params.has_bias;
    let bias = bitcast<vec4<f32>>(vec4<u32>(list[i], list[i + 1u], list[i + 2u], list[i + 3u]));
    return select(vec4<f32>(0.0), bias, params.has_bias != 0u);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first = team_block(workgroup, thread) * 4u;
    let rows = rows_from(first);
    let dots = dot_rows(thread, rows, tensor_of(rows.x), tensor_of(rows.z));
    if (thread % LANES != 0u || first >= params.rows) { return; }
    let scale = row_scales(rows);
    let offset = bias_of(first);
    #each 0..WIDTH add(#u, first, fma(dots.c#, scale, offset));
}
