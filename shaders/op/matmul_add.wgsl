// h[c][r] += sum_k w[r][k] * x[c][k] + bias[r] for the columns c of this run.
// w [rows, 32*units] quantised; x [columns, 32*units]; bias [rows]; h [columns, 4*y_stride]. A thread takes 4 rows × 8 columns.
struct Params {
    rows: u32,      // rows stored in this segment
    units: u32,     // units of 32 columns in a row
    row0: u32,      // first row of this segment in h and bias, a multiple of 4
    part1: u32,     // first row of the second stacked tensor, in this segment
    part2: u32,     // first row of the third
    y_stride: u32,  // vectors of 4 from one column of h to the next
    has_bias: u32,  // 0 = bias[0] is zero and stands for all
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> scales: array<u32>;
@group(0) @binding(3) var<storage, read> ctl: Ctl;
@group(0) @binding(4) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> bias: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> h: array<vec4<f32>>;

fn put(column: u32, first: u32, value: vec4<f32>) {
    if (column >= ctl.columns) { return; }
    let all = vec4<u32>(first, first + 1u, first + 2u, first + 3u);
    let i = column * params.y_stride + ((params.row0 + first) >> 2u);
    h[i] += select(vec4<f32>(0.0), value, all < vec4<u32>(params.rows));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first = (group.x * THREADS + thread) * 4u;
    let column0 = group.y * 8u;
    if (first >= params.rows || column0 >= ctl.columns) { return; }
    put_rows(first, column0);
}
