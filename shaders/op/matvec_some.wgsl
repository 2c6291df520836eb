// y = a matvec with norm and bias, as in matvec.wgsl, over the units that `list` names, for the blocks of 4 rows that it
// names; the other blocks become zeros. list: blocks to compute, units, where the blocks begin, 0, then the units, then
// every block of this segment, those to compute first. w [rows, 32*units] quantised; x [32*units]; bias, y [rows].
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

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let team = team_block(group, thread);
    let count = list[0];
    let blocks_at = list[2];
    let blocks = (params.rows + 3u) >> 2u;
    let first = list[blocks_at + min(team, blocks - 1u)] * 4u;
    let rows = rows_from(first);
    let scale = norm_scale(thread, 0u);
    let dots = listed_rows(thread, rows, part_of(rows.x));
    let teams = max(count, 1u);
    if (team >= teams) { return; }
    for (var i = count + team * LANES + thread % LANES; i < blocks; i += teams * LANES) {
        y[(params.row0 >> 2u) + list[blocks_at + i]] = vec4<f32>(0.0);
    }
    if (thread % LANES != 0u || team >= count) { return; }
    let i = (params.row0 + first) >> 2u;
    let offset = bias[i * params.has_bias];
    let all = vec4<u32>(first, first + 1u, first + 2u, first + 3u);
    y[i] = select(vec4<f32>(0.0), fma(dots, row_scales(rows) * scale, offset), all < vec4<u32>(params.rows));
}
