// The scale of a 4-bit unit is a rung of its row's ladder, 2^(lo + code * step) with a 5-bit code. A row's record is its
// lo and step, two halves in a word, and its codes, least significant bit first, padded to whole words.
struct Row { code: u32, record: u32, ladder: u32 }

fn row_open(row: u32) -> Row {
    let record = row * (1u + ((params.units * 5u + 31u) >> 5u));
    var ladder = 0u;
    if (KEEPS_ROWS) { ladder = scales[record]; }
    return Row(row * params.units, record, ladder);
}

// 2^t: the nearest whole power times a polynomial of what is left, the one through 2^f at the six Chebyshev nodes of
// [-1/2, 1/2] and at 0, 9e-9 off at most. Every step is defined to the bit, which the exp2 of drivers is not.
fn power_of_two(t: f32) -> f32 {
    // What lies outside becomes 0 or infinite.
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

fn unit_scale(row: Row, unit: u32) -> f32 {
    let bit = unit * 5u;
    let word = row.record + 1u + (bit >> 5u);
    let shift = bit & 31u;
    // The next word matters when the code straddles; the plane ends with a spare word.
    let straddle = select(0u, scales[word + 1u] << ((32u - shift) & 31u), shift > 27u);
    let code = ((scales[word] >> shift) | straddle) & 31u;
    // Kernels of eight rows a thread read it again for every unit: they have no registers to keep it.
    var pair = row.ladder;
    if (!KEEPS_ROWS) { pair = scales[row.record]; }
    let ladder = halves(pair);
    return power_of_two(fma(f32(i32(code)), ladder.y, ladder.x));
}
