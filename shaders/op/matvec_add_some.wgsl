// h[c][r] += sum_k w[r][k] * x[c][k] over the units that `list` names; then hg and squares as in matvec_add.wgsl.
// list: unused, units, unused, unused, then the units. The others as in matvec_add.wgsl.
struct Params {
    rows: u32,      // rows stored in this segment
    units: u32,     // units of 32 columns in a row
    row0: u32,      // first row of this segment in the outputs, a multiple of 4
    part1: u32,     // first row of the second stacked tensor, in this segment
    part2: u32,     // first row of the third
    y_stride: u32,  // vectors of 4 from one column of h to the next
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> scales: array<u32>;
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> list: array<u32>;
@group(0) @binding(5) var<storage, read> g: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> h: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> hg: array<vec4<f32>>;
@group(0) @binding(8) var<storage, read_write> squares: array<f32>;
const TWO_PARTS: bool = false;

fn add(column: u32, first: u32, values: vec4<f32>) {
    let all = vec4<u32>(first, first + 1u, first + 2u, first + 3u);
    let vector = (params.row0 + first) >> 2u;
    let i = column * params.y_stride + vector;
    let sum = h[i] + select(vec4<f32>(0.0), values, all < vec4<u32>(params.rows));
    h[i] = sum;
    hg[i] = sum * g[vector];
    squares[column * ((params.y_stride + 31u) & ~31u) + vector] = square_sum(sum);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first = team_block(group, thread) * 4u;
    let rows = rows_from(first);
    let dots = dot_rows(thread, rows, part_of(rows.x), part_of(rows.z));
    if (thread % LANES != 0u || first >= params.rows) { return; }
    let scale = row_scales(rows);
    // The bias of matvec_add, which is zero here, so that both round alike.
    let zero = vec4<f32>(0.0);
    add(0u, first, fma(dots.c0, scale, zero));
    if (COLS > 1u) { add(1u, first, fma(dots.c1, scale, zero)); }
    if (COLS > 2u) {
        add(2u, first, fma(dots.c2, scale, zero));
        add(3u, first, fma(dots.c3, scale, zero));
    }
    if (COLS > 4u) {
        add(4u, first, fma(dots.c4, scale, zero));
        add(5u, first, fma(dots.c5, scale, zero));
        add(6u, first, fma(dots.c6, scale, zero));
        add(7u, first, fma(dots.c7, scale, zero));
    }
}
