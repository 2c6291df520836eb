// Four rows of weights against COLS columns of activations, each column in the canonical order, so that a column's sum does
// not depend on how many run with it. Shared by the matvec family; needs `x` [COLS, 8*units vectors].
struct Sums {
    c0: vec4<f32>, c1: vec4<f32>, c2: vec4<f32>, c3: vec4<f32>,
    c4: vec4<f32>, c5: vec4<f32>, c6: vec4<f32>, c7: vec4<f32>,
}

// Four rows, and which of the stacked tensors the first and the last two belong to.
struct Rows4 { r0: Row, r1: Row, r2: Row, r3: Row, part: u32, other_part: u32 }

fn load_x(column: u32, unit: u32) -> X32 {
    let i = (column * params.units + unit) * 8u;
    return X32(x[i], x[i + 1u], x[i + 2u], x[i + 3u], x[i + 4u], x[i + 5u], x[i + 6u], x[i + 7u]);
}

fn x_sum_if_needed(x: X32) -> f32 {
    if (NEEDS_SUM) { return x_sum(x); }
    return 0.0;
}

// One unit of four rows against one column.
fn unit_dots(rows: Rows4, unit: u32, column: u32) -> vec4<f32> {
    let v = prep_x(rows.part, unit, load_x(column, unit));
    let sum = x_sum_if_needed(v);
    return vec4<f32>(
        unit_dot(rows.r0, unit, v, sum), unit_dot(rows.r1, unit, v, sum),
        unit_dot(rows.r2, unit, v, sum), unit_dot(rows.r3, unit, v, sum),
    );
}

// What one logical lane adds to the dot products of four rows. The columns take turns in one loop, and the sums take turns as
// c0: a unit's weights stay near, but neither they nor two columns' activations are kept in registers side by side.
fn lane_dots(rows: Rows4, logical: u32) -> Sums {
    var acc = Sums();
    // Two parts read different activations: both at once would take twice the registers.
    if (PREPARES_X && TWO_PARTS) {
        acc = both(lane_pairs(rows.r0, rows.r1, rows.part, logical), lane_pairs(rows.r2, rows.r3, rows.other_part, logical));
    } else {
        var column = 0u;
        for (var unit = logical; unit < params.units; unit += select(0u, LOGICAL_LANES, column == 0u)) {
            let dots = unit_dots(rows, unit, column);
            let scales = vec4<f32>(
                unit_scale(rows.r0, unit), unit_scale(rows.r1, unit),
                unit_scale(rows.r2, unit), unit_scale(rows.r3, unit),
            );
            let sum = fma(scales, dots, acc.c0);
            column = (column + 1u) % COLS;
            acc = turned(acc, sum);
        }
    }
    if (HAS_OVERLAY) {
        acc.c0 += overlay_dots(rows, logical, 0u);
        if (COLS > 1u) { acc.c1 += overlay_dots(rows, logical, 1u); }
        if (COLS > 2u) {
            acc.c2 += overlay_dots(rows, logical, 2u);
            acc.c3 += overlay_dots(rows, logical, 3u);
        }
        if (COLS > 4u) {
            acc.c4 += overlay_dots(rows, logical, 4u);
            acc.c5 += overlay_dots(rows, logical, 5u);
            acc.c6 += overlay_dots(rows, logical, 6u);
            acc.c7 += overlay_dots(rows, logical, 7u);
        }
    }
    return acc;
}

// The sums of COLS columns after c0 got this value, with the next column's in c0.
fn turned(s: Sums, value: vec4<f32>) -> Sums {
    if (COLS == 1u) { return Sums(value, s.c1, s.c2, s.c3, s.c4, s.c5, s.c6, s.c7); }
    if (COLS == 2u) { return Sums(s.c1, value, s.c2, s.c3, s.c4, s.c5, s.c6, s.c7); }
    if (COLS == 4u) { return Sums(s.c1, s.c2, s.c3, value, s.c4, s.c5, s.c6, s.c7); }
    return Sums(s.c1, s.c2, s.c3, s.c4, s.c5, s.c6, s.c7, value);
}

// The sums of two rows.
struct Pairs {
    c0: vec2<f32>, c1: vec2<f32>, c2: vec2<f32>, c3: vec2<f32>,
    c4: vec2<f32>, c5: vec2<f32>, c6: vec2<f32>, c7: vec2<f32>,
}

