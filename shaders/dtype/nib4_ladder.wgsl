// Scales of groups of 4-bit codes: 2^(lo + code * step), with a 5-bit code for each group, and lo and step for each
// row. `scales` has a record for each row: lo and step, two f16 in a word, then the codes, least significant bit
// first, padded to whole words.
// Needs: nib4_codes.wgsl, weights.wgsl; `scales`; params.groups. KEEPS_ROWS: whether there are registers for lo and
// step of a row.
struct Row { code: u32, record: u32, ladder: u32 }

fn row_open(row: u32) -> Row {
    let record = row * (1u + ((params.groups * 5u + 31u) >> 5u));
    var ladder = 0u;
    if (KEEPS_ROWS) { ladder = scales[record]; }
    return Row(row * params.groups, record, ladder);
}

// 2^t, with the same bits on every device, which exp2 does not guarantee: the nearest whole power times a polynomial
// of the rest f. The polynomial equals 2^f at 0 and at the six Chebyshev nodes of [-1/2, 1/2]; its error is at most
// 9e-9.
fn power_of_two(t: f32) -> f32 {
    // Other arguments give 0 or infinity.
    let bounded = clamp(t, -127.0, 128.0);
    let whole = round(bounded);
    let f = bounded - whole;
    var p = fma(1.5453163e-4, f, 1.3390863e-3);
    p = fma(p, f, 9.6180830e-3);
    p = fma(p, f, 5.5503570e-2);
    p = fma(p, f, 2.4022651e-1);
    p = fma(p, f, 6.9314718e-1);
    p = fma(p, f, 1.0);
    return bitcast<f32>(bitcast<i32>(p) + (i32(whole) << 23u));
}

fn group_scale(row: Row, group: u32) -> f32 {
    let bit = group * 5u;
    let word = row.record + 1u + (bit >> 5u);
    let shift = bit & 31u;
    // The code may continue in the next word. The plane ends with a spare word, so that there always is one.
    let straddle = select(0u, scales[word + 1u] << ((32u - shift) & 31u), shift > 27u);
    let code = ((scales[word] >> shift) | straddle) & 31u;
    // Kernels with eight rows in a thread read lo and step for every group: they have no registers to keep them.
    var words = row.ladder;
    if (!KEEPS_ROWS) { words = scales[row.record]; }
    let ladder = halves(words);
    return power_of_two(fma(f32(i32(code)), ladder.y, ladder.x));
}
