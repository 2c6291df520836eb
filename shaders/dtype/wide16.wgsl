// The common functions of f16 and bf16 weights: 4 vectors for each group, two weights in a word, no scales.
// Needs: codes8 of f16.wgsl or bf16.wgsl; vector.wgsl, weights.wgsl; params.groups.
const NEEDS_SUM: bool = false;
const PREPARES_X: bool = false;
const MANY_REGISTERS: bool = false;
struct Row { code: u32 }

fn row_open(row: u32) -> Row { return Row(row * params.groups * 4u); }
fn row_scale(row: u32) -> f32 { return 1.0; }
fn prep_x(tensor: u32, group: u32, x: X32) -> X32 { return x; }
fn prep_w(tensor: u32, group: u32, j: u32, w: W8) -> W8 { return w; }
fn group_scale(row: Row, group: u32) -> f32 { return 1.0; }

fn group_dot(row: Row, group: u32, x: X32, sum: f32) -> f32 {
    let w0 = codes8(row, group, 0u);
    var acc = w0.a * x.a;
    acc = fma(w0.b, x.b, acc);
    let w1 = codes8(row, group, 1u);
    acc = fma(w1.a, x.c, acc);
    acc = fma(w1.b, x.d, acc);
    let w2 = codes8(row, group, 2u);
    acc = fma(w2.a, x.e, acc);
    acc = fma(w2.b, x.f, acc);
    let w3 = codes8(row, group, 3u);
    acc = fma(w3.a, x.g, acc);
    acc = fma(w3.b, x.h, acc);
    return horizontal(acc);
}
