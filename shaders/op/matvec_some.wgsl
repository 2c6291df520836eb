// y = a matvec with norm and bias, as in matvec.wgsl, over the units that `list` names, for the blocks of 4 rows that it
// names; the other blocks become zeros. list: blocks to compute, units, where the blocks begin, 0, then the units, then
// every block of this segment, those to compute first. The others as in matvec.wgsl.
struct Params {
    rows: u32,            // rows stored in this segment
    units: u32,           // units of 32 columns in a row
    row0: u32,            // first row of this segment in y and bias, a multiple of 4
    part1: u32,           // first row of the second stacked tensor, in this segment
    part2: u32,           // first row of the third
    square_vectors: u32,  // vectors of 4 sums of squares; 0, with eps 1, takes x as it is
    inv_cols: f32,        // 1 / number of elements under the norm
    eps: f32,
    has_bias: u32,        // 0 = bias[0] is zero and stands for all
    y_stride: u32,        // vectors of 4 from one column of y to the next
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> scales: array<u32>;
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> squares: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> list: array<u32>;
@group(0) @binding(6) var<storage, read> bias: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> y: array<vec4<f32>>;
const TWO_PARTS: bool = false;

fn store(column: u32, first: u32, values: vec4<f32>) {
    let all = vec4<u32>(first, first + 1u, first + 2u, first + 3u);
    let i = column * params.y_stride + ((params.row0 + first) >> 2u);
    y[i] = select(vec4<f32>(0.0), values, all < vec4<u32>(params.rows));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let team = team_block(group, thread);
    let count = list[0];
    let blocks_at = list[2];
    let blocks = (params.rows + 3u) >> 2u;
    let first = list[blocks_at + min(team, blocks - 1u)] * 4u;
    let rows = rows_from(first);
    let dots = dot_rows(thread, rows, part_of(rows.x), part_of(rows.z));
    let norms = norm_scales(thread);
    let teams = max(count, 1u);
    if (team >= teams) { return; }
    for (var i = count + team * LANES + thread % LANES; i < blocks; i += teams * LANES) {
        let vector = (params.row0 >> 2u) + list[blocks_at + i];
        for (var column = 0u; column < COLS; column += 1u) { y[column * params.y_stride + vector] = vec4<f32>(0.0); }
    }
    if (thread % LANES != 0u || team >= count) { return; }
    let scale = row_scales(rows);
    let offset = bias[((params.row0 + first) >> 2u) * params.has_bias];
    store(0u, first, fma(dots.c0, scale * norms.c0, offset));
    if (COLS > 1u) { store(1u, first, fma(dots.c1, scale * norms.c1, offset)); }
    if (COLS > 2u) {
        store(2u, first, fma(dots.c2, scale * norms.c2, offset));
        store(3u, first, fma(dots.c3, scale * norms.c3, offset));
    }
    if (COLS > 4u) {
        store(4u, first, fma(dots.c4, scale * norms.c4, offset));
        store(5u, first, fma(dots.c5, scale * norms.c5, offset));
        store(6u, first, fma(dots.c6, scale * norms.c6, offset));
        store(7u, first, fma(dots.c7, scale * norms.c7, offset));
    }
}
