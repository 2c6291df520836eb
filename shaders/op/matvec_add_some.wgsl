// h[r] += sum_k w[r][k] * x[k] over the units that `list` names; then hg and squares as in matvec_add.wgsl.
// list: unused, units, unused, unused, then the units. w [rows, 32*units] quantised; x [32*units]; the others [rows].
struct Params {
    rows: u32,   // rows stored in this segment
    units: u32,  // units of 32 columns in a row
    row0: u32,   // first row of this segment in the outputs, a multiple of 4
    part1: u32,  // first row of the second stacked tensor, in this segment
    part2: u32,  // first row of the third
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

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first = team_block(group, thread) * 4u;
    let rows = rows_from(first);
    let dots = listed_rows(thread, rows, part_of(rows.x));
    if (thread % LANES != 0u || first >= params.rows) { return; }
    let i = (params.row0 + first) >> 2u;
    let all = vec4<u32>(first, first + 1u, first + 2u, first + 3u);
    let zero = vec4<f32>(0.0);
    // The bias of matvec_add, which is zero here, so that both round alike.
    let sum = h[i] + select(zero, fma(dots, row_scales(rows), zero), all < vec4<u32>(params.rows));
    h[i] = sum;
    hg[i] = sum * g[i];
    squares[i] = square_sum(sum);
}
