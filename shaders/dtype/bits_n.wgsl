// Codes of 3, 4, 5, 6 or 8 bits, as the row says; code q of b bits is worth q - (2^(b-1) - 1). A row's record is its first
// vector in `codes` times 16 plus b, and an f16 scale a unit, padded to whole words. Its vectors hold the nibbles of all
// units as in nib4 but quad by quad, for 8 bits then the upper nibbles, then for 3 and 6 bits two words a unit of 2 bits a
// code, then for 3 and 5 bits one word a unit of 1 bit a code. Column 4q + j of a unit lies in byte j of its word.
// What a width does not have is masked, so that rows of all widths take one way.
const NEEDS_SUM: bool = true;
struct Row { code: u32, bits: u32, scale: u32 }

fn row_open(row: u32) -> Row {
    let record = row * (1u + ((params.units + 1u) >> 1u));
    let word = scales[record];
    return Row(word >> 4u, word & 15u, record + 1u);
}

fn unit_scale(row: Row, unit: u32) -> f32 {
    return half((scales[row.scale + (unit >> 1u)] >> ((unit & 1u) * 16u)) & 0xffffu);
}

// All ones where it holds.
fn mask(holds: bool) -> u32 { return select(0u, 0xffffffffu, holds); }

// The parts that a width has as masks, and at which bit of a code 2 bits and 1 bit lie.
struct Parts { low: u32, high: u32, pair: u32, bit: u32, pair_at: u32, bit_at: u32, words: u32 }

fn parts_of(row: Row) -> Parts {
    let three = row.bits == 3u;
    let low = mask(!three);
    let high = mask(row.bits == 8u);
    let words = (row.code + params.units * ((low & 1u) + (high & 1u))) * 4u;
    return Parts(
        low, high, mask(three || row.bits == 6u), mask(three || row.bits == 5u),
        select(4u, 0u, three), select(4u, 2u, three), words,
    );
}

fn word_at(i: u32) -> u32 { return codes[i >> 2u][i & 3u]; }

// Where a part is missing the row's first word is read in its place, which is there for every width.
fn pair_word(row: Row, parts: Parts, unit: u32, p: u32) -> u32 {
    return word_at(select(row.code * 4u, parts.words + unit * 2u + p, parts.pair != 0u)) & parts.pair;
}

fn bit_word(row: Row, parts: Parts, unit: u32) -> u32 {
    let at = parts.words + (2u * params.units & parts.pair) + unit;
    return word_at(select(row.code * 4u, at, parts.bit != 0u)) & parts.bit;
}

// Four neighbouring codes in four bytes: quad q of a unit.
fn quad(parts: Parts, low: u32, high: u32, pair: u32, bit: u32, q: u32) -> vec4<f32> {
    let nibbles = (low >> (4u * (q & 1u))) & 0x0f0f0f0fu;
    let upper = ((high >> (4u * (q & 1u))) & 0x0f0f0f0fu) << 4u;
    let two = ((pair >> (2u * (q & 3u))) & 0x03030303u) << parts.pair_at;
    let one = ((bit >> q) & 0x01010101u) << parts.bit_at;
    return vec4<f32>(unpack4xU8(nibbles | upper | two | one));
}

fn level(row: Row) -> f32 { return f32(i32((1u << (row.bits - 1u)) - 1u)); }

fn unit_dot(row: Row, unit: u32, x: X32, sum: f32) -> f32 {
    let p = parts_of(row);
    let low = codes[row.code + (unit & p.low)] & vec4<u32>(p.low);
    let high = codes[row.code + ((params.units + unit) & p.high)] & vec4<u32>(p.high);
    let v = pair_word(row, p, unit, 0u);
    let w = pair_word(row, p, unit, 1u);
    let bit = bit_word(row, p, unit);
    var acc = fma(quad(p, low.x, high.x, v, bit, 0u), x.a, vec4<f32>(-level(row) * sum, 0.0, 0.0, 0.0));
    acc = fma(quad(p, low.x, high.x, v, bit, 1u), x.b, acc);
    acc = fma(quad(p, low.y, high.y, v, bit, 2u), x.c, acc);
    acc = fma(quad(p, low.y, high.y, v, bit, 3u), x.d, acc);
    acc = fma(quad(p, low.z, high.z, w, bit, 4u), x.e, acc);
    acc = fma(quad(p, low.z, high.z, w, bit, 5u), x.f, acc);
    acc = fma(quad(p, low.w, high.w, w, bit, 6u), x.g, acc);
    acc = fma(quad(p, low.w, high.w, w, bit, 7u), x.h, acc);
    return horizontal(acc);
}

fn codes8(row: Row, unit: u32, j: u32) -> W8 {
    let p = parts_of(row);
    let low = codes[row.code + (unit & p.low)][j] & p.low;
    let high = codes[row.code + ((params.units + unit) & p.high)][j] & p.high;
    let pair = pair_word(row, p, unit, j >> 1u);
    let bit = bit_word(row, p, unit);
    let zero = vec4<f32>(level(row));
    return W8(quad(p, low, high, pair, bit, 2u * j) - zero, quad(p, low, high, pair, bit, 2u * j + 1u) - zero);
}

fn row_scale(row: u32) -> f32 { return 1.0; }
fn prep_x(part: u32, unit: u32, x: X32) -> X32 { return x; }
fn prep_w(part: u32, unit: u32, j: u32, w: W8) -> W8 { return w; }
