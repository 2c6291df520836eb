// Four rows of weights against the units of x that a list names: as in matvec.wgsl, but lane l takes entries l, l + 32, ...
// of the list, so that the sum is that of a matrix without the other units. Overlays are summed whole: x is zero in the
// units that are left out. Needs `x` and `list`: blocks, units, where the blocks begin, 0, the units, the blocks.
fn lane_listed(r0: Row, r1: Row, r2: Row, r3: Row, part: u32, logical: u32) -> vec4<f32> {
    let count = list[1];
    var acc = vec4<f32>(0.0);
    for (var entry = logical; entry < count; entry += LOGICAL_LANES) {
        let unit = list[4u + entry];
        let v = prep_x(part, unit, load_x(unit));
        let sum = x_sum_if_needed(v);
        let dots = vec4<f32>(
            unit_dot(r0, unit, v, sum), unit_dot(r1, unit, v, sum),
            unit_dot(r2, unit, v, sum), unit_dot(r3, unit, v, sum),
        );
        let unit_scales = vec4<f32>(
            unit_scale(r0, unit), unit_scale(r1, unit), unit_scale(r2, unit), unit_scale(r3, unit),
        );
        acc = fma(unit_scales, dots, acc);
    }
    if (HAS_OVERLAY) {
        acc += vec4<f32>(
            lane_overlay(r0, logical, 0u), lane_overlay(r1, logical, 0u),
            lane_overlay(r2, logical, 0u), lane_overlay(r3, logical, 0u),
        );
    }
    return acc;
}

// The dot products of four stored rows of one part, without their row scales.
fn listed_rows(thread: u32, rows: vec4<u32>, part: u32) -> vec4<f32> {
    let lane = thread % LANES;
    let r0 = row_open(rows.x);
    let r1 = row_open(rows.y);
    let r2 = row_open(rows.z);
    let r3 = row_open(rows.w);
    if (STEPS == 1u) { return team_sum(thread, lane_listed(r0, r1, r2, r3, part, lane)); }
    var stack: Joined;
    for (var step = 0u; step < STEPS; step += 1u) {
        join(&stack, step, lane_listed(r0, r1, r2, r3, part, logical_lane(lane, step)));
    }
    return team_sum(thread, joined(&stack));
}
