// Codes of 3, 4, 5, 6 or 8 bits; the width can differ from row to row. Code q of b bits stands for q - (2^(b-1) - 1),
// times the f16 scale of its group.
// A group of a row consists of b / 4 vectors and b % 4 words:
//   vectors: the lower nibbles (not for 3 bits), the upper nibbles (8 bits)
//   words: two with 2 bits of each code (3 and 6 bits), one with 1 bit of each code (3 and 5 bits)
// `codes` has the vectors of all rows; then for each row its f16 scales, one for each group, padded to whole words,
// and its words. `scales` has a record of three words for every eight rows: the index of their first vector, the
// index of their first word, and the eight widths, 4 bits each.
// The columns of a group are eight quads of neighbours; column 4q + j is in byte j of the word of quad q. Two quads
// share a word: the even one is in the lower nibbles. Codes of 3 bits are used as upper nibbles without lower ones,
// which makes them 16 times too large; group_scale corrects that.
// Rows of all widths take the same path: values that a width does not have are masked.
// Needs: vector.wgsl, weights.wgsl; `codes`, `scales`; params.groups.
const NEEDS_SUM: bool = true;
const PREPARES_X: bool = false;
const MANY_REGISTERS: bool = true;
struct Row { vector_and_width: u32, words: u32 }

// Words of the scales of a row.
fn scale_words() -> u32 { return (params.groups + 1u) >> 1u; }

fn row_open(row: u32) -> Row {
    let record = (row >> 3u) * 3u;
    let shift = (row & 7u) * 4u;
    let widths = scales[record + 2u];
    // The vectors and words of the rows before this one, for one group, are summed by a multiplication.
    let before = widths & ((1u << shift) - 1u);
    let vectors = (((before >> 2u) & 0x33333333u) * 0x11111111u) >> 28u;
    let words = (((before & 0x03030303u) + ((before >> 4u) & 0x03030303u)) * 0x01010101u) >> 24u;
    return Row(
        (scales[record] + vectors * params.groups) << 4u | ((widths >> shift) & 15u),
        scales[record + 1u] + words * params.groups + (row & 7u) * scale_words(),
    );
}

// The index of the row's first vector.
fn code(row: Row) -> u32 { return row.vector_and_width >> 4u; }
fn bits(row: Row) -> u32 { return row.vector_and_width & 15u; }

fn word_at(i: u32) -> u32 { return codes[i >> 2u][i & 3u]; }

fn group_scale(row: Row, group: u32) -> f32 {
    // Codes of 3 bits are 16 times too large.
    let factor = select(1.0, 0.0625, bits(row) == 3u);
    return factor * half((word_at(row.words + (group >> 1u)) >> ((group & 1u) * 16u)) & 0xffffu);
}

// All ones if the condition holds, else 0.
fn mask(condition: bool) -> u32 { return select(0u, 0xffffffffu, condition); }

// Masks of the planes that a width has: lower nibbles, upper nibbles, words of 2 bits, the word of 1 bit. bit_at: the place of
// the single bit in a nibble.
struct Masks { low: u32, high: u32, pair: u32, bit: u32, bit_at: u32 }

fn masks_of(row: Row) -> Masks {
    let three = bits(row) == 3u;
    let low = mask(!three);
    let high = mask(bits(row) == 8u);
    return Masks(
        low, high, mask(three || bits(row) == 6u), mask(three || bits(row) == 5u), select(0u, 2u, three),
    );
}

// Word p of those with 2 bits. If the width has none, this reads the row's first word, and returns 0.
fn pair_word(row: Row, masks: Masks, group: u32, p: u32) -> u32 {
    return word_at(row.words + ((scale_words() + group * 2u + p) & masks.pair)) & masks.pair;
}

// The word with 1 bit, or 0.
fn bit_word(row: Row, masks: Masks, group: u32) -> u32 {
    let at = scale_words() + (2u * params.groups & masks.pair) + group;
    return word_at(row.words + (at & masks.bit)) & masks.bit;
}

// The upper nibbles of quads 2i and 2i + 1.
fn upper(masks: Masks, high: u32, pair: u32, bit: u32, i: u32) -> u32 {
    let two = (pair >> (2u * (i & 1u))) & 0x33333333u;
    let one = ((bit >> i) & 0x11111111u) << masks.bit_at;
    return high | two | one;
}

// Four codes of the even and of the odd quad of a word.
fn even(low: u32, upper: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8((low & 0x0f0f0f0fu) | ((upper << 4u) & 0xf0f0f0f0u)));
}
fn odd(low: u32, upper: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8(((low >> 4u) & 0x0f0f0f0fu) | (upper & 0xf0f0f0f0u)));
}

// The code that stands for 0.
fn zero_code(row: Row) -> f32 { return f32(i32(select((1u << (bits(row) - 1u)) - 1u, 48u, bits(row) == 3u))); }

fn group_dot(row: Row, group: u32, x: X32, sum: f32) -> f32 {
    let p = masks_of(row);
    let low = codes[code(row) + (group & p.low)] & vec4<u32>(p.low);
    let high = codes[code(row) + ((params.groups + group) & p.high)] & vec4<u32>(p.high);
    let v = pair_word(row, p, group, 0u);
    let w = pair_word(row, p, group, 1u);
    let bit = bit_word(row, p, group);
    let up = vec4<u32>(
        upper(p, high.x, v, bit, 0u), upper(p, high.y, v, bit, 1u),
        upper(p, high.z, w, bit, 2u), upper(p, high.w, w, bit, 3u),
    );
    var acc = fma(even(low.x, up.x), x.a, vec4<f32>(-zero_code(row) * sum, 0.0, 0.0, 0.0));
    acc = fma(odd(low.x, up.x), x.b, acc);
    acc = fma(even(low.y, up.y), x.c, acc);
    acc = fma(odd(low.y, up.y), x.d, acc);
    acc = fma(even(low.z, up.z), x.e, acc);
    acc = fma(odd(low.z, up.z), x.f, acc);
    acc = fma(even(low.w, up.w), x.g, acc);
    acc = fma(odd(low.w, up.w), x.h, acc);
    return horizontal(acc);
}

fn codes8(row: Row, group: u32, j: u32) -> W8 {
    let p = masks_of(row);
    let low = codes[code(row) + (group & p.low)][j] & p.low;
    let high = codes[code(row) + ((params.groups + group) & p.high)][j] & p.high;
    let up = upper(p, high, pair_word(row, p, group, j >> 1u), bit_word(row, p, group), j);
    let zero = vec4<f32>(zero_code(row));
    return W8(even(low, up) - zero, odd(low, up) - zero);
}

fn row_scale(row: u32) -> f32 { return 1.0; }
fn prep_x(tensor: u32, group: u32, x: X32) -> X32 { return x; }
fn prep_w(tensor: u32, group: u32, j: u32, w: W8) -> W8 { return w; }
