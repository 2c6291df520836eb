// y[c][r] = act(gate[c][r]) * up[c][r], for the tokens c of this run. Gate and up are matrix products of x with bias,
// as in matmul.wgsl; act is silu or gelu_tanh.
// w [2*outputs, 32*groups]: gate rows, then up rows; x [tokens, 32*groups]; y [tokens, y_stride vectors];
// bias: gate biases, and from element bias_up the up biases.
// A thread computes 4 outputs and 4 tokens.
// Masked: only the blocks of 4 outputs that `list` names, see groups_masked.wgsl; other outputs stay as they are.

#import matmul
#import run_groups
#import glu

fn store(token: u32, first: u32, gate: vec4<f32>, up: vec4<f32>) {
    if (token >= batch.count) { return; }
    let value = vec4<f32>(glu(gate.x, up.x), glu(gate.y, up.y), glu(gate.z, up.z), glu(gate.w, up.w));
    let i = token * params.y_stride + ((params.row0 + first) >> 2u);
    y[i] = select(vec4<f32>(0.0), value, four_from(first) < vec4<u32>(params.outputs));
}

// Computes the four outputs from `first` for the four tokens from token0. `lane`: of a subgroup of 8.
fn store_outputs(first: u32, token0: u32, lane: u32) {
    let gate_rows = rows_from(first, params.outputs - 1u);
    let up_rows = gate_rows + vec4<u32>(params.outputs);
    let gate = rows_open(gate_rows);
    let up = rows_open(up_rows);
    let stride = params.groups * 8u;
    let base = token0 * stride;
    #each 0..4 var g# = vec4<f32>(0.0);
    #each 0..4 var u# = vec4<f32>(0.0);
    for (var group = 0u; group < groups_of_run(); group += 1u) {
        let gate_scales = group_scales(gate, group);
        let up_scales = group_scales(up, group);
        for (var j = 0u; j < 4u; j += 1u) {
            let i = base + group * 8u + j * 2u;
            let g = load_weights(gate, 0u, group, j, gate_scales);
            let own = own_x(i + lane % 4u * stride + lane / 4u);
            #each 0..4 let p# = shared_x(own, #u, i + #u * stride);
            #each 0..4 let q# = shared_x(own, 4u + #u, i + #u * stride + 1u);
            #each 0..4 g# = add_terms(g#, g, p#, q#);
            if (!MANY_REGISTERS) {
                let u = load_weights(up, 1u, group, j, up_scales);
                #each 0..4 u# = add_terms(u#, u, p#, q#);
            }
        }
        // If rows take many registers, gate and up rows at once take too many. Then x is read twice.
        for (var j = 0u; j < select(0u, 4u, MANY_REGISTERS); j += 1u) {
            let i = base + group * 8u + j * 2u;
            let u = load_weights(up, 1u, group, j, up_scales);
            let own = own_x(i + lane % 4u * stride + lane / 4u);
            #each 0..4 let p# = shared_x(own, #u, i + #u * stride);
            #each 0..4 u# = add_terms(u#, u, p#, shared_x(own, 4u + #u, i + #u * stride + 1u));
        }
    }
    if (first >= params.outputs) { return; }
    let g = add_overlays(SumsOf4Tokens(g0, g1, g2, g3), gate, base);
    let u = add_overlays(SumsOf4Tokens(u0, u1, u2, u3), up, base);
    let gs = row_scales(gate_rows);
    let us = row_scales(up_rows);
    let gate_bias = bias[((params.row0 + first) >> 2u) * params.has_bias];
    let up_bias = bias[((params.bias_up + params.row0 + first) >> 2u) * params.has_bias];
    #each 0..4 store(token0 + #u, first, fma(g.c#, gs, gate_bias), fma(u.c#, us, up_bias));
}

// The number of blocks of 4 outputs to compute.
fn active_blocks() -> u32 {
    if (MASKED) { return list[0]; }
    return (params.outputs + 3u) >> 2u;
}

fn first_output(block: u32) -> u32 {
    // Blocks past the last one have no outputs.
    if (MASKED) { return select(params.outputs, list[list[2] + min(block, list[0] - 1u)] * 4u, block < list[0]); }
    return block * 4u;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let block = workgroup.x * THREADS + thread;
    let lane = thread % LANES;
    let token0 = workgroup.y * 4u;
    // The lanes of a subgroup stay together, because they share activations.
    if (block - lane >= active_blocks() || token0 >= batch.count) { return; }
    store_outputs(first_output(block), token0, lane);
}
