// A tile of the matmul family: 4 rows of weights times up to 8 tokens. Each sum is one chain along the row.
// Needs: dtype; vector.wgsl, weights.wgsl, tokens.wgsl; `x` [tokens, 8*groups vectors], `batch`; params.groups.
struct Rows4 { r0: Row, r1: Row, r2: Row, r3: Row }

// Eight columns of four rows: vector k_i is column i of all four rows.
struct Weights4x8 {
    k0: vec4<f32>, k1: vec4<f32>, k2: vec4<f32>, k3: vec4<f32>,
    k4: vec4<f32>, k5: vec4<f32>, k6: vec4<f32>, k7: vec4<f32>,
}

// The groups of a row; 0 if the run has no tokens. The bound depends on a storage buffer for another reason: for a
// loop that depends on uniforms alone, Mesa's software Vulkan driver compiles the kernel anew at every dispatch.
fn groups_of_run() -> u32 { return params.groups * min(batch.count, 1u); }

fn rows_open(rows: vec4<u32>) -> Rows4 {
    return Rows4(row_open(rows.x), row_open(rows.y), row_open(rows.z), row_open(rows.w));
}

// Numbers of the four rows from `first`; rows after `last` repeat it.
fn rows_from(first: u32, last: u32) -> vec4<u32> {
    return min(vec4<u32>(first, first + 1u, first + 2u, first + 3u), vec4<u32>(last));
}

fn row_scales(rows: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(row_scale(rows.x), row_scale(rows.y), row_scale(rows.z), row_scale(rows.w));
}

fn group_scales(rows: Rows4, group: u32) -> vec4<f32> {
    return vec4<f32>(
        group_scale(rows.r0, group), group_scale(rows.r1, group), group_scale(rows.r2, group), group_scale(rows.r3, group),
    );
}

// Columns 8j to 8j + 7 of a group, times the scales s of the four rows' groups.
fn load_weights(rows: Rows4, tensor: u32, group: u32, j: u32, s: vec4<f32>) -> Weights4x8 {
    let a = prep_w(tensor, group, j, codes8(rows.r0, group, j));
    let b = prep_w(tensor, group, j, codes8(rows.r1, group, j));
    let c = prep_w(tensor, group, j, codes8(rows.r2, group, j));
    let d = prep_w(tensor, group, j, codes8(rows.r3, group, j));
    return Weights4x8(
        s * vec4<f32>(a.a.x, b.a.x, c.a.x, d.a.x), s * vec4<f32>(a.a.y, b.a.y, c.a.y, d.a.y),
        s * vec4<f32>(a.a.z, b.a.z, c.a.z, d.a.z), s * vec4<f32>(a.a.w, b.a.w, c.a.w, d.a.w),
        s * vec4<f32>(a.b.x, b.b.x, c.b.x, d.b.x), s * vec4<f32>(a.b.y, b.b.y, c.b.y, d.b.y),
        s * vec4<f32>(a.b.z, b.b.z, c.b.z, d.b.z), s * vec4<f32>(a.b.w, b.b.w, c.b.w, d.b.w),
    );
}

// Sums of four rows, for each of four tokens.
struct SumsOf4Tokens { c0: vec4<f32>, c1: vec4<f32>, c2: vec4<f32>, c3: vec4<f32> }

// Adds the overlay of one row. row_unit: 1 in the component of this row, else 0. The four tokens begin at vector
// `base` of x.
fn overlay_row(sums: SumsOf4Tokens, row: Row, row_unit: vec4<f32>, base: u32) -> SumsOf4Tokens {
    let stride = params.groups * 8u;
    let range = overlay_range(row);
    var v = sums;
    for (var entry = range.x; entry < range.y; entry += 1u) {
        if (overlay_ends(entry)) { break; }
        let col = overlay_col(entry);
        let i = base + (col >> 2u);
        let k = col & 3u;
        let change = row_unit * overlay_change(row, entry);
        v.c0 = fma(change, vec4<f32>(x[i][k]), v.c0);
        v.c1 = fma(change, vec4<f32>(x[i + stride][k]), v.c1);
        v.c2 = fma(change, vec4<f32>(x[i + 2u * stride][k]), v.c2);
        v.c3 = fma(change, vec4<f32>(x[i + 3u * stride][k]), v.c3);
    }
    return v;
}

// Adds the overlays of all four rows, if the type has overlays.
fn add_overlays(sums: SumsOf4Tokens, rows: Rows4, base: u32) -> SumsOf4Tokens {
    var v = sums;
    if (HAS_OVERLAY) {
        v = overlay_row(v, rows.r0, vec4<f32>(1.0, 0.0, 0.0, 0.0), base);
        v = overlay_row(v, rows.r1, vec4<f32>(0.0, 1.0, 0.0, 0.0), base);
        v = overlay_row(v, rows.r2, vec4<f32>(0.0, 0.0, 1.0, 0.0), base);
        v = overlay_row(v, rows.r3, vec4<f32>(0.0, 0.0, 0.0, 1.0), base);
    }
    return v;
}

// Adds eight columns to the four sums of one token. The activations of these columns begin at vector i of x.
fn add_terms(acc: vec4<f32>, w: Weights4x8, i: u32) -> vec4<f32> {
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
