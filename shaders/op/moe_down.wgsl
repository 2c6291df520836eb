// h[c][r] += sum_slot weight * sum_k w[place][r][k] * x[c][slot][k] over the experts that column c chose and this bank holds;
// then hg and squares as in matvec_add.wgsl. w: `outputs` rows of every placed expert, [32*units] quantised. router: place
// and weight of every slot [columns, slots] from `routes_at` on. x: from unit `x_at` on [columns, slots, 32*units].
// The units of all slots are one row for the canonical order, so that narrow experts keep every lane busy. 4 rows a team.
struct Params {
    rows: u32,       // rows stored in this segment
    units: u32,      // units of 32 columns in a row
    inv_units: f32,  // 1 / units
    outputs: u32,    // rows of each expert in this segment
    row0: u32,       // first row of this segment in the outputs, a multiple of 4
    slots: u32,
    x_at: u32,       // units before the first slot's activations
    routes_at: u32,  // where places and weights begin
    y_stride: u32,   // vectors of 4 from one column of h to the next
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> scales: array<u32>;
@group(0) @binding(3) var<storage, read> router: array<u32>;
@group(0) @binding(4) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> g: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> h: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> hg: array<vec4<f32>>;
@group(0) @binding(8) var<storage, read_write> squares: array<f32>;
const TWO_PARTS: bool = false;

// What one logical lane adds to four sums of a column.
fn lane_sums(block: vec4<u32>, column: u32, logical: u32) -> vec4<f32> {
    let routes_at = params.routes_at + 2u * column * params.slots;
    let x_at = params.x_at + column * params.slots * params.units;
    var acc = vec4<f32>(0.0);
    for (var flat = logical; flat < params.slots * params.units; flat += LOGICAL_LANES) {
        // Exact: half a unit is far more than the product's rounding.
        let slot = u32((f32(flat) + 0.5) * params.inv_units);
        let unit = flat - slot * params.units;
        let place = router[routes_at + 2u * slot];
        if (place == ABSENT) { continue; }
        let weight = bitcast<f32>(router[routes_at + 2u * slot + 1u]);
        let rows = block + vec4<u32>(place * params.outputs);
        let r0 = row_open(rows.x);
        let r1 = row_open(rows.y);
        let r2 = row_open(rows.z);
        let r3 = row_open(rows.w);
        let v = prep_x(place, unit, load_x(0u, x_at + flat));
        let sum = x_sum_if_needed(v);
        let dots = vec4<f32>(unit_dot(r0, unit, v, sum), unit_dot(r1, unit, v, sum), unit_dot(r2, unit, v, sum), unit_dot(r3, unit, v, sum));
        let unit_scales = vec4<f32>(unit_scale(r0, unit), unit_scale(r1, unit), unit_scale(r2, unit), unit_scale(r3, unit));
        acc = fma(unit_scales * row_scales(rows) * weight, dots, acc);
    }
    if (HAS_OVERLAY) { acc += lane_overlays(block, routes_at, x_at, logical); }
    return acc;
}

// What one logical lane adds for overlays: every 32nd entry of each slot's rows.
fn lane_overlays(block: vec4<u32>, routes_at: u32, x_at: u32, logical: u32) -> vec4<f32> {
    var acc = vec4<f32>(0.0);
    // A bound that depends on more than uniforms.
    let slots = params.slots * min(arrayLength(&router), 1u);
    for (var slot = 0u; slot < slots; slot += 1u) {
        let place = router[routes_at + 2u * slot];
        if (place == ABSENT) { continue; }
        let weight = bitcast<f32>(router[routes_at + 2u * slot + 1u]);
        let rows = block + vec4<u32>(place * params.outputs);
        let base = (x_at + slot * params.units) * 8u;
        let change = vec4<f32>(
            lane_overlay(row_open(rows.x), logical, base).a.x, lane_overlay(row_open(rows.y), logical, base).a.x,
            lane_overlay(row_open(rows.z), logical, base).a.x, lane_overlay(row_open(rows.w), logical, base).a.x,
        );
        acc = fma(vec4<f32>(weight), change, acc);
    }
    return acc;
}

fn sums(thread: u32, block: vec4<u32>, column: u32) -> vec4<f32> {
    let lane = thread % LANES;
    if (STEPS == 1u) { return team_sum(thread, lane_sums(block, column, lane)); }
    var stack: Joined;
    for (var step = 0u; step < STEPS; step += 1u) {
        join(&stack, step, lane_sums(block, column, logical_lane(lane, step)));
    }
    return team_sum(thread, joined(&stack));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first = team_block(group, thread) * 4u;
    let all = vec4<u32>(first, first + 1u, first + 2u, first + 3u);
    let c = group.z;
    let added = sums(thread, min(all, vec4<u32>(params.outputs - 1u)), c);
    if (thread % LANES != 0u || first >= params.outputs) { return; }
    let vector = (params.row0 + first) >> 2u;
    let i = c * params.y_stride + vector;
    let sum = h[i] + select(vec4<f32>(0.0), added, all < vec4<u32>(params.outputs));
    h[i] = sum;
    hg[i] = sum * g[vector];
    squares[c * ((params.y_stride + 31u) & ~31u) + vector] = square_sum(sum);
}
