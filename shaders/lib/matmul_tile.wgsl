// The sums of 4 rows and 8 columns, without row scales.
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
    for (var unit = 0u; unit < units_of_run(); unit += 1u) {
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
