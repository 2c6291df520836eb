// Chooses the experts of every token c of this run by the router's logits, and computes
// y[c][rank][r] = act(gate[r]) * up[r] with the weights of the expert at each rank. Gate and up are matrix products of
// x[c] with norm, as in matvec.wgsl; act is silu or gelu_tanh. Outputs of the shared expert are multiplied by its
// weight.
// w, rows of 32*groups: shared_outputs gate rows and as many up rows of the shared expert; `outputs` gate rows of
//   every expert in the bank; `outputs` up rows of every expert in the bank;
// x, squares as in matvec.wgsl; router and routes as in routes.wgsl;
// y: outputs of the shared expert [tokens, shared_stride]; from element y_at outputs of the chosen experts
//   [tokens, top_k, y_stride].
// A workgroup works for one rank of a token, or for as many outputs of the shared expert as an expert has. A team
// computes 2 outputs.

#import norm_scale
#import groups
#import matvec
#import glu
#import routes

const TWO_TENSORS: bool = true;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let c = workgroup.z;
    var first = (workgroup.x * TEAMS + thread / LANES) * 2u;
    // The first gate and up rows, their stacked tensors, the end of the outputs, their index in y, and their factor.
    var gate = 0u;
    var up = params.shared_outputs;
    var tensors = vec2<u32>(0u, 1u);
    var end = params.shared_outputs;
    var at = c * params.shared_stride + params.row0;
    var factor = 1.0;
    if (workgroup.y < params.first_shared) {
        let place = place_of_rank(workgroup, thread);
        if (place == ABSENT) { return; }
        gate = 2u * params.shared_outputs + place * params.outputs;
        up = gate + params.placed * params.outputs;
        let tensor = place + select(0u, 2u, params.shared_outputs != 0u);
        tensors = vec2<u32>(tensor, tensor + params.placed);
        end = params.outputs;
        at = params.y_at + (c * params.first_shared + workgroup.y) * params.y_stride + params.row0;
    } else {
        // The outputs of one expert, in whole pairs.
        let pairs = (params.outputs + 1u) >> 1u;
        let begin = (workgroup.y - params.first_shared) * pairs * 2u;
        first += begin;
        end = min(end, begin + pairs * 2u);
        factor = shared_weight(c * params.stride);
    }
    let second = min(first + 1u, end - 1u);
    let pair = vec2<u32>(min(first, end - 1u), second);
    let rows = vec4<u32>(pair + vec2<u32>(gate), pair + vec2<u32>(up));
    let scale = norm_scale(thread, c);
    let dots = dot_rows_from(thread, rows, tensors.x, tensors.y, c).c0;
    if (thread % LANES != 0u || first >= end) { return; }
    let v = dots * row_scales(rows) * scale;
    y[at + first] = glu(v.x, v.z) * factor;
    if (second != first) { y[at + second] = glu(v.y, v.w) * factor; }
}
