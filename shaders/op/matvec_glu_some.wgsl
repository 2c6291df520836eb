// y[c][r] = act(gate[c][r]) * up[c][r] as in matvec_glu.wgsl, for the outputs that `list` names; the others become zeros.
// list: outputs to compute, unused, unused, unused, then every output of this segment, those to compute first.
// The others as in matvec_glu.wgsl. One team computes 2 outputs.
struct Params {
    rows: u32,            // rows stored in this segment, gate and up together
    units: u32,           // units of 32 columns in a row
    row0: u32,            // first output of this segment in y
    part1: u32,           // outputs of this segment: where its up rows begin
    part2: u32,           // unused third part
    square_vectors: u32,  // vectors of 4 sums of squares; 0, with eps 1, takes x as it is
    inv_cols: f32,        // 1 / number of elements under the norm
    eps: f32,
    has_bias: u32,        // 0 = bias[0] is zero and stands for all
    bias_up: u32,         // where the up biases begin
    gelu: u32,            // 1 = gelu_tanh, 0 = silu
    y_stride: u32,        // vectors of 4 from one column of y to the next
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> scales: array<u32>;
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> squares: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> list: array<u32>;
@group(0) @binding(6) var<storage, read> bias: array<f32>;
@group(0) @binding(7) var<storage, read_write> y: array<f32>;
const TWO_PARTS: bool = true;

fn store(column: u32, i: u32, j: u32, v: vec4<f32>) {
    let base = column * params.y_stride * 4u;
    y[base + i] = glu(v.x, v.z);
    if (j != i) { y[base + j] = glu(v.y, v.w); }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let team = team_block(group, thread);
    let count = list[0];
    let last = max(count, 1u) - 1u;
    let first = list[4u + min(team * 2u, last)];
    let second = list[4u + min(team * 2u + 1u, last)];
    let rows = vec4<u32>(first, second, first + params.part1, second + params.part1);
    let dots = dot_rows(thread, rows, 0u, 1u);
    let norms = norm_scales(thread);
    let teams = last / 2u + 1u;
    if (team >= teams) { return; }
    for (var i = count + team * LANES + thread % LANES; i < params.part1; i += teams * LANES) {
        let output = params.row0 + list[4u + i];
        for (var column = 0u; column < COLS; column += 1u) { y[column * params.y_stride * 4u + output] = 0.0; }
    }
    if (thread % LANES != 0u || team * 2u >= count) { return; }
    let scale = row_scales(rows);
    let i = params.row0 + first;
    let j = params.row0 + second;
    let k = vec4<u32>(i, j, params.bias_up + i, params.bias_up + j) * params.has_bias;
    let offset = vec4<f32>(bias[k.x], bias[k.y], bias[k.z], bias[k.w]);
    store(0u, i, j, fma(dots.c0, scale * norms.c0, offset));
    if (COLS > 1u) { store(1u, i, j, fma(dots.c1, scale * norms.c1, offset)); }
    if (COLS > 2u) {
        store(2u, i, j, fma(dots.c2, scale * norms.c2, offset));
        store(3u, i, j, fma(dots.c3, scale * norms.c3, offset));
    }
    if (COLS > 4u) {
        store(4u, i, j, fma(dots.c4, scale * norms.c4, offset));
        store(5u, i, j, fma(dots.c5, scale * norms.c5, offset));
        store(6u, i, j, fma(dots.c6, scale * norms.c6, offset));
        store(7u, i, j, fma(dots.c7, scale * norms.c7, offset));
    }
}
