// Units with an f16 scale each, and values that replace single weights. A row's record is where its overlay entries begin
// in `scales`, and its halves, padded to whole words; the entries end where those of the next record begin. An entry is a
// column and, in the upper half, an f16; a row's entries ascend by column. Behind those of the last row of a part there may be
// room for more, but not in a table of embeddings, where entries are searched for.
const HAS_OVERLAY: bool = true;
struct Row { code: u32, record: u32 }

fn record_words() -> u32 { return 1u + ((params.units + 1u) >> 1u); }

fn row_open(row: u32) -> Row { return Row(row * params.units, row * record_words()); }

fn unit_scale(row: Row, unit: u32) -> f32 {
    return half((scales[row.record + 1u + (unit >> 1u)] >> ((unit & 1u) * 16u)) & 0xffffu);
}

fn overlay_range(row: Row) -> vec2<u32> {
    return vec2<u32>(scales[row.record], scales[row.record + record_words()]);
}

fn overlay_ends(entry: u32) -> bool { return (scales[entry] >> 16u) == NO_VALUE; }
fn overlay_col(entry: u32) -> u32 { return scales[entry] & 0xffffu; }
fn overlay_value(entry: u32) -> f32 { return half(scales[entry] >> 16u); }

// What an entry adds to the weight that the code says.
fn overlay_change(row: Row, entry: u32) -> f32 {
    let col = overlay_col(entry);
    return overlay_value(entry) - code_of(row, col) * unit_scale(row, col >> 5u);
}
