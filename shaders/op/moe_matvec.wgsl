// Gate or up projections alone, where the two lie in different types. Chooses the experts of every column c as moe_glu.wgsl
// does, and with v[r] = the scaled matvec of x[c] as in matvec.wgsl for the expert in every slot makes
//   y[c][slot][r] = v[r], or where `gated`, so that gates wait in y, act(y[c][slot][r]) * v[r].
// w: `outputs` rows of every placed expert, [32*units] quantised; or with no slots the shared expert's `outputs` rows, whose
// products with gates are also times its weight. router as routes.wgsl has it; y: from `y_at` on [columns, slots, 4*y_stride].
// A workgroup works for one slot of a column. One team computes 4 outputs.
struct Params {
    rows: u32,            // rows stored in this segment
    units: u32,           // units of 32 columns in a row
    outputs: u32,         // rows of each expert in this segment
    slots: u32,           // experts a token takes; 0 = the weights are the shared expert's
    row0: u32,            // first of an expert's rows in this segment, a multiple of 4
    y_at: u32,            // where the first slot's outputs begin, in vectors of 4
    y_stride: u32,        // vectors of 4 from one slot's outputs to the next
    stride: u32,          // elements from one column's logits to the next
    routes_at: u32,       // where places and weights begin
    square_vectors: u32,  // vectors of 4 sums of squares; 0, with eps 1, takes x as it is
    inv_cols: f32,        // 1 / number of elements under the norm
    eps: f32,
    gated: u32,           // 1 = y holds gates
    gelu: u32,            // 1 = gelu_tanh, 0 = silu
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> scales: array<u32>;
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> squares: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> experts: Experts;
@group(0) @binding(6) var<storage, read_write> router: array<u32>;
@group(0) @binding(7) var<storage, read_write> y: array<vec4<f32>>;
const TWO_PARTS: bool = false;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let c = group.z;
    let first = (group.x * TEAMS + thread / LANES) * 4u;
    var place = 0u;
    var factor = 1.0;
    if (group.y < params.slots) {
        place = place_of_slot(group, thread);
        if (place == ABSENT) { return; }
    } else {
        factor = shared_weight(c * params.stride);
    }
    let all = vec4<u32>(first, first + 1u, first + 2u, first + 3u);
    let rows = min(all, vec4<u32>(params.outputs - 1u)) + vec4<u32>(place * params.outputs);
    let scale = norm_scale(thread, c);
    let dots = dot_rows_from(thread, rows, place, place, c).c0;
    if (thread % LANES != 0u || first >= params.outputs) { return; }
    let v = dots * row_scales(rows) * scale;
    let at = params.y_at + (c * max(params.slots, 1u) + group.y) * params.y_stride + ((params.row0 + first) >> 2u);
    let gate = y[at];
    let product = vec4<f32>(glu(gate.x, v.x), glu(gate.y, v.y), glu(gate.z, v.z), glu(gate.w, v.w)) * factor;
    let value = select(v, product, params.gated != 0u);
    y[at] = select(vec4<f32>(0.0), value, all < vec4<u32>(params.outputs));
}
