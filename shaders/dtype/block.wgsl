// Blocks of GGUF: codes of 2, 3, 4, 5 or 6 bits. A weight is scale * level - offset. A level is what the code stands
// for. Scale and offset belong to a group, or to half a group; they are the scales of a block, some of them times small
// integers, the steps.
//
// The columns of a group are eight quads of neighbours; column 4q + j is in byte j of the word of quad q. Words hold the
// nibbles of two quads, the even one in the lower nibbles, or pairs of bits of four quads, or single bits of eight.
// `codes`: the lower nibbles, one vector for each group; of codes of 2 and 3 bits the pairs, two words for each group.
// `scales` has a record for each row, of three parts, each padded to whole words:
// - the scales of the blocks,
// - the steps of the groups, least significant bit first,
// - for each group the upper bits of its codes: a word of single bits (3, 5), or two words of pairs (6).
//
// A file for each type has its constants: CODE_BITS; LEVELS; CODE_ZERO, the linear code that stands for 0; SCALE;
// SCALE_GROUPS, the groups of a block; STEP_BITS, 0 = no steps; STEP_ZERO, the step that stands for 0; HALF_GROUPS,
// whether half groups have steps.
// Needs: vector.wgsl, weights.wgsl; `codes`, `scales`; params.groups.

// LEVELS: the code itself, the table of IQ4, twice the numbers of fp4.
const LINEAR: u32 = 0u;
const NONLINEAR: u32 = 1u;
const FP4: u32 = 2u;
// SCALE: an f16; an f16 and a minimum, which is added; an f16 and one that offsets are multiples of; an exponent.
const HALF: u32 = 0u;
const HALF_AND_MINIMUM: u32 = 1u;
const HALF_AND_OFFSET: u32 = 2u;
const POWER: u32 = 3u;

const HAS_OFFSETS: bool = SCALE == HALF_AND_MINIMUM || SCALE == HALF_AND_OFFSET;
// Whether group_scale is the scale of a group and group_dot the product with its levels. If not, group_scale is 1.
const SCALES_GROUPS: bool = !HAS_OFFSETS && !HALF_GROUPS;
// Whether codes and x are multiplied first, so that what is subtracted from all codes is multiplied by the sum of x.
const SUMS_CODES: bool = LEVELS == LINEAR && !HALF_GROUPS;
// Bits of the steps of a part, of a group; words of the upper bits of a group.
const PART_BITS: u32 = STEP_BITS * select(1u, 2u, HAS_OFFSETS);
const GROUP_BITS: u32 = PART_BITS * select(1u, 2u, HALF_GROUPS);
const UPPER_WORDS: u32 = select(select(0u, 1u, CODE_BITS == 3u || CODE_BITS == 5u), 2u, CODE_BITS == 6u);

const NEEDS_SUM: bool = SUMS_CODES;
const PREPARES_X: bool = false;
const MANY_REGISTERS: bool = HALF_GROUPS;

struct Row { code: u32, record: u32 }

// Words of the scales and of the steps of a row.
fn scale_words() -> u32 {
    let blocks = params.groups / SCALE_GROUPS;
    if (HAS_OFFSETS) { return blocks; }
    if (SCALE == POWER) { return (blocks + 3u) >> 2u; }
    return (blocks + 1u) >> 1u;
}
fn step_words() -> u32 { return (params.groups * GROUP_BITS + 31u) >> 5u; }

fn row_open(row: u32) -> Row {
    return Row(row * params.groups, row * (scale_words() + step_words() + params.groups * UPPER_WORDS));
}

// Scale and offset of the first and of the second part of a group.
struct Parts { scale: vec2<f32>, offset: vec2<f32> }

// The steps of a group.
fn steps_of(row: Row, group: u32) -> u32 {
    let bit = group * GROUP_BITS;
    let word = row.record + scale_words() + (bit >> 5u);
    let shift = bit & 31u;
    var steps = scales[word] >> shift;
    if (GROUP_BITS != 16u) {
        // The steps may continue in the next word. The plane ends with a spare word, so that there always is one.
        steps |= select(0u, scales[word + 1u] << ((32u - shift) & 31u), shift + GROUP_BITS > 32u);
    }
    return steps;
}

// The step from bit `at` on.
fn step_at(steps: u32, at: u32) -> f32 { return f32(i32(extractBits(steps, at, STEP_BITS))); }

