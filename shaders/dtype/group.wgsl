// Units with an f16 scale each, row by row without gaps: a row's first may be the upper half of a word.
struct Row { code: u32 }

fn row_open(row: u32) -> Row { return Row(row * params.units); }

fn unit_scale(row: Row, unit: u32) -> f32 {
    let i = row.code + unit;
    return half((scales[i >> 1u] >> ((i & 1u) * 16u)) & 0xffffu);
}
