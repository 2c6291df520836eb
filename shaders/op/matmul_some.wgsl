// y as in matmul.wgsl over the units that `list` names, for the blocks of 4 rows that it names; the other blocks become zeros.
// list: blocks to compute, units, where the blocks begin, 0, then the units, then every block of this segment, those to
// compute first. The others as in matmul.wgsl.
struct Params {
    rows: u32,      // rows stored in this segment
    units: u32,     // units of 32 columns in a row
    row0: u32,      // first row of this segment in y and bias, a multiple of 4
    part1: u32,     // first row of the second stacked tensor, in this segment
    part2: u32,     // first row of the third
    y_stride: u32,  // vectors of 4 from one column of y to the next
    has_bias: u32,  // 0 = bias[0] is zero and stands for all
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> scales: array<u32>;
@group(0) @binding(3) var<storage, read> ctl: Ctl;
@group(0) @binding(4) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> list: array<u32>;
@group(0) @binding(6) var<storage, read> bias: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> y: array<vec4<f32>>;

fn put(column: u32, first: u32, value: vec4<f32>) {
    if (column >= ctl.columns) { return; }
    let all = vec4<u32>(first, first + 1u, first + 2u, first + 3u);
    let i = column * params.y_stride + ((params.row0 + first) >> 2u);
    y[i] = select(vec4<f32>(0.0), value, all < vec4<u32>(params.rows));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let entry = group.x * THREADS + thread;
    let column0 = group.y * 8u;
    if (entry >= (params.rows + 3u) >> 2u || column0 >= ctl.columns) { return; }
    let first = list[list[2] + entry] * 4u;
    if (entry >= list[0]) {
        for (var i = 0u; i < 8u; i += 1u) { put(column0 + i, first, vec4<f32>(0.0)); }
        return;
    }
    put_rows(first, column0);
}
