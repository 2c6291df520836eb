// What one logical lane adds to the dot products of four rows with one or two columns, all of it in registers.

// One unit of four rows against one column.
fn unit_dots(rows: Rows4, unit: u32, column: u32) -> vec4<f32> {
    let v = prep_x(rows.part, unit, load_x(rows.column + column, unit));
    let sum = x_sum_if_needed(v);
    return vec4<f32>(
        unit_dot(rows.r0, unit, v, sum), unit_dot(rows.r1, unit, v, sum),
        unit_dot(rows.r2, unit, v, sum), unit_dot(rows.r3, unit, v, sum),
    );
}

// The columns take turns in one loop, and the sums take turns as c0: a unit's weights stay near, but neither they nor two
// columns' activations are kept in registers side by side.
fn lane_columns(thread: u32, rows: Rows4, logical: u32) -> Sums {
    // Two parts read different activations: both at once would take twice the registers.
    if (PREPARES_X && TWO_PARTS) {
        let a = lane_pairs(rows.r0, rows.r1, rows.part, rows.column, logical);
        let b = lane_pairs(rows.r2, rows.r3, rows.other_part, rows.column, logical);
        var both = Sums();
        both.c0 = vec4<f32>(a.c0, b.c0);
        both.c1 = vec4<f32>(a.c1, b.c1);
        return both;
    }
    let count = unit_count();
    var acc = Sums();
    var column = 0u;
    for (var entry = logical; entry < count; entry += select(0u, LOGICAL_LANES, column == 0u)) {
        let unit = unit_at(entry);
        let dots = unit_dots(rows, unit, column);
        let scales = vec4<f32>(
            unit_scale(rows.r0, unit), unit_scale(rows.r1, unit),
            unit_scale(rows.r2, unit), unit_scale(rows.r3, unit),
        );
        let sum = fma(scales, dots, acc.c0);
        column = (column + 1u) % COLS;
        acc.c0 = acc.c1;
        if (COLS == 1u) { acc.c0 = sum; } else { acc.c1 = sum; }
    }
    return acc;
}

// What one logical lane adds to the dot products of two rows of a part.
fn lane_pairs(r0: Row, r1: Row, part: u32, first: u32, logical: u32) -> Pairs {
    let count = unit_count();
    var acc = Pairs();
    var column = 0u;
    for (var entry = logical; entry < count; entry += select(0u, LOGICAL_LANES, column == 0u)) {
        let unit = unit_at(entry);
        let v = prep_x(part, unit, load_x(first + column, unit));
        let sum = x_sum_if_needed(v);
        let dots = vec2<f32>(unit_dot(r0, unit, v, sum), unit_dot(r1, unit, v, sum));
        let value = fma(vec2<f32>(unit_scale(r0, unit), unit_scale(r1, unit)), dots, acc.c0);
        column = (column + 1u) % COLS;
        acc.c0 = acc.c1;
        if (COLS == 1u) { acc.c0 = value; } else { acc.c1 = value; }
    }
    return acc;
}