// The scales of the block of a group: the scale, and what its offsets are multiples of.
fn block_scales(row: Row, group: u32) -> vec2<f32> {
    let i = group / SCALE_GROUPS;
    if (SCALE == POWER) {
        let exponent = (scales[row.record + (i >> 2u)] >> ((i & 3u) * 8u)) & 255u;
        // 2^(exponent - 128), of which the two smallest are subnormal.
        let bits = select((exponent - 1u) << 23u, 0x200000u << (exponent & 1u), exponent < 2u);
        return vec2<f32>(bitcast<f32>(bits), 0.0);
    }
    if (SCALE == HALF) {
        return vec2<f32>(half((scales[row.record + (i >> 1u)] >> ((i & 1u) * 16u)) & 0xffffu), 0.0);
    }
    let both = halves(scales[row.record + i]);
    if (SCALE == HALF_AND_MINIMUM) { return vec2<f32>(both.x, -both.y); }
    return both;
}

fn parts_of(row: Row, group: u32) -> Parts {
    let block = block_scales(row, group);
    var scale = vec2<f32>(block.x);
    var offset = vec2<f32>(block.y);
    if (STEP_BITS != 0u) {
        let steps = steps_of(row, group);
        scale *= vec2<f32>(step_at(steps, 0u), step_at(steps, GROUP_BITS - PART_BITS)) - vec2<f32>(STEP_ZERO);
        if (HAS_OFFSETS) {
            offset *= vec2<f32>(step_at(steps, STEP_BITS), step_at(steps, GROUP_BITS - STEP_BITS));
        }
    }
    if (HALF_GROUPS && !HAS_OFFSETS) { offset = CODE_ZERO * scale; }
    return Parts(scale, offset);
}

fn group_scale(row: Row, group: u32) -> f32 {
    if (SCALES_GROUPS) { return parts_of(row, group).scale.x; }
    return 1.0;
}

// Bits of quads 2i and 2i + 1 of a word of pairs and of a word of single bits, in nibbles.
fn pairs(word: u32, i: u32) -> u32 { return (word >> (2u * (i & 1u))) & 0x33333333u; }
fn bits(word: u32, i: u32) -> u32 { return (word >> i) & 0x11111111u; }

fn code_word(i: u32) -> u32 { return codes[i >> 2u][i & 3u]; }

// Word i of the upper bits of a group.
fn upper_word(row: Row, group: u32, i: u32) -> u32 {
    return scales[row.record + scale_words() + step_words() + group * UPPER_WORDS + i];
}

// The codes of quads 2i and 2i + 1: their lower nibbles, and the upper ones if there are more than 4 bits.
struct TwoQuads { low: u32, up: u32 }

// The quads of a group from what is loaded: the vector of nibbles, or two words of pairs; the upper bits.
fn two_quads(low: vec4<u32>, up: vec2<u32>, i: u32) -> TwoQuads {
    let half_group = select(low.x, low.y, i >= 2u);
    if (CODE_BITS == 2u) { return TwoQuads(pairs(half_group, i), 0u); }
    if (CODE_BITS == 3u) { return TwoQuads(pairs(half_group, i) | (bits(up.x, i) << 2u), 0u); }
    if (CODE_BITS == 5u) { return TwoQuads(low[i], bits(up.x, i)); }
    if (CODE_BITS == 6u) { return TwoQuads(low[i], pairs(select(up.x, up.y, i >= 2u), i)); }
    return TwoQuads(low[i], 0u);
}

fn lower_bits(row: Row, group: u32) -> vec4<u32> {
    if (CODE_BITS > 3u) { return codes[row.code + group]; }
    let i = (row.code + group) * 2u;
    return vec4<u32>(code_word(i), code_word(i + 1u), 0u, 0u);
}

fn upper_bits(row: Row, group: u32) -> vec2<u32> {
    if (UPPER_WORDS == 0u) { return vec2<u32>(0u); }
    if (UPPER_WORDS == 1u) { return vec2<u32>(upper_word(row, group, 0u), 0u); }
    return vec2<u32>(upper_word(row, group, 0u), upper_word(row, group, 1u));
}

// The table of IQ4 at four codes. The polynomial is less than 0.44 away from each of the table's integers.
fn nonlinear(codes: vec4<f32>) -> vec4<f32> {
    var p = fma(vec4<f32>(0.001586043), codes, vec4<f32>(0.03108644));
    p = fma(p, codes, vec4<f32>(-1.371927));
    p = fma(p, codes, vec4<f32>(24.17383));
    return round(fma(p, codes, vec4<f32>(-126.567)));
}

const FP4_UNIT: f32 = 0x1p15;

// Four fp4 numbers, in the low nibbles of the bytes of a word. A nibble as the sign and the lowest bits of the exponent
// and the highest of the mantissa of an f16 is the number times 2^-14. Levels are twice the numbers.
fn fp4(word: u32) -> vec4<f32> {
    let even = halves(((word << 12u) & 0x80008000u) | ((word << 9u) & 0x0e000e00u));
    let odd = halves(((word << 4u) & 0x80008000u) | ((word << 1u) & 0x0e000e00u));
    return vec4<f32>(even.x, odd.x, even.y, odd.y);
}

