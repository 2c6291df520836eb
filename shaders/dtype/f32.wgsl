// f32 weights: 8 vectors for each group, no scales.
// Needs: vector.wgsl, weights.wgsl; `codes` [rows, 8*groups vectors]; params.groups.
const NEEDS_SUM: bool = false;
const PREPARES_X: bool = false;
const MANY_REGISTERS: bool = false;
struct Row { code: u32 }

fn row_open(row: u32) -> Row { return Row(row * params.groups * 8u); }
fn row_scale(row: u32) -> f32 { return 1.0; }
fn prep_x(tensor: u32, group: u32, x: X32) -> X32 { return x; }
fn prep_w(tensor: u32, group: u32, j: u32, w: W8) -> W8 { return w; }
fn group_scale(row: Row, group: u32) -> f32 { return 1.0; }

fn word4(row: Row, group: u32, j: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(codes[row.code + group * 8u + j]);
}

fn group_dot(row: Row, group: u32, x: X32, sum: f32) -> f32 {
    var acc = word4(row, group, 0u) * x.a;
    acc = fma(word4(row, group, 1u), x.b, acc);
    acc = fma(word4(row, group, 2u), x.c, acc);
    acc = fma(word4(row, group, 3u), x.d, acc);
    acc = fma(word4(row, group, 4u), x.e, acc);
    acc = fma(word4(row, group, 5u), x.f, acc);
    acc = fma(word4(row, group, 6u), x.g, acc);
    acc = fma(word4(row, group, 7u), x.h, acc);
    return horizontal(acc);
}

fn codes8(row: Row, group: u32, j: u32) -> W8 {
    return W8(word4(row, group, 2u * j), word4(row, group, 2u * j + 1u));
}