// What one logical lane adds to the dot products of two rows of a part, as `lane_dots` does.
fn lane_pairs(r0: Row, r1: Row, part: u32, logical: u32) -> Pairs {
    var s = Pairs();
    var column = 0u;
    for (var unit = logical; unit < params.units; unit += select(0u, LOGICAL_LANES, column == 0u)) {
        let v = prep_x(part, unit, load_x(column, unit));
        let sum = x_sum_if_needed(v);
        let dots = vec2<f32>(unit_dot(r0, unit, v, sum), unit_dot(r1, unit, v, sum));
        let value = fma(vec2<f32>(unit_scale(r0, unit), unit_scale(r1, unit)), dots, s.c0);
        column = (column + 1u) % COLS;
        if (COLS == 1u) { s = Pairs(value, s.c1, s.c2, s.c3, s.c4, s.c5, s.c6, s.c7); }
        if (COLS == 2u) { s = Pairs(s.c1, value, s.c2, s.c3, s.c4, s.c5, s.c6, s.c7); }
        if (COLS == 4u) { s = Pairs(s.c1, s.c2, s.c3, value, s.c4, s.c5, s.c6, s.c7); }
        if (COLS == 8u) { s = Pairs(s.c1, s.c2, s.c3, s.c4, s.c5, s.c6, s.c7, value); }
    }
    return s;
}

fn both(a: Pairs, b: Pairs) -> Sums {
    return Sums(
        vec4<f32>(a.c0, b.c0), vec4<f32>(a.c1, b.c1), vec4<f32>(a.c2, b.c2), vec4<f32>(a.c3, b.c3),
        vec4<f32>(a.c4, b.c4), vec4<f32>(a.c5, b.c5), vec4<f32>(a.c6, b.c6), vec4<f32>(a.c7, b.c7),
    );
}

// What one logical lane adds for the overlays of four rows.
fn overlay_dots(rows: Rows4, logical: u32, column: u32) -> vec4<f32> {
    let base = column * params.units * 8u;
    return vec4<f32>(
        lane_overlay(rows.r0, logical, base), lane_overlay(rows.r1, logical, base),
        lane_overlay(rows.r2, logical, base), lane_overlay(rows.r3, logical, base),
    );
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

fn team_sums(thread: u32, s: Sums) -> Sums {
    var all = s;
    all.c0 = team_sum(thread, s.c0);
    if (COLS > 1u) { all.c1 = team_sum(thread, s.c1); }
    if (COLS > 2u) {
        all.c2 = team_sum(thread, s.c2);
        all.c3 = team_sum(thread, s.c3);
    }
    if (COLS > 4u) {
        all.c4 = team_sum(thread, s.c4);
        all.c5 = team_sum(thread, s.c5);
        all.c6 = team_sum(thread, s.c6);
        all.c7 = team_sum(thread, s.c7);
    }
    return all;
}

// The dot products of four stored rows, without their row scales: rows x and y are of `part`, z and w of `other_part`.
fn dot_rows(thread: u32, numbers: vec4<u32>, part: u32, other_part: u32) -> Sums {
    let lane = thread % LANES;
    let rows = Rows4(
        row_open(numbers.x), row_open(numbers.y), row_open(numbers.z), row_open(numbers.w), part, other_part,
    );
    // A loop of one step would hide from drivers that the one inside is the hot one.
    if (STEPS == 1u) {
        return team_sums(thread, lane_dots(rows, lane));
    }
    var j0: Joined;
    var j1: Joined;
    var j2: Joined;
    var j3: Joined;
    var j4: Joined;
    var j5: Joined;
    var j6: Joined;
    var j7: Joined;
    for (var step = 0u; step < STEPS; step += 1u) {
        let s = lane_dots(rows, logical_lane(lane, step));
        join(&j0, step, s.c0);
        if (COLS > 1u) { join(&j1, step, s.c1); }
        if (COLS > 2u) {
            join(&j2, step, s.c2);
            join(&j3, step, s.c3);
        }
        if (COLS > 4u) {
            join(&j4, step, s.c4);
            join(&j5, step, s.c5);
            join(&j6, step, s.c6);
            join(&j7, step, s.c7);
        }
    }
    return team_sums(thread, Sums(
        joined(&j0), joined(&j1), joined(&j2), joined(&j3), joined(&j4), joined(&j5), joined(&j6), joined(&j7),
    ));
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