// The levels of four codes, for fp4 divided by FP4_UNIT. For linear types the codes themselves.
fn even(q: TwoQuads) -> vec4<f32> {
    if (LEVELS == FP4) { return fp4(q.low); }
    if (LEVELS == NONLINEAR) { return nonlinear(bytes4(q.low & 0x0f0f0f0fu)); }
    if (CODE_BITS <= 4u) { return bytes4(q.low & 0x0f0f0f0fu); }
    return bytes4((q.low & 0x0f0f0f0fu) | ((q.up << 4u) & 0xf0f0f0f0u));
}
fn odd(q: TwoQuads) -> vec4<f32> {
    if (LEVELS == FP4) { return fp4(q.low >> 4u); }
    if (LEVELS == NONLINEAR) { return nonlinear(bytes4((q.low >> 4u) & 0x0f0f0f0fu)); }
    if (CODE_BITS <= 4u) { return bytes4((q.low >> 4u) & 0x0f0f0f0fu); }
    return bytes4(((q.low >> 4u) & 0x0f0f0f0fu) | (q.up & 0xf0f0f0f0u));
}

// Adds the products of two quads and x, y. Of half groups the quads are weights, with this scale and offset.
fn quads_dot(acc: vec4<f32>, q: TwoQuads, scale: f32, offset: f32, x: vec4<f32>, y: vec4<f32>) -> vec4<f32> {
    if (HALF_GROUPS) {
        let first = fma(even(q), vec4<f32>(scale), vec4<f32>(-offset));
        return fma(fma(odd(q), vec4<f32>(scale), vec4<f32>(-offset)), y, fma(first, x, acc));
    }
    return fma(odd(q), y, fma(even(q), x, acc));
}

fn group_dot(row: Row, group: u32, x: X32, sum: f32) -> f32 {
    let low = lower_bits(row, group);
    let up = upper_bits(row, group);
    var p = Parts();
    if (!SCALES_GROUPS) { p = parts_of(row, group); }
    var acc = vec4<f32>(0.0);
    if (SCALES_GROUPS && SUMS_CODES) { acc.x = -CODE_ZERO * sum; }
    acc = quads_dot(acc, two_quads(low, up, 0u), p.scale.x, p.offset.x, x.a, x.b);
    acc = quads_dot(acc, two_quads(low, up, 1u), p.scale.x, p.offset.x, x.c, x.d);
    acc = quads_dot(acc, two_quads(low, up, 2u), p.scale.y, p.offset.y, x.e, x.f);
    acc = quads_dot(acc, two_quads(low, up, 3u), p.scale.y, p.offset.y, x.g, x.h);
    if (HAS_OFFSETS && !HALF_GROUPS) { return fma(p.scale.x, horizontal(acc), -p.offset.x * sum); }
    if (LEVELS == FP4) { return FP4_UNIT * horizontal(acc); }
    return horizontal(acc);
}

// Word j of the codes of a group.
fn word_of(row: Row, group: u32, j: u32) -> TwoQuads {
    var low = 0u;
    if (CODE_BITS > 3u) {
        low = codes[row.code + group][j];
    } else {
        low = pairs(code_word((row.code + group) * 2u + (j >> 1u)), j);
    }
    if (CODE_BITS == 3u) { low |= bits(upper_word(row, group, 0u), j) << 2u; }
    if (CODE_BITS == 5u) { return TwoQuads(low, bits(upper_word(row, group, 0u), j)); }
    if (CODE_BITS == 6u) { return TwoQuads(low, pairs(upper_word(row, group, j >> 1u), j)); }
    return TwoQuads(low, 0u);
}

fn codes8(row: Row, group: u32, j: u32) -> W8 {
    let q = word_of(row, group, j);
    if (LEVELS == FP4) { return W8(FP4_UNIT * even(q), FP4_UNIT * odd(q)); }
    if (SCALES_GROUPS) { return W8(even(q) - vec4<f32>(CODE_ZERO), odd(q) - vec4<f32>(CODE_ZERO)); }
    let p = parts_of(row, group);
    var scale = p.scale.x;
    var offset = p.offset.x;
    if (HALF_GROUPS) {
        scale = select(p.scale.x, p.scale.y, j >= 2u);
        offset = select(p.offset.x, p.offset.y, j >= 2u);
    }
    return W8(
        fma(even(q), vec4<f32>(scale), vec4<f32>(-offset)), fma(odd(q), vec4<f32>(scale), vec4<f32>(-offset)),
    );
}

fn row_scale(row: u32) -> f32 { return 1.0; }
fn prep_x(tensor: u32, group: u32, x: X32) -> X32 { return x; }
fn prep_w(tensor: u32, group: u32, j: u32, w: W8) -> W8 { return w; }
