// f16 weights, two to a word.
fn codes8(row: Row, unit: u32, j: u32) -> W8 {
    let w = codes[row.code + unit * 4u + j];
    return W8(vec4<f32>(halves(w.x), halves(w.y)), vec4<f32>(halves(w.z), halves(w.w)));
}
