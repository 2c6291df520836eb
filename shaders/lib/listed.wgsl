// Four rows of weights against the units of one column of x that a list names: as in matvec.wgsl, but lane l takes entries l,
// l + 32, ... of the list, so that the sum is that of a matrix without the other units. Overlays are summed whole: x is zero
// in the units that are left out. Needs `x` and `list`: blocks, units, where the blocks begin, 0, the units, the blocks.
fn lane_listed(rows: Rows4, logical: u32) -> vec4<f32> {
    let count = list[1];
    var acc = vec4<f32>(0.0);
    for (var entry = logical; entry < count; entry += LOGICAL_LANES) {
        let unit = list[4u + entry];
        let unit_scales = vec4<f32>(
            unit_scale(rows.r0, unit), unit_scale(rows.r1, unit), unit_scale(rows.r2, unit), unit_scale(rows.r3, unit),
        );
        acc = fma(unit_scales, unit_dots(rows, unit, 0u), acc);
    }
    if (HAS_OVERLAY) { acc += overlay_dots(rows, logical, 0u); }
    return acc;
}

// The dot products of four stored rows of one part, without their row scales.
fn listed_rows(thread: u32, numbers: vec4<u32>, part: u32) -> vec4<f32> {
    let lane = thread % LANES;
    let rows = Rows4(
        row_open(numbers.x), row_open(numbers.y), row_open(numbers.z), row_open(numbers.w), numbers, part, part,
    );
    if (STEPS == 1u) { return team_sum(thread, lane_listed(rows, lane)); }
    var stack: Joined;
    for (var step = 0u; step < STEPS; step += 1u) {
        join(&stack, step, lane_listed(rows, logical_lane(lane, step)));
    }
    return team_sum(thread, joined(&stack));
}
