// Codes of 3, 4, 5, 6 or 8 bits, as the row says; code q of b bits is worth q - (2^(b-1) - 1). A row has of what its width is
// made of: a vector of lower nibbles a unit, a vector of upper nibbles a unit; and behind the vectors of all rows its f16
// scales, one a unit, padded to whole words, two words of 2 bits a code, one word of 1 bit a code. `scales` holds a record
// for every eight rows: where the vectors of the first begin, where its words begin, and the widths, 4 bits each.
// A unit's columns are eight quads of neighbours, column 4q + j in byte j of its word; two quads come out of a word together,
// the even one in the lower nibbles. Codes of 3 bits are upper nibbles without lower ones, so worth 16 times too much.
// What a width does not have is masked, so that rows of all widths take one way.
const NEEDS_SUM: bool = true;
const PREPARES_X: bool = false;
const APART: bool = true;
struct Row { vector_and_width: u32, words: u32 }

// Words of a row's scales.
fn scale_words() -> u32 { return (params.units + 1u) >> 1u; }

fn row_open(row: u32) -> Row {
    let record = (row >> 3u) * 3u;
    let place = (row & 7u) * 4u;
    let widths = scales[record + 2u];
    // A width of b bits is b / 4 vectors and b % 4 words a unit: those of the rows before it are summed.
    let before = widths & ((1u << place) - 1u);
    let vectors = (((before >> 2u) & 0x33333333u) * 0x11111111u) >> 28u;
    let words = (((before & 0x03030303u) + ((before >> 4u) & 0x03030303u)) * 0x01010101u) >> 24u;
    return Row(
        (scales[record] + vectors * params.units) << 4u | ((widths >> place) & 15u),
        scales[record + 1u] + words * params.units + (row & 7u) * scale_words(),
    );
}

fn code(row: Row) -> u32 { return row.vector_and_width >> 4u; }
fn bits(row: Row) -> u32 { return row.vector_and_width & 15u; }

fn word_at(i: u32) -> u32 { return codes[i >> 2u][i & 3u]; }

fn unit_scale(row: Row, unit: u32) -> f32 {
    // Makes up for the codes of 3 bits.
    let worth = select(1.0, 0.0625, bits(row) == 3u);
    return worth * half((word_at(row.words + (unit >> 1u)) >> ((unit & 1u) * 16u)) & 0xffffu);
}

// All ones where it holds.
fn mask(holds: bool) -> u32 { return select(0u, 0xffffffffu, holds); }

// The parts that a width has, as masks, and at which bit of a nibble the single bits lie.
struct Parts { low: u32, high: u32, pair: u32, bit: u32, bit_at: u32 }

fn parts_of(row: Row) -> Parts {
    let three = bits(row) == 3u;
    let low = mask(!three);
    let high = mask(bits(row) == 8u);
    return Parts(
        low, high, mask(three || bits(row) == 6u), mask(three || bits(row) == 5u), select(0u, 2u, three),
    );
}

// Where a part is missing the row's first word is read in its place.
fn pair_word(row: Row, parts: Parts, unit: u32, p: u32) -> u32 {
    return word_at(row.words + ((scale_words() + unit * 2u + p) & parts.pair)) & parts.pair;
}

fn bit_word(row: Row, parts: Parts, unit: u32) -> u32 {
    let at = scale_words() + (2u * params.units & parts.pair) + unit;
    return word_at(row.words + (at & parts.bit)) & parts.bit;
}

// The upper nibbles of quads 2i and 2i + 1.
fn upper(parts: Parts, high: u32, pair: u32, bit: u32, i: u32) -> u32 {
    let two = (pair >> (2u * (i & 1u))) & 0x33333333u;
    let one = ((bit >> i) & 0x11111111u) << parts.bit_at;
    return high | two | one;
}

// Four codes in four bytes, of the even and of the odd quad of a word.
fn even(low: u32, upper: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8((low & 0x0f0f0f0fu) | ((upper << 4u) & 0xf0f0f0f0u)));
}
fn odd(low: u32, upper: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8(((low >> 4u) & 0x0f0f0f0fu) | (upper & 0xf0f0f0f0u)));
}

// The code that is worth 0.
fn level(row: Row) -> f32 { return f32(i32(select((1u << (bits(row) - 1u)) - 1u, 48u, bits(row) == 3u))); }

fn unit_dot(row: Row, unit: u32, x: X32, sum: f32) -> f32 {
    let p = parts_of(row);
    let low = codes[code(row) + (unit & p.low)] & vec4<u32>(p.low);
    let high = codes[code(row) + ((params.units + unit) & p.high)] & vec4<u32>(p.high);
    let v = pair_word(row, p, unit, 0u);
    let w = pair_word(row, p, unit, 1u);
    let bit = bit_word(row, p, unit);
    let up = vec4<u32>(
        upper(p, high.x, v, bit, 0u), upper(p, high.y, v, bit, 1u),
        upper(p, high.z, w, bit, 2u), upper(p, high.w, w, bit, 3u),
    );
    var acc = fma(even(low.x, up.x), x.a, vec4<f32>(-level(row) * sum, 0.0, 0.0, 0.0));
    acc = fma(odd(low.x, up.x), x.b, acc);
    acc = fma(even(low.y, up.y), x.c, acc);
    acc = fma(odd(low.y, up.y), x.d, acc);
    acc = fma(even(low.z, up.z), x.e, acc);
    acc = fma(odd(low.z, up.z), x.f, acc);
    acc = fma(even(low.w, up.w), x.g, acc);
    acc = fma(odd(low.w, up.w), x.h, acc);
    return horizontal(acc);
}

fn codes8(row: Row, unit: u32, j: u32) -> W8 {
    let p = parts_of(row);
    let low = codes[code(row) + (unit & p.low)][j] & p.low;
    let high = codes[code(row) + ((params.units + unit) & p.high)][j] & p.high;
    let up = upper(p, high, pair_word(row, p, unit, j >> 1u), bit_word(row, p, unit), j);
    let zero = vec4<f32>(level(row));
    return W8(even(low, up) - zero, odd(low, up) - zero);
}

fn row_scale(row: u32) -> f32 { return 1.0; }
fn prep_x(part: u32, unit: u32, x: X32) -> X32 { return x; }
fn prep_w(part: u32, unit: u32, j: u32, w: W8) -> W8 { return w; }
