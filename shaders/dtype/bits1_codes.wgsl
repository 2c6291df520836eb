// One bit a weight, 1 is +1 and 0 is -1; one word a unit: bit 8j + k is column 4k + j, so that four neighbours leave the
// word together. A bit that becomes the sign of an f16 one is its weight, two of a word at once, and takes no conversion
// where products take halves.
const NEEDS_SUM: bool = false;
const PREPARES_X: bool = false;
const APART: bool = false;

fn unit_word(row: Row, unit: u32) -> u32 {
    let i = row.code + unit;
    return codes[i >> 2u][i & 3u];
}

// The weights whose bits come to 15 and 31 when a word with the bits turned is moved up by `shift`.
fn signs(turned: u32, shift: u32) -> vec2<f32> {
    return unpack2x16float(((turned << shift) & 0x80008000u) | 0x3c003c00u);
}

// Four neighbours, bit k of each byte.
fn quad(turned: u32, k: u32) -> vec4<f32> {
    let even = signs(turned, 15u - k);
    let odd = signs(turned, 7u - k);
    return vec4<f32>(even.x, odd.x, even.y, odd.y);
}

fn unit_dot(row: Row, unit: u32, x: X32, sum: f32) -> f32 {
    let w = ~unit_word(row, unit);
    var acc = quad(w, 0u) * x.a;
    acc = fma(quad(w, 1u), x.b, acc);
    acc = fma(quad(w, 2u), x.c, acc);
    acc = fma(quad(w, 3u), x.d, acc);
    acc = fma(quad(w, 4u), x.e, acc);
    acc = fma(quad(w, 5u), x.f, acc);
    acc = fma(quad(w, 6u), x.g, acc);
    acc = fma(quad(w, 7u), x.h, acc);
    return horizontal(acc);
}

fn codes8(row: Row, unit: u32, j: u32) -> W8 {
    let w = ~unit_word(row, unit) >> (2u * j);
    return W8(quad(w, 0u), quad(w, 1u));
}

fn code_of(row: Row, col: u32) -> f32 {
    let bit = unit_word(row, col >> 5u) >> (8u * (col & 3u) + ((col & 31u) >> 2u));
    return f32(i32(2u * (bit & 1u)) - 1);
}

fn row_scale(row: u32) -> f32 { return 1.0; }
fn prep_x(part: u32, unit: u32, x: X32) -> X32 { return x; }
fn prep_w(part: u32, unit: u32, j: u32, w: W8) -> W8 { return w; }
