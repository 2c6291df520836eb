// One f16 scale for each group, and an overlay: values that replace single weights. `scales` begins with a record for
// each row, and one more: the word at which the row's overlay entries begin, then the f16 scales of the row, padded
// to whole words. The entries of a row end where those of the next record begin. An entry is a word: a column, and in
// the upper half an f16. The entries of a row ascend by column. Unused entries may follow those of the last row of a
// stacked tensor. The embedding table has none, because embed.wgsl searches its entries.
// Needs: code_of of bits1_codes.wgsl or bits2_codes.wgsl; weights.wgsl; `scales`; params.groups.
const HAS_OVERLAY: bool = true;
struct Row { code: u32, record: u32 }

fn record_words() -> u32 { return 1u + ((params.groups + 1u) >> 1u); }

fn row_open(row: u32) -> Row { return Row(row * params.groups, row * record_words()); }

fn group_scale(row: Row, group: u32) -> f32 {
    return half((scales[row.record + 1u + (group >> 1u)] >> ((group & 1u) * 16u)) & 0xffffu);
}

fn overlay_range(row: Row) -> vec2<u32> {
    return vec2<u32>(scales[row.record], scales[row.record + record_words()]);
}

fn overlay_ends(entry: u32) -> bool { return (scales[entry] >> 16u) == NO_VALUE; }
fn overlay_col(entry: u32) -> u32 { return scales[entry] & 0xffffu; }
fn overlay_value(entry: u32) -> f32 { return half(scales[entry] >> 16u); }

// The value of an entry minus the weight that the code stands for.
fn overlay_change(row: Row, entry: u32) -> f32 {
    let col = overlay_col(entry);
    return overlay_value(entry) - code_of(row, col) * group_scale(row, col >> 5u);
}
