// 4 rows and 8 columns. Needs `bias`, `put`, which takes a sum to its column, and the units that tile_every.wgsl or
// tile_listed.wgsl names.

// The sums, without row scales.
struct Tile { left: Four, right: Four }

fn tile(rows: vec4<u32>, column0: u32) -> Tile {
    let opened = rows_open(rows);
    let part = part_of(rows.x);
    let stride = params.units * 8u;
    let base = column0 * stride;
    var c0 = vec4<f32>(0.0);
    var c1 = vec4<f32>(0.0);
    var c2 = vec4<f32>(0.0);
    var c3 = vec4<f32>(0.0);
    var c4 = vec4<f32>(0.0);
    var c5 = vec4<f32>(0.0);
    var c6 = vec4<f32>(0.0);
    var c7 = vec4<f32>(0.0);
    for (var entry = 0u; entry < tile_units(); entry += 1u) {
        let unit = tile_unit(entry);
        let s = unit_scales(opened, unit);
        for (var j = 0u; j < 4u; j += 1u) {
            let w = block(opened, part, unit, j, s);
            let i = base + unit * 8u + j * 2u;
            c0 = column(c0, w, i);
            c1 = column(c1, w, i + stride);
            c2 = column(c2, w, i + 2u * stride);
            c3 = column(c3, w, i + 3u * stride);
            c4 = column(c4, w, i + 4u * stride);
            c5 = column(c5, w, i + 5u * stride);
            c6 = column(c6, w, i + 6u * stride);
            c7 = column(c7, w, i + 7u * stride);
        }
    }
    return Tile(
        overlaid(Four(c0, c1, c2, c3), opened, base),
        overlaid(Four(c4, c5, c6, c7), opened, base + 4u * stride),
    );
}

// The four rows from `first` on in the columns from column0 on.
fn put_rows(first: u32, column0: u32) {
    let rows = rows_from(first, params.rows - 1u);
    let t = tile(rows, column0);
    let scale = row_scales(rows);
    let offset = bias[((params.row0 + first) >> 2u) * params.has_bias];
    put(column0, first, fma(t.left.c0, scale, offset));
    put(column0 + 1u, first, fma(t.left.c1, scale, offset));
    put(column0 + 2u, first, fma(t.left.c2, scale, offset));
    put(column0 + 3u, first, fma(t.left.c3, scale, offset));
    put(column0 + 4u, first, fma(t.right.c0, scale, offset));
    put(column0 + 5u, first, fma(t.right.c1, scale, offset));
    put(column0 + 6u, first, fma(t.right.c2, scale, offset));
    put(column0 + 7u, first, fma(t.right.c3, scale, offset));
}
