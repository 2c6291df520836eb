// Signed bytes with one f16 scale a row and one a column: 2 vectors a unit; scales: row halves, then the column halves of
// each stacked part. The column scale multiplies x, the row scale the finished sum.
const NEEDS_SUM: bool = false;
const PREPARES_X: bool = true;
const APART: bool = false;
struct Row { code: u32 }

fn row_open(row: u32) -> Row { return Row(row * params.units * 2u); }
fn row_scale(row: u32) -> f32 { return half((scales[row >> 1u] >> ((row & 1u) * 16u)) & 0xffffu); }

fn col4(part: u32, unit: u32, j: u32) -> vec4<f32> {
    let word = ((params.rows + 1u) >> 1u) + (part * params.units + unit) * 16u + j * 2u;
    return vec4<f32>(halves(scales[word]), halves(scales[word + 1u]));
}

fn prep_x(part: u32, unit: u32, x: X32) -> X32 {
    return X32(
        x.a * col4(part, unit, 0u), x.b * col4(part, unit, 1u), x.c * col4(part, unit, 2u), x.d * col4(part, unit, 3u),
        x.e * col4(part, unit, 4u), x.f * col4(part, unit, 5u), x.g * col4(part, unit, 6u), x.h * col4(part, unit, 7u),
    );
}

fn prep_w(part: u32, unit: u32, j: u32, w: W8) -> W8 {
    return W8(w.a * col4(part, unit, 2u * j), w.b * col4(part, unit, 2u * j + 1u));
}
