// A tile of 4 rows of weights against 8 columns of activations, each sum taken along the row in one chain. Shared by the
// matmul family; needs `x` [columns, 8*units vectors].
struct Rows4 { r0: Row, r1: Row, r2: Row, r3: Row }

// Eight weights of four rows, transposed: one vector holds one column of the four rows.
struct Block {
    k0: vec4<f32>, k1: vec4<f32>, k2: vec4<f32>, k3: vec4<f32>,
    k4: vec4<f32>, k5: vec4<f32>, k6: vec4<f32>, k7: vec4<f32>,
}

// The units of a row, none if the run has no columns. Besides: a loop or a branch that depends on uniforms alone makes the
// software Vulkan driver specialise and compile the kernel anew at every dispatch, so no hot kernel has one.
fn units_of_run() -> u32 { return params.units * min(ctl.columns, 1u); }

fn rows_open(rows: vec4<u32>) -> Rows4 {
    return Rows4(row_open(rows.x), row_open(rows.y), row_open(rows.z), row_open(rows.w));
}

// The four rows from `first`, at most `last`.
fn rows_from(first: u32, last: u32) -> vec4<u32> {
    return min(vec4<u32>(first, first + 1u, first + 2u, first + 3u), vec4<u32>(last));
}

fn row_scales(rows: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(row_scale(rows.x), row_scale(rows.y), row_scale(rows.z), row_scale(rows.w));
}

fn unit_scales(rows: Rows4, unit: u32) -> vec4<f32> {
    return vec4<f32>(
        unit_scale(rows.r0, unit), unit_scale(rows.r1, unit), unit_scale(rows.r2, unit), unit_scale(rows.r3, unit),
    );
}

fn block(rows: Rows4, part: u32, unit: u32, j: u32, s: vec4<f32>) -> Block {
    let a = prep_w(part, unit, j, codes8(rows.r0, unit, j));
    let b = prep_w(part, unit, j, codes8(rows.r1, unit, j));
    let c = prep_w(part, unit, j, codes8(rows.r2, unit, j));
    let d = prep_w(part, unit, j, codes8(rows.r3, unit, j));
    return Block(
        s * vec4<f32>(a.a.x, b.a.x, c.a.x, d.a.x), s * vec4<f32>(a.a.y, b.a.y, c.a.y, d.a.y),
        s * vec4<f32>(a.a.z, b.a.z, c.a.z, d.a.z), s * vec4<f32>(a.a.w, b.a.w, c.a.w, d.a.w),
        s * vec4<f32>(a.b.x, b.b.x, c.b.x, d.b.x), s * vec4<f32>(a.b.y, b.b.y, c.b.y, d.b.y),
        s * vec4<f32>(a.b.z, b.b.z, c.b.z, d.b.z), s * vec4<f32>(a.b.w, b.b.w, c.b.w, d.b.w),
    );
}

// The sums of four rows and four columns.
struct Four { c0: vec4<f32>, c1: vec4<f32>, c2: vec4<f32>, c3: vec4<f32> }

// Adds the overlay of the row whose place in the sums is `one`; the columns begin at vector `base`.
fn overlay_row(sums: Four, row: Row, one: vec4<f32>, base: u32) -> Four {
    let stride = params.units * 8u;
    let range = overlay_range(row);
    var v = sums;
    for (var entry = range.x; entry < range.y; entry += 1u) {
        if (overlay_ends(entry)) { break; }
        let col = overlay_col(entry);
        let i = base + (col >> 2u);
        let k = col & 3u;
        let change = one * overlay_change(row, entry);
        v.c0 = fma(change, vec4<f32>(x[i][k]), v.c0);
        v.c1 = fma(change, vec4<f32>(x[i + stride][k]), v.c1);
        v.c2 = fma(change, vec4<f32>(x[i + 2u * stride][k]), v.c2);
        v.c3 = fma(change, vec4<f32>(x[i + 3u * stride][k]), v.c3);
    }
    return v;
}

// The sums with the overlays of all four rows, where there are any.
fn overlaid(sums: Four, rows: Rows4, base: u32) -> Four {
    var v = sums;
    if (HAS_OVERLAY) {
        v = overlay_row(v, rows.r0, vec4<f32>(1.0, 0.0, 0.0, 0.0), base);
        v = overlay_row(v, rows.r1, vec4<f32>(0.0, 1.0, 0.0, 0.0), base);
        v = overlay_row(v, rows.r2, vec4<f32>(0.0, 0.0, 1.0, 0.0), base);
        v = overlay_row(v, rows.r3, vec4<f32>(0.0, 0.0, 0.0, 1.0), base);
    }
    return v;
}

// Eight more terms of four sums of one column, whose activations begin at vector i.
fn column(acc: vec4<f32>, w: Block, i: u32) -> vec4<f32> {
    let p = x[i];
    let q = x[i + 1u];
    var v = fma(w.k0, vec4<f32>(p.x), acc);
    v = fma(w.k1, vec4<f32>(p.y), v);
    v = fma(w.k2, vec4<f32>(p.z), v);
    v = fma(w.k3, vec4<f32>(p.w), v);
    v = fma(w.k4, vec4<f32>(q.x), v);
    v = fma(w.k5, vec4<f32>(q.y), v);
    v = fma(w.k6, vec4<f32>(q.z), v);
    return fma(w.k7, vec4<f32>(q.w), v);
}
