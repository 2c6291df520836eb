// Four rows of weights against one column of activations, in the canonical order. Shared by the matvec family; needs `x`.
fn load_x(unit: u32) -> X32 {
    let i = unit * 8u;
    return X32(x[i], x[i + 1u], x[i + 2u], x[i + 3u], x[i + 4u], x[i + 5u], x[i + 6u], x[i + 7u]);
}

fn x_sum_if_needed(x: X32) -> f32 {
    if (NEEDS_SUM) { return x_sum(x); }
    return 0.0;
}

// What one logical lane adds to the dot products of two rows of a part.
fn lane_dots2(r0: Row, r1: Row, part: u32, logical: u32) -> vec2<f32> {
    var acc = vec2<f32>(0.0);
    for (var unit = logical; unit < params.units; unit += LOGICAL_LANES) {
        let v = prep_x(part, unit, load_x(unit));
        let sum = x_sum_if_needed(v);
        let dots = vec2<f32>(unit_dot(r0, unit, v, sum), unit_dot(r1, unit, v, sum));
        acc = fma(vec2<f32>(unit_scale(r0, unit), unit_scale(r1, unit)), dots, acc);
    }
    return acc;
}

// What one logical lane adds to the dot products of four rows.
fn lane_dots(r0: Row, r1: Row, r2: Row, r3: Row, part: u32, other_part: u32, logical: u32) -> vec4<f32> {
    // Two parts read different activations: both at once would take twice the registers.
    if (PREPARES_X && TWO_PARTS) {
        return vec4<f32>(lane_dots2(r0, r1, part, logical), lane_dots2(r2, r3, other_part, logical));
    }
    var acc = vec4<f32>(0.0);
    for (var unit = logical; unit < params.units; unit += LOGICAL_LANES) {
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

// What one logical lane adds for a row's overlay: every 32nd entry. The activations begin at vector `base`.
fn lane_overlay(row: Row, logical: u32, base: u32) -> f32 {
    let range = overlay_range(row);
    var acc = 0.0;
    for (var entry = range.x + logical; entry < range.y; entry += LOGICAL_LANES) {
        let col = overlay_col(entry);
        acc = fma(overlay_change(row, entry), x[base + (col >> 2u)][col & 3u], acc);
    }
    return acc;
}

// The dot products of four stored rows, without their row scales: rows x and y are of `part`, z and w of `other_part`.
fn dot_rows(thread: u32, rows: vec4<u32>, part: u32, other_part: u32) -> vec4<f32> {
    let lane = thread % LANES;
    let r0 = row_open(rows.x);
    let r1 = row_open(rows.y);
    let r2 = row_open(rows.z);
    let r3 = row_open(rows.w);
    // A loop of one step would hide from drivers that the one inside is the hot one.
    if (STEPS == 1u) {
        return team_sum(thread, lane_dots(r0, r1, r2, r3, part, other_part, lane));
    }
    var stack: Joined;
    for (var step = 0u; step < STEPS; step += 1u) {
        join(&stack, step, lane_dots(r0, r1, r2, r3, part, other_part, logical_lane(lane, step)));
    }
    return team_sum(thread, joined(&stack));
}

fn row_scales(rows: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(row_scale(rows.x), row_scale(rows.y), row_scale(rows.z), row_scale(rows.w));
}

// The four rows from `first`; rows past the end repeat the last one.
fn rows_from(first: u32) -> vec4<u32> {
    return min(vec4<u32>(first, first + 1u, first + 2u, first + 3u), vec4<u32>(params.rows - 1u));
}

// The index of this team's block of rows.
fn team_block(group: vec3<u32>, thread: u32) -> u32 { return folded(group) * TEAMS + thread / LANES; }
