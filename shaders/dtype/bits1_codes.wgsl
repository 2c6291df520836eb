// One bit a weight, 1 is +1 and 0 is -1; one word a unit: bit 8j + k is column 4k + j, so that four neighbours leave the
// word together. The dot is 2*sum(bit*x) - sum(x).
const NEEDS_SUM: bool = true;
const PREPARES_X: bool = false;
const APART: bool = false;

fn unit_word(row: Row, unit: u32) -> u32 {
    let i = row.code + unit;
    return codes[i >> 2u][i & 3u];
}

fn quad(word: u32, k: u32) -> vec4<f32> { return bytes4((word >> k) & 0x01010101u); }

fn unit_dot(row: Row, unit: u32, x: X32, sum: f32) -> f32 {
    let w = unit_word(row, unit);
    var acc = fma(quad(w, 0u), x.a, vec4<f32>(-0.5 * sum, 0.0, 0.0, 0.0));
    acc = fma(quad(w, 1u), x.b, acc);
    acc = fma(quad(w, 2u), x.c, acc);
    acc = fma(quad(w, 3u), x.d, acc);
    acc = fma(quad(w, 4u), x.e, acc);
    acc = fma(quad(w, 5u), x.f, acc);
    acc = fma(quad(w, 6u), x.g, acc);
    acc = fma(quad(w, 7u), x.h, acc);
    return 2.0 * horizontal(acc);
}

fn codes8(row: Row, unit: u32, j: u32) -> W8 {
    let w = unit_word(row, unit) >> (2u * j);
    return W8(2.0 * quad(w, 0u) - vec4<f32>(1.0), 2.0 * quad(w, 1u) - vec4<f32>(1.0));
}

fn code_of(row: Row, col: u32) -> f32 {
    let bit = unit_word(row, col >> 5u) >> (8u * (col & 3u) + ((col & 31u) >> 2u));
    return f32(i32(2u * (bit & 1u)) - 1);
}

fn row_scale(row: u32) -> f32 { return 1.0; }
fn prep_x(part: u32, unit: u32, x: X32) -> X32 { return x; }
fn prep_w(part: u32, unit: u32, j: u32, w: W8) -> W8 { return w; }
