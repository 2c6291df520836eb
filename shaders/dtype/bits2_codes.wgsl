// Two bits a weight, of which the upper one says that it is negative and the lower one that it is not 0; two words a unit:
// column 16p + 4k + j is bits 8j + 2k and 8j + 2k + 1 of word p, so that four neighbours leave the word together. As the upper
// bits of an f16 they are 0, 2 or -2, twice the weight, two of a word at once, and take no conversion where products take
// halves.
const NEEDS_SUM: bool = false;
const PREPARES_X: bool = false;
const APART: bool = false;

struct Words { a: u32, b: u32 }

fn unit_words(row: Row, unit: u32) -> Words {
    let i = row.code + unit;
    let half = (i & 1u) * 2u;
    return Words(codes[i >> 1u][half], codes[i >> 1u][half + 1u]);
}

// Twice the weights whose bits come to 14 and 30 when the word is moved up by `shift`.
fn twice(word: u32, shift: u32) -> vec2<f32> { return unpack2x16float((word << shift) & 0xc000c000u); }

// Twice four neighbours, quad k of a word.
fn quad(word: u32, k: u32) -> vec4<f32> {
    let even = twice(word, 14u - 2u * k);
    let odd = twice(word, 6u - 2u * k);
    return vec4<f32>(even.x, odd.x, even.y, odd.y);
}

fn unit_dot(row: Row, unit: u32, x: X32, sum: f32) -> f32 {
    let w = unit_words(row, unit);
    var acc = quad(w.a, 0u) * x.a;
    acc = fma(quad(w.a, 1u), x.b, acc);
    acc = fma(quad(w.a, 2u), x.c, acc);
    acc = fma(quad(w.a, 3u), x.d, acc);
    acc = fma(quad(w.b, 0u), x.e, acc);
    acc = fma(quad(w.b, 1u), x.f, acc);
    acc = fma(quad(w.b, 2u), x.g, acc);
    acc = fma(quad(w.b, 3u), x.h, acc);
    return 0.5 * horizontal(acc);
}

fn word_at(i: u32) -> u32 { return codes[i >> 2u][i & 3u]; }

// Four neighbours, whose bits begin at `at` of each byte: as numbers of two bits they are themselves.
fn weights(word: u32, at: u32) -> vec4<f32> {
    let w = bitcast<i32>(word);
    return vec4<f32>(vec4<i32>(
        extractBits(w, at, 2u), extractBits(w, at + 8u, 2u), extractBits(w, at + 16u, 2u), extractBits(w, at + 24u, 2u),
    ));
}

fn codes8(row: Row, unit: u32, j: u32) -> W8 {
    let w = word_at((row.code + unit) * 2u + (j >> 1u)) >> (4u * (j & 1u));
    return W8(weights(w, 0u), weights(w, 2u));
}

fn code_of(row: Row, col: u32) -> f32 {
    let at = 8u * (col & 3u) + ((col & 12u) >> 1u);
    return f32(bitcast<i32>(word_at(row.code * 2u + (col >> 4u)) << (30u - at)) >> 30u);
}

fn row_scale(row: u32) -> f32 { return 1.0; }
fn prep_x(part: u32, unit: u32, x: X32) -> X32 { return x; }
fn prep_w(part: u32, unit: u32, j: u32, w: W8) -> W8 { return w; }
