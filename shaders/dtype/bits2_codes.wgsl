// Two bits a weight, code q is worth q - 1; two words a unit: column 16p + 4k + j is bits 8j + 2k and 8j + 2k + 1 of word p,
// so that four neighbours leave the word together. The dot is sum(q*x) - sum(x).
const NEEDS_SUM: bool = true;
const PREPARES_X: bool = false;
const APART: bool = false;

fn unit_word(row: Row, unit: u32, p: u32) -> u32 {
    let i = (row.code + unit) * 2u + p;
    return codes[i >> 2u][i & 3u];
}

fn quad(word: u32, k: u32) -> vec4<f32> { return bytes4((word >> (2u * k)) & 0x03030303u); }

fn unit_dot(row: Row, unit: u32, x: X32, sum: f32) -> f32 {
    let v = unit_word(row, unit, 0u);
    let w = unit_word(row, unit, 1u);
    var acc = fma(quad(v, 0u), x.a, vec4<f32>(-sum, 0.0, 0.0, 0.0));
    acc = fma(quad(v, 1u), x.b, acc);
    acc = fma(quad(v, 2u), x.c, acc);
    acc = fma(quad(v, 3u), x.d, acc);
    acc = fma(quad(w, 0u), x.e, acc);
    acc = fma(quad(w, 1u), x.f, acc);
    acc = fma(quad(w, 2u), x.g, acc);
    acc = fma(quad(w, 3u), x.h, acc);
    return horizontal(acc);
}

fn codes8(row: Row, unit: u32, j: u32) -> W8 {
    let w = unit_word(row, unit, j >> 1u) >> (4u * (j & 1u));
    return W8(quad(w, 0u) - vec4<f32>(1.0), quad(w, 1u) - vec4<f32>(1.0));
}

fn code_of(row: Row, col: u32) -> f32 {
    let word = unit_word(row, col >> 5u, (col >> 4u) & 1u);
    let code = word >> (8u * (col & 3u) + 2u * ((col & 15u) >> 2u));
    return f32(i32(code & 3u) - 1);
}

fn row_scale(row: u32) -> f32 { return 1.0; }
fn prep_x(part: u32, unit: u32, x: X32) -> X32 { return x; }
fn prep_w(part: u32, unit: u32, j: u32, w: W8) -> W8 { return w; }
