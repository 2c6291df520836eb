// One f16 scale for each group. The scales of a row are padded to whole words.
// Needs: weights.wgsl; `scales` [rows, groups padded to even] of f16; params.groups.
struct Row { code: u32, scale: u32 }

fn row_open(row: u32) -> Row { return Row(row * params.groups, row * ((params.groups + 1u) >> 1u)); }

fn group_scale(row: Row, group: u32) -> f32 {
    return half((scales[row.scale + (group >> 1u)] >> ((group & 1u) * 16u)) & 0xffffu);
}
