// A tile of the matmul family: 4 rows of weights times up to 8 tokens. Each sum is one chain along the row.
// Needs: `x` [tokens, 8*groups vectors]; params.groups.

#import vector
#import weights
#import dtype
#import share

struct Rows4 { r0: Row, r1: Row, r2: Row, r3: Row }

// Eight columns of four rows: vector k_i is column i of all four rows.
struct Weights4x8 {
    #each 0..8 k#: vec4<f32>,
}

fn rows_open(rows: vec4<u32>) -> Rows4 {
    return Rows4(row_open(rows.x), row_open(rows.y), row_open(rows.z), row_open(rows.w));
}

// Numbers of the four rows from `first`; rows after `last` repeat it.
fn rows_from(first: u32, last: u32) -> vec4<u32> {
    return min(four_from(first), vec4<u32>(last));
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
    #each 0..4 let w# = prep_w(tensor, group, j, codes8(rows.r#, group, j));
    return Weights4x8(
        #each 0..4 s * vec4<f32>(w0.a[#], w1.a[#], w2.a[#], w3.a[#]),
        #each 0..4 s * vec4<f32>(w0.b[#], w1.b[#], w2.b[#], w3.b[#]),
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
        #each 0..4 v.c# = fma(change, vec4<f32>(x[i + #u * stride][k]), v.c#);
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

// A vector of x that every lane of a subgroup needs: the one that lane `lane` has loaded, or else vector i.
fn shared_x(own: vec4<f32>, lane: u32, i: u32) -> vec4<f32> {
    if (SHARES) { return shared_from(own, lane); }
    return x[i];
}
// What a lane loads for the others.
fn own_x(i: u32) -> vec4<f32> {
    if (SHARES) { return x[i]; }
    return vec4<f32>(0.0);
}

// Adds eight columns to the four sums of one token, whose activations of these columns are p and q.
fn add_terms(acc: vec4<f32>, w: Weights4x8, p: vec4<f32>, q: vec4<f32>) -> vec4<f32> {
    var v = fma(w.k0, vec4<f32>(p.x), acc);
    v = fma(w.k1, vec4<f32>(p.y), v);
    v = fma(w.k2, vec4<f32>(p.z), v);
    v = fma(w.k3, vec4<f32>(p.w), v);
    v = fma(w.k4, vec4<f32>(q.x), v);
    v = fma(w.k5, vec4<f32>(q.y), v);
    v = fma(w.k6, vec4<f32>(q.z), v);
    return fma(w.k7, vec4<f32>(q.w), v);
}
