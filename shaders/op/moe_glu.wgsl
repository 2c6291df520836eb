// Chooses the experts of every column c by the router's logits, and makes y[c][slot][r] = act(gate[r]) * up[r] with the
// weights of the expert in every slot, both a scaled matvec of x[c] as in matvec.wgsl; the shared expert's y is also times its
// weight. w: `shared` gate rows and as many up rows of the shared expert, then `outputs` gate rows of every placed expert,
// then as many up rows of each, all [32*units] quantised. router as routes.wgsl has it. y: the shared expert's outputs
// [columns, shared_stride], and from `y_at` on those of the slots [columns, slots, y_stride].
// A workgroup works for one slot of a column: first those of the routed experts, then as many as the shared expert fills.
// One team computes 2 outputs.
struct Params {
    rows: u32,            // rows stored in this segment
    units: u32,           // units of 32 columns in a row
    outputs: u32,         // outputs of each expert in this segment
    placed: u32,          // experts in this segment
    shared_outputs: u32,  // outputs of the shared expert in this segment, 0 = it is not there
    first_shared: u32,    // slots before the shared expert's
    row0: u32,            // first of an expert's outputs in this segment
    y_at: u32,            // where the first slot's outputs begin
    y_stride: u32,        // elements from one slot's outputs to the next
    shared_stride: u32,   // elements from one column's outputs of the shared expert to the next
    stride: u32,          // elements from one column's logits to the next
    routes_at: u32,       // where places and weights begin
    square_vectors: u32,  // vectors of 4 sums of squares; 0, with eps 1, takes x as it is
    inv_cols: f32,        // 1 / number of elements under the norm
    eps: f32,
    gelu: u32,            // 1 = gelu_tanh, 0 = silu
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> scales: array<u32>;
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> squares: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> experts: Experts;
@group(0) @binding(6) var<storage, read_write> router: array<u32>;
@group(0) @binding(7) var<storage, read_write> y: array<f32>;
const TWO_PARTS: bool = true;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let c = group.z;
    var first = (group.x * TEAMS + thread / LANES) * 2u;
    // Gate and up rows, their parts, the end of the outputs, where they go, and their factor.
    var gate = 0u;
    var up = params.shared_outputs;
    var parts = vec2<u32>(0u, 1u);
    var end = params.shared_outputs;
    var at = c * params.shared_stride + params.row0;
    var factor = 1.0;
    if (group.y < params.first_shared) {
        let place = place_of_slot(group, thread);
        if (place == ABSENT) { return; }
        gate = 2u * params.shared_outputs + place * params.outputs;
        up = gate + params.placed * params.outputs;
        let part = place + select(0u, 2u, params.shared_outputs != 0u);
        parts = vec2<u32>(part, part + params.placed);
        end = params.outputs;
        at = params.y_at + (c * params.first_shared + group.y) * params.y_stride + params.row0;
    } else {
        // What a slot holds, in whole pairs.
        let pairs = (params.outputs + 1u) >> 1u;
        let begin = (group.y - params.first_shared) * pairs * 2u;
        first += begin;
        end = min(end, begin + pairs * 2u);
        factor = shared_weight(c * params.stride);
    }
    let second = min(first + 1u, end - 1u);
    let here = vec2<u32>(min(first, end - 1u), second);
    let rows = vec4<u32>(here + vec2<u32>(gate), here + vec2<u32>(up));
    let scale = norm_scale(thread, c);
    let dots = dot_rows_from(thread, rows, parts.x, parts.y, c).c0;
    if (thread % LANES != 0u || first >= end) { return; }
    let v = dots * row_scales(rows) * scale;
    y[at + first] = glu(v.x, v.z) * factor;
    if (second != first) { y[at + second] = glu(v.y, v.w) * factor; }
}
