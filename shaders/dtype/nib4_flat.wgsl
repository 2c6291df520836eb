// 4-bit codes q that stand for q - 8, with an f16 scale for every 32 consecutive codes. The codes of a row follow
// those of the row before without padding. So a row may begin at any code, and a group of 32 columns can have two
// scales.
// `scales`: the number of columns of a row; for each row the index of its first code; then the f16 scales.
// Decoded weights include their scales, and are 0 past the last column, whatever x contains there.
// Needs: vector.wgsl, weights.wgsl; `codes`, `scales`; params.rows.
const NEEDS_SUM: bool = false;
const PREPARES_X: bool = false;
const MANY_REGISTERS: bool = true;
struct Row { start: u32 }

fn row_open(row: u32) -> Row { return Row(scales[row + 1u]); }

fn code_word(i: u32) -> u32 { return codes[i >> 2u][i & 3u]; }

fn flat_scale(group: u32) -> f32 {
    return half((scales[params.rows + 1u + (group >> 1u)] >> ((group & 1u) * 16u)) & 0xffffu);
}

// The eight codes from index `first`: the rest of one word and the beginning of the next one.
fn eight_codes(word: u32, next: u32, first: u32) -> u32 {
    let shift = (first & 7u) * 4u;
    return (word >> shift) | ((next << 1u) << (31u - shift));
}

fn codes8(row: Row, group: u32, j: u32) -> W8 {
    let cols = scales[0];
    let col = group * 32u + j * 8u;
    let first = row.start + min(col, cols - 1u);
    let i = first >> 3u;
    let word = eight_codes(code_word(i), code_word(i + 1u), first);
    let low = bytes4(word & 0x0f0f0f0fu) - vec4<f32>(8.0);
    let high = bytes4((word >> 4u) & 0x0f0f0f0fu) - vec4<f32>(8.0);
    // The number of codes that have the first code's scale, and the number of columns to the end of the row.
    let in_first = vec4<u32>(32u - (first & 31u));
    let remaining = vec4<u32>(cols - min(col, cols));
    let scale = vec4<f32>(flat_scale(first >> 5u));
    let next = vec4<f32>(flat_scale((first + 7u) >> 5u));
    let a = vec4<u32>(0u, 1u, 2u, 3u);
    let b = vec4<u32>(4u, 5u, 6u, 7u);
    return W8(
        select(vec4<f32>(0.0), vec4<f32>(low.x, high.x, low.y, high.y) * select(next, scale, a < in_first), a < remaining),
        select(vec4<f32>(0.0), vec4<f32>(low.z, high.z, low.w, high.w) * select(next, scale, b < in_first), b < remaining),
    );
}

fn group_scale(row: Row, group: u32) -> f32 { return 1.0; }

// A word whose first code has index `first`; its codes from index `end` are replaced by 8, which stands for 0.
fn clear_from(word: u32, first: u32, end: u32) -> u32 {
    return insertBits(0x88888888u, word, 0u, 4u * min(max(end, first) - first, 8u));
}

// Adds the products of eight codes and x, y. `col`: column of the first code in the group. s: the two scales of the
// group, of which the first in_first columns have the first one.
fn word_dot(acc: vec4<f32>, word: u32, col: u32, in_first: u32, s: vec2<f32>, x: vec4<f32>, y: vec4<f32>) -> vec4<f32> {
    let low = bytes4(word & 0x0f0f0f0fu) - vec4<f32>(8.0);
    let high = bytes4((word >> 4u) & 0x0f0f0f0fu) - vec4<f32>(8.0);
    let even = select(
        vec4<f32>(s.y), vec4<f32>(s.x), vec4<u32>(col, col + 2u, col + 4u, col + 6u) < vec4<u32>(in_first)
    );
    let odd = select(
        vec4<f32>(s.y), vec4<f32>(s.x), vec4<u32>(col + 1u, col + 3u, col + 5u, col + 7u) < vec4<u32>(in_first)
    );
    return fma(high * odd, vec4<f32>(x.y, x.w, y.y, y.w), fma(low * even, vec4<f32>(x.x, x.z, y.x, y.z), acc));
}

fn group_dot(row: Row, group: u32, x: X32, sum: f32) -> f32 {
    let first = row.start + group * 32u;
    let end = row.start + scales[0];
    let in_first = 32u - (first & 31u);
    // The second scale may lie past the end of the row's codes. Then its bits may be a NaN, so it is replaced by 0.
    let s = vec2<f32>(flat_scale(first >> 5u), select(flat_scale((first >> 5u) + 1u), 0.0, first + in_first >= end));
    let i = first >> 3u;
    let middle = code_word(i + 2u);
    let a = code_word(i + 1u);
    var acc = word_dot(
        vec4<f32>(0.0), clear_from(eight_codes(code_word(i), a, first), first, end), 0u, in_first, s, x.a, x.b
    );
    acc = word_dot(acc, clear_from(eight_codes(a, middle, first), first + 8u, end), 8u, in_first, s, x.c, x.d);
    // The branch keeps drivers from loading both halves at once, which would take too many registers.
    if (first + 16u < end) {
        let b = code_word(i + 3u);
        acc = word_dot(acc, clear_from(eight_codes(middle, b, first), first + 16u, end), 16u, in_first, s, x.e, x.f);
        acc = word_dot(
            acc, clear_from(eight_codes(b, code_word(i + 4u), first), first + 24u, end), 24u, in_first, s, x.g, x.h
        );
    }
    return horizontal(acc);
}

fn row_scale(row: u32) -> f32 { return 1.0; }
fn prep_x(tensor: u32, group: u32, x: X32) -> X32 { return x; }
fn prep_w(tensor: u32, group: u32, j: u32, w: W8) -> W8 { return w; }
