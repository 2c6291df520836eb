// What one logical lane adds to the dot products of four rows with four or eight columns, whose sums would take too many
// registers: those of rows r1 and r3 lie in workgroup memory, where every thread has places of its own, and where that is not
// enough those of r2 too. The columns take turns as in columns_near.wgsl. A row that only repeats the one before it is not
// summed, since nobody stores it; and as what follows such a condition begins when what precedes it is done, drivers do not
// load all rows' weights at once.

// Whether only the sums of r0 stay in registers: where rows take many, and where their units are looked up for eight columns.
const ONE_NEAR: bool = APART || (LISTED && COLS > 4u);

var<workgroup> far: array<vec2<f32>, COLS * THREADS>;
var<workgroup> far_too: array<f32, select(1u, COLS * THREADS, ONE_NEAR)>;

// The sums of r0 and r2 after c0 got this value, with the next column's in c0.
fn turned(s: Pairs, value: vec2<f32>) -> Pairs {
    if (COLS == 4u) { return Pairs(s.c1, s.c2, s.c3, value, s.c4, s.c5, s.c6, s.c7); }
    return Pairs(s.c1, s.c2, s.c3, s.c4, s.c5, s.c6, s.c7, value);
}

// A sum and one unit's share of it.
fn grown(acc: f32, row: Row, unit: u32, v: X32, sum: f32) -> f32 {
    return fma(unit_scale(row, unit), unit_dot(row, unit, v, sum), acc);
}

// The sums of both parts' rows, each part in a loop of its own: they read different activations.
fn lane_parts(thread: u32, rows: Rows4, logical: u32) -> Pairs {
    let more = rows.numbers.y != rows.numbers.x;
    let count = unit_count();
    var near = Pairs();
    var column = 0u;
    for (var entry = logical; entry < count; entry += select(0u, LOGICAL_LANES, column == 0u)) {
        let unit = unit_at(entry);
        let v = prep_x(rows.part, unit, load_x(column, unit));
        let sum = x_sum_if_needed(v);
        let at = column * THREADS + thread;
        let value = grown(near.c0.x, rows.r0, unit, v, sum);
        if (more) { far[at].x = grown(far[at].x, rows.r1, unit, v, sum); }
        column = (column + 1u) % COLS;
        near = turned(near, vec2<f32>(value, 0.0));
    }
    column = 0u;
    for (var entry = logical; entry < count; entry += select(0u, LOGICAL_LANES, column == 0u)) {
        let unit = unit_at(entry);
        let v = prep_x(rows.other_part, unit, load_x(column, unit));
        let sum = x_sum_if_needed(v);
        let at = column * THREADS + thread;
        let value = grown(near.c0.y, rows.r2, unit, v, sum);
        if (more) { far[at].y = grown(far[at].y, rows.r3, unit, v, sum); }
        column = (column + 1u) % COLS;
        near = turned(near, vec2<f32>(near.c0.x, value));
    }
    return near;
}

// The sums of rows that read the same activations.
fn lane_rows(thread: u32, rows: Rows4, logical: u32) -> Pairs {
    let repeats = rows.numbers.yzw == rows.numbers.xyz;
    let count = unit_count();
    var near = Pairs();
    var column = 0u;
    for (var entry = logical; entry < count; entry += select(0u, LOGICAL_LANES, column == 0u)) {
        let unit = unit_at(entry);
        let v = prep_x(rows.part, unit, load_x(column, unit));
        let sum = x_sum_if_needed(v);
        let at = column * THREADS + thread;
        var value = near.c0;
        value.x = grown(value.x, rows.r0, unit, v, sum);
        if (ONE_NEAR) {
            if (!repeats.y) { far_too[at] = grown(far_too[at], rows.r2, unit, v, sum); }
            if (!repeats.x) { far[at].x = grown(far[at].x, rows.r1, unit, v, sum); }
            if (!repeats.z) { far[at].y = grown(far[at].y, rows.r3, unit, v, sum); }
        } else {
            value.y = grown(value.y, rows.r2, unit, v, sum);
            if (!repeats.x) {
                let others = far[at];
                far[at] = vec2<f32>(
                    grown(others.x, rows.r1, unit, v, sum), grown(others.y, rows.r3, unit, v, sum),
                );
            }
        }
        column = (column + 1u) % COLS;
        near = turned(near, value);
    }
    return near;
}

// The sums of all four rows and a column.
fn four(thread: u32, near: vec2<f32>, column: u32) -> vec4<f32> {
    let at = column * THREADS + thread;
    let others = far[at];
    if (ONE_NEAR) { return vec4<f32>(near.x, others.x, far_too[at], others.y); }
    return vec4<f32>(near.x, others.x, near.y, others.y);
}

fn lane_columns(thread: u32, rows: Rows4, logical: u32) -> Sums {
    for (var column = 0u; column < COLS; column += 1u) {
        far[column * THREADS + thread] = vec2<f32>(0.0);
        if (ONE_NEAR) { far_too[column * THREADS + thread] = 0.0; }
    }
    var near: Pairs;
    if (PREPARES_X && TWO_PARTS) { near = lane_parts(thread, rows, logical); } else { near = lane_rows(thread, rows, logical); }
    var all = Sums();
    all.c0 = four(thread, near.c0, 0u);
    all.c1 = four(thread, near.c1, 1u);
    all.c2 = four(thread, near.c2, 2u);
    all.c3 = four(thread, near.c3, 3u);
    if (COLS > 4u) {
        all.c4 = four(thread, near.c4, 4u);
        all.c5 = four(thread, near.c5, 5u);
        all.c6 = four(thread, near.c6, 6u);
        all.c7 = four(thread, near.c7, 7u);
    }
    return all;
}
