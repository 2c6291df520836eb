// f32 weights: 8 vectors a unit, no scales.
const NEEDS_SUM: bool = false;
const PREPARES_X: bool = false;
const APART: bool = false;
struct Row { code: u32 }

fn row_open(row: u32) -> Row { return Row(row * params.units * 8u); }
fn row_scale(row: u32) -> f32 { return 1.0; }
fn prep_x(part: u32, unit: u32, x: X32) -> X32 { return x; }
fn prep_w(part: u32, unit: u32, j: u32, w: W8) -> W8 { return w; }
fn unit_scale(row: Row, unit: u32) -> f32 { return 1.0; }

fn word4(row: Row, unit: u32, j: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(codes[row.code + unit * 8u + j]);
}

fn unit_dot(row: Row, unit: u32, x: X32, sum: f32) -> f32 {
    var acc = word4(row, unit, 0u) * x.a;
    acc = fma(word4(row, unit, 1u), x.b, acc);
    acc = fma(word4(row, unit, 2u), x.c, acc);
    acc = fma(word4(row, unit, 3u), x.d, acc);
    acc = fma(word4(row, unit, 4u), x.e, acc);
    acc = fma(word4(row, unit, 5u), x.f, acc);
    acc = fma(word4(row, unit, 6u), x.g, acc);
    acc = fma(word4(row, unit, 7u), x.h, acc);
    return horizontal(acc);
}

fn codes8(row: Row, unit: u32, j: u32) -> W8 {
    return W8(word4(row, unit, 2u * j), word4(row, unit, 2u * j + 1u));
}
