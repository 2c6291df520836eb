// One bit for each weight: 1 is +1, 0 is -1. A group is one word: bit 8j + k is column 4k + j, so bit k of the four
// bytes is four neighbouring columns. Each bit becomes the sign of an f16 1.0, two in a word at once. Devices that multiply f16 need no conversion.
// Needs: vector.wgsl, weights.wgsl; `codes` [rows, groups] words.
const NEEDS_SUM: bool = false;
const PREPARES_X: bool = false;
const MANY_REGISTERS: bool = false;

fn group_word(row: Row, group: u32) -> u32 {
    let i = row.code + group;
    return codes[i >> 2u][i & 3u];
}

// Two weights: those whose bits a shift by `shift` moves to bits 15 and 31. `inverted`: the word, inverted.
fn signs(inverted: u32, shift: u32) -> vec2<f32> {
    return unpack2x16float(((inverted << shift) & 0x80008000u) | 0x3c003c00u);
}

// Columns 4k to 4k + 3: bit k of each byte.
fn quad(inverted: u32, k: u32) -> vec4<f32> {
    let even = signs(inverted, 15u - k);
    let odd = signs(inverted, 7u - k);
    return vec4<f32>(even.x, odd.x, even.y, odd.y);
}

fn group_dot(row: Row, group: u32, x: X32, sum: f32) -> f32 {
    let w = ~group_word(row, group);
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

fn codes8(row: Row, group: u32, j: u32) -> W8 {
    let w = ~group_word(row, group) >> (2u * j);
    return W8(quad(w, 0u), quad(w, 1u));
}

// The weight of one column, without scale.
fn code_of(row: Row, col: u32) -> f32 {
    let bit = group_word(row, col >> 5u) >> (8u * (col & 3u) + ((col & 31u) >> 2u));
    return f32(i32(2u * (bit & 1u)) - 1);
}

fn row_scale(row: u32) -> f32 { return 1.0; }
fn prep_x(tensor: u32, group: u32, x: X32) -> X32 { return x; }
fn prep_w(tensor: u32, group: u32, j: u32, w: W8) -> W8 { return w; }
