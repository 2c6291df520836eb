// A tile of 4 rows of one expert against 8 of its entries, wherever their activations lie; sums as in matmul_tile.wgsl.
// Needs `x`, `lists`, `experts`.
struct Tile {
    c0: vec4<f32>, c1: vec4<f32>, c2: vec4<f32>, c3: vec4<f32>,
    c4: vec4<f32>, c5: vec4<f32>, c6: vec4<f32>, c7: vec4<f32>,
}

// Where the activations of eight entries begin.
struct Starts { x0: u32, x1: u32, x2: u32, x3: u32, x4: u32, x5: u32, x6: u32, x7: u32 }

// A tile of lists.
struct Task { expert: u32, first: u32, count: u32 }

fn task_of(tile: u32) -> Task {
    return Task(lists[3u * tile], lists[3u * tile + 1u], lists[3u * tile + 2u]);
}

// The task's entry number i; those past the end repeat the last one.
fn entry_of(task: Task, i: u32) -> u32 {
    return lists[3u * params.tiles + task.first + min(i, task.count - 1u)];
}

// Where the activations of the task's entry number i begin.
fn x_of(task: Task, i: u32) -> u32 { return entry_of(task, i) / params.x_entries * params.units * 8u; }

// Adds the overlay of the row whose place in the sums is `one`.
fn overlay_tile(sums: Tile, row: Row, one: vec4<f32>, at: Starts) -> Tile {
    let range = overlay_range(row);
    var t = sums;
    for (var entry = range.x; entry < range.y; entry += 1u) {
        if (overlay_ends(entry)) { break; }
        let col = overlay_col(entry);
        let i = col >> 2u;
        let k = col & 3u;
        let change = one * overlay_change(row, entry);
        t.c0 = fma(change, vec4<f32>(x[at.x0 + i][k]), t.c0);
        t.c1 = fma(change, vec4<f32>(x[at.x1 + i][k]), t.c1);
        t.c2 = fma(change, vec4<f32>(x[at.x2 + i][k]), t.c2);
        t.c3 = fma(change, vec4<f32>(x[at.x3 + i][k]), t.c3);
        t.c4 = fma(change, vec4<f32>(x[at.x4 + i][k]), t.c4);
        t.c5 = fma(change, vec4<f32>(x[at.x5 + i][k]), t.c5);
        t.c6 = fma(change, vec4<f32>(x[at.x6 + i][k]), t.c6);
        t.c7 = fma(change, vec4<f32>(x[at.x7 + i][k]), t.c7);
    }
    return t;
}

fn tile(rows: vec4<u32>, part: u32, task: Task) -> Tile {
    let opened = rows_open(rows);
    let at = Starts(
        x_of(task, 0u), x_of(task, 1u), x_of(task, 2u), x_of(task, 3u),
        x_of(task, 4u), x_of(task, 5u), x_of(task, 6u), x_of(task, 7u),
    );
    var c0 = vec4<f32>(0.0);
    var c1 = vec4<f32>(0.0);
    var c2 = vec4<f32>(0.0);
    var c3 = vec4<f32>(0.0);
    var c4 = vec4<f32>(0.0);
    var c5 = vec4<f32>(0.0);
    var c6 = vec4<f32>(0.0);
    var c7 = vec4<f32>(0.0);
    for (var unit = 0u; unit < units_of_run(); unit += 1u) {
        let s = unit_scales(opened, unit);
        for (var j = 0u; j < 4u; j += 1u) {
            let w = block(opened, part, unit, j, s);
            let i = unit * 8u + j * 2u;
            c0 = column(c0, w, at.x0 + i);
            c1 = column(c1, w, at.x1 + i);
            c2 = column(c2, w, at.x2 + i);
            c3 = column(c3, w, at.x3 + i);
            c4 = column(c4, w, at.x4 + i);
            c5 = column(c5, w, at.x5 + i);
            c6 = column(c6, w, at.x6 + i);
            c7 = column(c7, w, at.x7 + i);
        }
    }
    var t = Tile(c0, c1, c2, c3, c4, c5, c6, c7);
    if (HAS_OVERLAY) {
        t = overlay_tile(t, opened.r0, vec4<f32>(1.0, 0.0, 0.0, 0.0), at);
        t = overlay_tile(t, opened.r1, vec4<f32>(0.0, 1.0, 0.0, 0.0), at);
        t = overlay_tile(t, opened.r2, vec4<f32>(0.0, 0.0, 1.0, 0.0), at);
        t = overlay_tile(t, opened.r3, vec4<f32>(0.0, 0.0, 0.0, 1.0), at);
    }
    let scale = row_scales(rows);
    return Tile(
        t.c0 * scale, t.c1 * scale, t.c2 * scale, t.c3 * scale, t.c4 * scale, t.c5 * scale, t.c6 * scale, t.c7 * scale,
    );
}
