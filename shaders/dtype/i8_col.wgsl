// Signed bytes with one f16 scale for each row and one for each column: 2 vectors for each group. The column scales
// multiply x, the row scale multiplies the finished sum.
// Needs: weights.wgsl; `scales`: the row scales, padded to whole words, then the column scales [stacked tensors,
// 32*groups], all f16; params.rows, .groups.
const NEEDS_SUM: bool = false;
const PREPARES_X: bool = true;
const MANY_REGISTERS: bool = false;
struct Row { code: u32 }

fn row_open(row: u32) -> Row { return Row(row * params.groups * 2u); }
fn group_scale(row: Row, group: u32) -> f32 { return 1.0; }
fn row_scale(row: u32) -> f32 { return half((scales[row >> 1u] >> ((row & 1u) * 16u)) & 0xffffu); }

// Column scales 4j to 4j + 3 of a group.
fn col4(tensor: u32, group: u32, j: u32) -> vec4<f32> {
    let word = ((params.rows + 1u) >> 1u) + (tensor * params.groups + group) * 16u + j * 2u;
    return vec4<f32>(halves(scales[word]), halves(scales[word + 1u]));
}

fn prep_x(tensor: u32, group: u32, x: X32) -> X32 {
    return X32(
        x.a * col4(tensor, group, 0u), x.b * col4(tensor, group, 1u),
        x.c * col4(tensor, group, 2u), x.d * col4(tensor, group, 3u),
        x.e * col4(tensor, group, 4u), x.f * col4(tensor, group, 5u),
        x.g * col4(tensor, group, 6u), x.h * col4(tensor, group, 7u),
    );
}

fn prep_w(tensor: u32, group: u32, j: u32, w: W8) -> W8 {
    return W8(w.a * col4(tensor, group, 2u * j), w.b * col4(tensor, group, 2u * j + 1u));
}
