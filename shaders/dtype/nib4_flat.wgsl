// 4-bit codes q, worth q - 8, with an f16 scale for 32 of them, row after row without gaps: groups straddle rows, and a row may
// begin at any code. `scales` begins with how many columns a row has; then for each row the number of its first code; then
// the scales. Weights come with their scales, and are 0 behind the last column, whatever x has there.
const NEEDS_SUM: bool = false;
const PREPARES_X: bool = false;
const APART: bool = true;
struct Row { start: u32 }

fn row_open(row: u32) -> Row { return Row(scales[row + 1u]); }

fn code_word(i: u32) -> u32 { return codes[i >> 2u][i & 3u]; }

fn group_scale(group: u32) -> f32 {
    return half((scales[params.rows + 1u + (group >> 1u)] >> ((group & 1u) * 16u)) & 0xffffu);
}

// The eight codes from number `first` on, of two words: what the first lacks of them the next one has.
fn joined_words(word: u32, next: u32, first: u32) -> u32 {
    let shift = (first & 7u) * 4u;
    return (word >> shift) | ((next << 1u) << (31u - shift));
}

fn codes8(row: Row, unit: u32, j: u32) -> W8 {
    let cols = scales[0];
    let col = unit * 32u + j * 8u;
    let first = row.start + min(col, cols - 1u);
    let i = first >> 3u;
    let word = joined_words(code_word(i), code_word(i + 1u), first);
    let low = bytes4(word & 0x0f0f0f0fu) - vec4<f32>(8.0);
    let high = bytes4((word >> 4u) & 0x0f0f0f0fu) - vec4<f32>(8.0);
    // How many belong to the first one's group, and to the row.
    let here = vec4<u32>(32u - (first & 31u));
    let left = vec4<u32>(cols - min(col, cols));
    let scale = vec4<f32>(group_scale(first >> 5u));
    let next = vec4<f32>(group_scale((first + 7u) >> 5u));
    let a = vec4<u32>(0u, 1u, 2u, 3u);
    let b = vec4<u32>(4u, 5u, 6u, 7u);
    return W8(
        select(vec4<f32>(0.0), vec4<f32>(low.x, high.x, low.y, high.y) * select(next, scale, a < here), a < left),
        select(vec4<f32>(0.0), vec4<f32>(low.z, high.z, low.w, high.w) * select(next, scale, b < here), b < left),
    );
}

fn unit_scale(row: Row, unit: u32) -> f32 { return 1.0; }

// A word whose first code is number `first`, with codes worth nothing from number `end` on.
fn within(word: u32, first: u32, end: u32) -> u32 {
    return insertBits(0x88888888u, word, 0u, 4u * min(max(end, first) - first, 8u));
}

// Eight codes, of a unit with `here` columns of the first group; `col` is the first one's column.
fn word_dot(acc: vec4<f32>, word: u32, col: u32, here: u32, s: vec2<f32>, x: vec4<f32>, y: vec4<f32>) -> vec4<f32> {
    let low = bytes4(word & 0x0f0f0f0fu) - vec4<f32>(8.0);
    let high = bytes4((word >> 4u) & 0x0f0f0f0fu) - vec4<f32>(8.0);
    let even = select(vec4<f32>(s.y), vec4<f32>(s.x), vec4<u32>(col, col + 2u, col + 4u, col + 6u) < vec4<u32>(here));
    let odd = select(vec4<f32>(s.y), vec4<f32>(s.x), vec4<u32>(col + 1u, col + 3u, col + 5u, col + 7u) < vec4<u32>(here));
    return fma(high * odd, vec4<f32>(x.y, x.w, y.y, y.w), fma(low * even, vec4<f32>(x.x, x.z, y.x, y.z), acc));
}

fn unit_dot(row: Row, unit: u32, x: X32, sum: f32) -> f32 {
    let first = row.start + unit * 32u;
    let end = row.start + scales[0];
    let here = 32u - (first & 31u);
    // What is behind the row counts nothing: its scale may be no number.
    let s = vec2<f32>(group_scale(first >> 5u), select(group_scale((first >> 5u) + 1u), 0.0, first + here >= end));
    let i = first >> 3u;
    let middle = code_word(i + 2u);
    let a = code_word(i + 1u);
    var acc = word_dot(vec4<f32>(0.0), within(joined_words(code_word(i), a, first), first, end), 0u, here, s, x.a, x.b);
    acc = word_dot(acc, within(joined_words(a, middle, first), first + 8u, end), 8u, here, s, x.c, x.d);
    // Not at once with the first half: there are no registers for it.
    if (first + 16u < end) {
        let b = code_word(i + 3u);
        acc = word_dot(acc, within(joined_words(middle, b, first), first + 16u, end), 16u, here, s, x.e, x.f);
        acc = word_dot(acc, within(joined_words(b, code_word(i + 4u), first), first + 24u, end), 24u, here, s, x.g, x.h);
    }
    return horizontal(acc);
}

fn row_scale(row: u32) -> f32 { return 1.0; }
fn prep_x(part: u32, unit: u32, x: X32) -> X32 { return x; }
fn prep_w(part: u32, unit: u32, j: u32, w: W8) -> W8 { return w; }
