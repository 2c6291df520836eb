// The scale of a 4-bit unit is a rung of its row's ladder, 2^lo * (2^step)^code with a 5-bit code. A row's record is
// the f32 2^lo, the f32 2^step and its codes, least significant bit first, padded to whole words.
// The power is taken by squaring, with multiplications only, so that every device gives the same bits; keeping the squares
// of a row from unit to unit would cost more in registers than it saves.
struct Row { code: u32, rungs: u32, base: f32, ratio: f32 }

fn row_open(row: u32) -> Row {
    let record = row * (2u + ((params.units * 5u + 31u) >> 5u));
    return Row(row * params.units, record + 2u, bitcast<f32>(scales[record]), bitcast<f32>(scales[record + 1u]));
}

fn unit_scale(row: Row, unit: u32) -> f32 {
    let bit = unit * 5u;
    let word = row.rungs + (bit >> 5u);
    let shift = bit & 31u;
    // The next word matters when the code straddles; the plane ends with a spare word.
    let straddle = select(0u, scales[word + 1u] << ((32u - shift) & 31u), shift > 27u);
    let code = (scales[word] >> shift) | straddle;
    let r2 = row.ratio * row.ratio;
    let r4 = r2 * r2;
    let r8 = r4 * r4;
    var scale = row.base;
    scale *= select(1.0, row.ratio, (code & 1u) != 0u);
    scale *= select(1.0, r2, (code & 2u) != 0u);
    scale *= select(1.0, r4, (code & 4u) != 0u);
    scale *= select(1.0, r8, (code & 8u) != 0u);
    return scale * select(1.0, r8 * r8, (code & 16u) != 0u);
}
