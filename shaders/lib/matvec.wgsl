// Four rows of weights against COLS columns of activations, each column in the canonical order, so that a column's sum does
// not depend on how many run with it. Shared by the matvec family; needs `x` [COLS, 8*units vectors], the units that
// every_unit.wgsl or listed.wgsl names, and `lane_columns` of columns_near.wgsl or columns_apart.wgsl.
struct Sums {
    c0: vec4<f32>, c1: vec4<f32>, c2: vec4<f32>, c3: vec4<f32>,
    c4: vec4<f32>, c5: vec4<f32>, c6: vec4<f32>, c7: vec4<f32>,
}

// Four rows, their numbers, which of the stacked tensors the first and the last two belong to, and the first column of x
// they meet, which is 0 where COLS is more than 2.
struct Rows4 { r0: Row, r1: Row, r2: Row, r3: Row, numbers: vec4<u32>, part: u32, other_part: u32, column: u32 }

// The sums of two rows.
struct Pairs {
    c0: vec2<f32>, c1: vec2<f32>, c2: vec2<f32>, c3: vec2<f32>,
    c4: vec2<f32>, c5: vec2<f32>, c6: vec2<f32>, c7: vec2<f32>,
}

fn load_x(column: u32, unit: u32) -> X32 {
    let i = (column * params.units + unit) * 8u;
    return X32(x[i], x[i + 1u], x[i + 2u], x[i + 3u], x[i + 4u], x[i + 5u], x[i + 6u], x[i + 7u]);
}

fn x_sum_if_needed(x: X32) -> f32 {
    if (NEEDS_SUM) { return x_sum(x); }
    return 0.0;
}

// What one logical lane adds to the dot products of four rows.
fn lane_dots(thread: u32, rows: Rows4, logical: u32) -> Sums {
    var acc = lane_columns(thread, rows, logical);
    if (HAS_OVERLAY) {
        let base = rows.column * params.units * 8u;
        let r0 = lane_overlay(rows.r0, logical, base);
        let r1 = lane_overlay(rows.r1, logical, base);
        let r2 = lane_overlay(rows.r2, logical, base);
        let r3 = lane_overlay(rows.r3, logical, base);
        acc.c0 += vec4<f32>(r0.a.x, r1.a.x, r2.a.x, r3.a.x);
        if (COLS > 1u) { acc.c1 += vec4<f32>(r0.a.y, r1.a.y, r2.a.y, r3.a.y); }
        if (COLS > 2u) {
            acc.c2 += vec4<f32>(r0.a.z, r1.a.z, r2.a.z, r3.a.z);
            acc.c3 += vec4<f32>(r0.a.w, r1.a.w, r2.a.w, r3.a.w);
        }
        if (COLS > 4u) {
            acc.c4 += vec4<f32>(r0.b.x, r1.b.x, r2.b.x, r3.b.x);
            acc.c5 += vec4<f32>(r0.b.y, r1.b.y, r2.b.y, r3.b.y);
            acc.c6 += vec4<f32>(r0.b.z, r1.b.z, r2.b.z, r3.b.z);
            acc.c7 += vec4<f32>(r0.b.w, r1.b.w, r2.b.w, r3.b.w);
        }
    }
    return acc;
}

// A row's sums of up to eight columns.
struct Eight { a: vec4<f32>, b: vec4<f32> }

// What one logical lane adds for a row's overlay: every 32nd entry. The first column's activations begin at vector `base`.
fn lane_overlay(row: Row, logical: u32, base: u32) -> Eight {
    let range = overlay_range(row);
    let stride = params.units * 8u;
    var acc = Eight();
    for (var entry = range.x + logical; entry < range.y; entry += LOGICAL_LANES) {
        if (overlay_ends(entry)) { break; }
        let col = overlay_col(entry);
        let change = overlay_change(row, entry);
        let i = base + (col >> 2u);
        let k = col & 3u;
        acc.a.x = fma(change, x[i][k], acc.a.x);
        if (COLS > 1u) { acc.a.y = fma(change, x[i + stride][k], acc.a.y); }
        if (COLS > 2u) {
            acc.a.z = fma(change, x[i + 2u * stride][k], acc.a.z);
            acc.a.w = fma(change, x[i + 3u * stride][k], acc.a.w);
        }
        if (COLS > 4u) {
            acc.b.x = fma(change, x[i + 4u * stride][k], acc.b.x);
            acc.b.y = fma(change, x[i + 5u * stride][k], acc.b.y);
            acc.b.z = fma(change, x[i + 6u * stride][k], acc.b.z);
            acc.b.w = fma(change, x[i + 7u * stride][k], acc.b.w);
        }
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
    return dot_rows_from(thread, numbers, part, other_part, 0u);
}

// The same with the columns of x from `column` on.
fn dot_rows_from(thread: u32, numbers: vec4<u32>, part: u32, other_part: u32, column: u32) -> Sums {
    let lane = thread % LANES;
    let rows = Rows4(
        row_open(numbers.x), row_open(numbers.y), row_open(numbers.z), row_open(numbers.w),
        numbers, part, other_part, column,
    );
    // A loop of one step would hide from drivers that the one inside is the hot one.
    if (STEPS == 1u) {
        return team_sums(thread, lane_dots(thread, rows, lane));
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
        let s = lane_dots(thread, rows, logical_lane(lane, step));
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
