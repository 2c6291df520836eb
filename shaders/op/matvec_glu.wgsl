// y[c][r] = act(gate[c][r]) * up[c][r], for WIDTH tokens c. Gate and up are matrix products of x with norm and bias,
// as in matvec.wgsl; act is silu or gelu_tanh.
// w [2*outputs, 32*groups]: gate rows, then up rows; x, squares as in matvec.wgsl; y [WIDTH, 4*y_stride];
// bias: gate biases, and from element bias_up the up biases.
// A team computes 2 outputs.
// Masked: only the outputs that `list` names; zeros in the other outputs.
// list: number of outputs to compute, 0, 0, 0; all outputs, those to compute first.

#import team
#import vector
#import weights
#import grid
#import canon
#import norm_scale
#import groups_all
#import matvec
#import tokens_side_by_side
#import glu
#import dtype

const TWO_TENSORS: bool = true;

fn store(token: u32, i: u32, j: u32, v: vec4<f32>) {
    let base = token * params.y_stride * 4u;
    y[base + i] = glu(v.x, v.z);
    if (j != i) { y[base + j] = glu(v.y, v.w); }
}

// The number of outputs to compute.
fn active_outputs() -> u32 {
    if (MASKED) { return list[0]; }
    return params.outputs;
}

// The two outputs that a team computes. Outputs past the end repeat the last one.
fn outputs_of(team: u32) -> vec2<u32> {
    let last = max(active_outputs(), 1u) - 1u;
    let both = min(vec2<u32>(team * 2u, team * 2u + 1u), vec2<u32>(last));
    if (MASKED) { return vec2<u32>(list[LIST_HEADER + both.x], list[LIST_HEADER + both.y]); }
    return both;
}

// Stores zeros in the outputs that the list leaves out. The teams that compute outputs share this work.
fn zero_left_out(team: u32, lane: u32) {
    let count = list[0];
    let teams = (max(count, 1u) + 1u) / 2u;
    if (team >= teams) { return; }
    for (var i = count + team * LANES + lane; i < params.outputs; i += teams * LANES) {
        let output = params.row0 + list[LIST_HEADER + i];
        for (var token = 0u; token < WIDTH; token += 1u) { y[token * params.y_stride * 4u + output] = 0.0; }
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let team = team_block(workgroup, thread);
    let outputs = outputs_of(team);
    let rows = vec4<u32>(outputs, outputs + vec2<u32>(params.outputs));
    let dots = dot_rows(thread, rows, 0u, 1u);
    let norms = norm_scales(thread);
    if (MASKED) { zero_left_out(team, thread % LANES); }
    if (thread % LANES != 0u || team * 2u >= active_outputs()) { return; }
    let scale = row_scales(rows);
    let i = params.row0 + outputs.x;
    let j = params.row0 + outputs.y;
    let k = vec4<u32>(i, j, params.bias_up + i, params.bias_up + j) * params.has_bias;
    let offset = vec4<f32>(bias[k.x], bias[k.y], bias[k.z], bias[k.w]);
    store(0u, i, j, fma(dots.c0, scale * norms.c0, offset));
    if (WIDTH > 1u) { store(1u, i, j, fma(dots.c1, scale * norms.c1, offset)); }
    if (WIDTH > 2u) {
        store(2u, i, j, fma(dots.c2, scale * norms.c2, offset));
        store(3u, i, j, fma(dots.c3, scale * norms.c3, offset));
    }
    if (WIDTH > 4u) {
        store(4u, i, j, fma(dots.c4, scale * norms.c4, offset));
        store(5u, i, j, fma(dots.c5, scale * norms.c5, offset));
        store(6u, i, j, fma(dots.c6, scale * norms.c6, offset));
        store(7u, i, j, fma(dots.c7, scale * norms.c7, offset));
    }
}
