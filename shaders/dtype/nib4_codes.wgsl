// 4-bit codes q, worth q - 8, one vector a unit: element 2k is the low nibble of byte k, 2k+1 the high one.
// The dot is sum(q*x) - 8*sum(x): four codes leave a word together, by two masks.
const NEEDS_SUM: bool = true;
const PREPARES_X: bool = false;
const APART: bool = false;

fn word_dot(acc: vec4<f32>, word: u32, x: vec4<f32>, y: vec4<f32>) -> vec4<f32> {
    let low = bytes4(word & 0x0f0f0f0fu);
    let high = bytes4((word >> 4u) & 0x0f0f0f0fu);
    return fma(high, vec4<f32>(x.y, x.w, y.y, y.w), fma(low, vec4<f32>(x.x, x.z, y.x, y.z), acc));
}

fn unit_dot(row: Row, unit: u32, x: X32, sum: f32) -> f32 {
    let w = codes[row.code + unit];
    var acc = vec4<f32>(-8.0 * sum, 0.0, 0.0, 0.0);
    acc = word_dot(acc, w.x, x.a, x.b);
    acc = word_dot(acc, w.y, x.c, x.d);
    acc = word_dot(acc, w.z, x.e, x.f);
    acc = word_dot(acc, w.w, x.g, x.h);
    return horizontal(acc);
}

fn codes8(row: Row, unit: u32, j: u32) -> W8 {
    let word = codes[row.code + unit][j];
    let low = bytes4(word & 0x0f0f0f0fu) - vec4<f32>(8.0);
    let high = bytes4((word >> 4u) & 0x0f0f0f0fu) - vec4<f32>(8.0);
    return W8(vec4<f32>(low.x, high.x, low.y, high.y), vec4<f32>(low.z, high.z, low.w, high.w));
}

fn row_scale(row: u32) -> f32 { return 1.0; }
fn prep_x(part: u32, unit: u32, x: X32) -> X32 { return x; }
fn prep_w(part: u32, unit: u32, j: u32, w: W8) -> W8 { return w; }
