// Gate or up projections, where the two have different layouts. Chooses the experts of every token c of this run as
// moe_glu.wgsl does. With v[r] = the matrix product of x[c] with norm, as in matvec.wgsl, for the expert at each rank:
//   y[c][rank][r] = v[r]; or if `gated`, where y holds the gates, act(y[c][rank][r]) * v[r].
// w [experts in the bank, outputs, 32*groups]; or if top_k is 0 the rows of the shared expert, whose gated products
//   are multiplied by its weight;
// x, squares as in matvec.wgsl; router and routes as in routes.wgsl; y: from vector y_at [tokens, top_k, y_stride].
// A workgroup works for one rank of a token. A team computes 4 outputs.

#import norm_scale
#import groups
#import matvec
#import glu
#import routes

const TWO_TENSORS: bool = false;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let c = workgroup.z;
    let first = (workgroup.x * TEAMS + thread / LANES) * 4u;
    var place = 0u;
    var factor = 1.0;
    if (workgroup.y < params.top_k) {
        place = place_of_rank(workgroup, thread);
        if (place == ABSENT) { return; }
    } else {
        factor = shared_weight(c * params.stride);
    }
    let rows = min(four_from(first), vec4<u32>(params.outputs - 1u)) + vec4<u32>(place * params.outputs);
    let scale = norm_scale(thread, c);
    let dots = dot_rows_from(thread, rows, place, place, c).c0;
    if (thread % LANES != 0u || first >= params.outputs) { return; }
    let v = dots * row_scales(rows) * scale;
    let at = params.y_at + (c * max(params.top_k, 1u) + workgroup.y) * params.y_stride + ((params.row0 + first) >> 2u);
    let gate = y[at];
    let product = vec4<f32>(glu(gate.x, v.x), glu(gate.y, v.y), glu(gate.z, v.z), glu(gate.w, v.w)) * factor;
    let value = select(v, product, params.gated != 0u);
    y[at] = select(vec4<f32>(0.0), value, four_from(first) < vec4<u32>(params.outputs));
}
