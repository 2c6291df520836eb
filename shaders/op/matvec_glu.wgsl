// y[c][r] = act(gate[c][r]) * up[c][r], for WIDTH tokens c. Gate and up are matrix products of x with norm and bias,
// as in matvec.wgsl; act is silu or gelu_tanh.
// w [2*outputs, 32*groups]: gate rows, then up rows; x, squares as in matvec.wgsl; y [WIDTH, 4*y_stride];
// bias: gate biases, and from element bias_up the up biases.
// A team computes 2 outputs.
// Masked: only the outputs that `list` names; zeros in the other outputs.
// list: number of outputs to compute, 0, 0, 0; all outputs, those to compute first.

#import norm_scale
#import groups_all
#import matvec
#import glu

const TWO_TENSORS: bool = true;

fn store(token: u32, i: u32, j: u32, v: vec4<f32>) {
    let base = token * params.y_stride * 4u;
    y[base + i] = glu(v.x, v.z);
    if (j != i) { y[base + j] = glu(v.y, v.w); }
}

// The two outputs that a team computes. The second repeats the first at the end of an odd number of outputs.
fn outputs_of(team: u32) -> vec2<u32> {
    let first = team * 2u;
    if (MASKED) {
        let both = min(vec2<u32>(first, first + 1u), vec2<u32>(max(list[0], 1u) - 1u));
        return vec2<u32>(list[LIST_HEADER + both.x], list[LIST_HEADER + both.y]);
    }
    return vec2<u32>(first, min(first + 1u, params.outputs - 1u));
}

// Whether a team computes nothing. Without a mask, the output tells: then the number of the team needs no register.
fn is_past_end(team: u32, first: u32) -> bool {
    if (MASKED) { return team * 2u >= list[0]; }
    return first >= params.outputs;
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
    var gate_rows = outputs;
    if (!MASKED) { gate_rows = min(outputs, vec2<u32>(params.outputs - 1u)); }
    let rows = vec4<u32>(gate_rows, gate_rows + vec2<u32>(params.outputs));
    let dots = dot_rows(thread, rows, 0u, 1u);
    let norms = norm_scales(thread);
    if (MASKED) { zero_left_out(team, thread % LANES); }
    if (thread % LANES != 0u || is_past_end(team, outputs.x)) { return; }
    let scale = row_scales(rows);
    let i = params.row0 + outputs.x;
    let j = params.row0 + outputs.y;
    let k = vec4<u32>(i, j, params.bias_up + i, params.bias_up + j) * params.has_bias;
    let offset = vec4<f32>(bias[k.x], bias[k.y], bias[k.z], bias[k.w]);
    #each 0..WIDTH store(#u, i, j, fma(dots.c#, scale * norms.c#, offset));
}
