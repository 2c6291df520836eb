// Units with an f16 scale each; a row's halves are padded to whole words.
struct Row { code: u32, scale: u32 }

fn row_open(row: u32) -> Row { return Row(row * params.units, row * ((params.units + 1u) >> 1u)); }

fn unit_scale(row: Row, unit: u32) -> f32 {
    return half((scales[row.scale + (unit >> 1u)] >> ((unit & 1u) * 16u)) & 0xffffu);
}
