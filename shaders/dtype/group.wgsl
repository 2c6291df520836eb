// One f16 scale for each group. The scales of all rows follow each other without padding, so those of a row may begin
// in the upper half of a word.
// Needs: weights.wgsl; `scales` [rows, groups] of f16; params.groups.
struct Row { code: u32 }

fn row_open(row: u32) -> Row { return Row(row * params.groups); }

fn group_scale(row: Row, group: u32) -> f32 {
    let i = row.code + group;
    return half((scales[i >> 1u] >> ((i & 1u) * 16u)) & 0xffffu);
}
