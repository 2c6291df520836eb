// 4-bit codes q that stand for q - 8, one vector for each group. Element 2k is the low nibble of byte k, 2k + 1 the
// high one. The dot product is sum(q * x) - 8 * sum(x), so one mask extracts four codes of a word.
// Needs: vector.wgsl, weights.wgsl; `codes` [rows, groups vectors].
const NEEDS_SUM: bool = true;
const PREPARES_X: bool = false;
const MANY_REGISTERS: bool = false;

// Adds the products of the eight codes of a word and x, y.
fn word_dot(acc: vec4<f32>, word: u32, x: vec4<f32>, y: vec4<f32>) -> vec4<f32> {
    let low = bytes4(word & 0x0f0f0f0fu);
    let high = bytes4((word >> 4u) & 0x0f0f0f0fu);
    return fma(high, vec4<f32>(x.y, x.w, y.y, y.w), fma(low, vec4<f32>(x.x, x.z, y.x, y.z), acc));
}

fn group_dot(row: Row, group: u32, x: X32, sum: f32) -> f32 {
    let w = codes[row.code + group];
    var acc = vec4<f32>(-8.0 * sum, 0.0, 0.0, 0.0);
    acc = word_dot(acc, w.x, x.a, x.b);
    acc = word_dot(acc, w.y, x.c, x.d);
    acc = word_dot(acc, w.z, x.e, x.f);
    acc = word_dot(acc, w.w, x.g, x.h);
    return horizontal(acc);
}

fn codes8(row: Row, group: u32, j: u32) -> W8 {
    let word = codes[row.code + group][j];
    let low = bytes4(word & 0x0f0f0f0fu) - vec4<f32>(8.0);
    let high = bytes4((word >> 4u) & 0x0f0f0f0fu) - vec4<f32>(8.0);
    return W8(vec4<f32>(low.x, high.x, low.y, high.y), vec4<f32>(low.z, high.z, low.w, high.w));
}

fn row_scale(row: u32) -> f32 { return 1.0; }
fn prep_x(tensor: u32, group: u32, x: X32) -> X32 { return x; }
fn prep_w(tensor: u32, group: u32, j: u32, w: W8) -> W8 { return w; }
