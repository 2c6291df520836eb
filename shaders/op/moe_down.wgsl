// h[c][r] += sum_rank weight * sum_k w[place][r][k] * x[c][rank][k], for the tokens c of this run, over the experts
// that token c takes and this bank holds. Then x_scaled and squares as in matvec_add.wgsl.
// w [experts in the bank, outputs, 32*groups]; router: from word routes_at [tokens, top_k] of (place, weight);
// x: from group x_at [tokens, top_k, 32*groups]; g, h, x_scaled, squares as in matvec_add.wgsl.
// A team computes 4 rows of a token. The groups of all ranks are one row in the canonical order of canon.wgsl, so
// that all lanes have work even if experts are narrow.

#import groups
#import matvec
#import experts

const TWO_TENSORS: bool = false;

// The share of one logical lane in four sums of a token, overlays included.
fn lane_sums(block: vec4<u32>, token: u32, logical: u32) -> vec4<f32> {
    let routes_at = params.routes_at + 2u * token * params.top_k;
    let x_at = params.x_at + token * params.top_k * params.groups;
    var acc = vec4<f32>(0.0);
    for (var flat = logical; flat < params.top_k * params.groups; flat += LOGICAL_LANES) {
        // flat / groups, exactly: the product's rounding error is far less than the half that is added.
        let rank = u32((f32(flat) + 0.5) * params.inv_groups);
        let group = flat - rank * params.groups;
        let place = router[routes_at + 2u * rank];
        if (place == ABSENT) { continue; }
        let weight = bitcast<f32>(router[routes_at + 2u * rank + 1u]);
        let rows = block + vec4<u32>(place * params.outputs);
        let r0 = row_open(rows.x);
        let r1 = row_open(rows.y);
        let r2 = row_open(rows.z);
        let r3 = row_open(rows.w);
        let v = prep_x(place, group, load_x(0u, x_at + flat));
        let sum = x_sum_if_needed(v);
        let dots = vec4<f32>(
            group_dot(r0, group, v, sum), group_dot(r1, group, v, sum),
            group_dot(r2, group, v, sum), group_dot(r3, group, v, sum),
        );
        let group_scales = vec4<f32>(
            group_scale(r0, group), group_scale(r1, group), group_scale(r2, group), group_scale(r3, group),
        );
        acc = fma(group_scales * row_scales(rows) * weight, dots, acc);
    }
    if (HAS_OVERLAY) { acc += lane_overlays(block, routes_at, x_at, logical); }
    return acc;
}

// The share of one logical lane in the overlays: every 32nd entry of the rows of each rank's expert.
fn lane_overlays(block: vec4<u32>, routes_at: u32, x_at: u32, logical: u32) -> vec4<f32> {
    var acc = vec4<f32>(0.0);
    // The factor 1 makes the bound depend on a storage buffer, see run_groups.wgsl.
    let ranks = params.top_k * min(arrayLength(&router), 1u);
    for (var rank = 0u; rank < ranks; rank += 1u) {
        let place = router[routes_at + 2u * rank];
        if (place == ABSENT) { continue; }
        let weight = bitcast<f32>(router[routes_at + 2u * rank + 1u]);
        let rows = block + vec4<u32>(place * params.outputs);
        let base = (x_at + rank * params.groups) * 8u;
        let change = vec4<f32>(
            lane_overlay(row_open(rows.x), logical, base).a.x, lane_overlay(row_open(rows.y), logical, base).a.x,
            lane_overlay(row_open(rows.z), logical, base).a.x, lane_overlay(row_open(rows.w), logical, base).a.x,
        );
        acc = fma(vec4<f32>(weight), change, acc);
    }
    return acc;
}

// Four sums of a token, by a whole team.
fn sums(thread: u32, block: vec4<u32>, token: u32) -> vec4<f32> {
    let lane = thread % LANES;
    if (LANE_VISITS == 1u) { return team_sum(thread, lane_sums(block, token, lane)); }
    var stack: SumStack;
    for (var visit = 0u; visit < LANE_VISITS; visit += 1u) {
        push_sum(&stack, visit, lane_sums(block, token, logical_lane(lane, visit)));
    }
    return team_sum(thread, stack_sum(&stack));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first = team_block(workgroup, thread) * 4u;
    let c = workgroup.z;
    let added = sums(thread, min(four_from(first), vec4<u32>(params.outputs - 1u)), c);
    if (thread % LANES != 0u || first >= params.outputs) { return; }
    let vector = (params.row0 + first) >> 2u;
    let i = c * params.y_stride + vector;
    let sum = h[i] + select(vec4<f32>(0.0), added, four_from(first) < vec4<u32>(params.outputs));
    h[i] = sum;
    x_scaled[i] = sum * g[vector];
    squares[c * ((params.y_stride + 31u) & ~31u) + vector] = square_sum(sum);
}
