// Two bits for each weight, a signed number: 1, 0 or -1. A group is two words: column 16p + 4k + j is bits 8j + 2k
// and 8j + 2k + 1 of word p, so the same two bits of the four bytes are four neighbouring columns. As the upper bits
// of an f16 they are 0, 2 or -2, twice the weight, two in a word at once. Devices that multiply f16 need no conversion.
// Needs: vector.wgsl, weights.wgsl; `codes` [rows, groups, 2] words.
const NEEDS_SUM: bool = false;
const PREPARES_X: bool = false;
const MANY_REGISTERS: bool = false;

struct Words { a: u32, b: u32 }

fn group_words(row: Row, group: u32) -> Words {
    let i = row.code + group;
    let half = (i & 1u) * 2u;
    return Words(codes[i >> 1u][half], codes[i >> 1u][half + 1u]);
}

// Twice two weights: those whose bits a shift by `shift` moves to bits 14 and 30.
fn doubled_pair(word: u32, shift: u32) -> vec2<f32> { return unpack2x16float((word << shift) & 0xc000c000u); }

// Twice the weights of columns 4k to 4k + 3 of a word.
fn quad(word: u32, k: u32) -> vec4<f32> {
    let even = doubled_pair(word, 14u - 2u * k);
    let odd = doubled_pair(word, 6u - 2u * k);
    return vec4<f32>(even.x, odd.x, even.y, odd.y);
}

fn group_dot(row: Row, group: u32, x: X32, sum: f32) -> f32 {
    let w = group_words(row, group);
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

// Four neighbouring weights, which begin at bit `at` of each byte, as signed numbers of two bits.
fn weights(word: u32, at: u32) -> vec4<f32> {
    let w = bitcast<i32>(word);
    return vec4<f32>(vec4<i32>(
        extractBits(w, at, 2u), extractBits(w, at + 8u, 2u), extractBits(w, at + 16u, 2u), extractBits(w, at + 24u, 2u),
    ));
}

fn codes8(row: Row, group: u32, j: u32) -> W8 {
    let w = word_at((row.code + group) * 2u + (j >> 1u)) >> (4u * (j & 1u));
    return W8(weights(w, 0u), weights(w, 2u));
}

// The weight of one column, without scale.
fn code_of(row: Row, col: u32) -> f32 {
    let at = 8u * (col & 3u) + ((col & 12u) >> 1u);
    return f32(bitcast<i32>(word_at(row.code * 2u + (col >> 4u)) << (30u - at)) >> 30u);
}

fn row_scale(row: u32) -> f32 { return 1.0; }
fn prep_x(tensor: u32, group: u32, x: X32) -> X32 { return x; }
fn prep_w(tensor: u32, group: u32, j: u32, w: W8) -> W8 { return w; }
