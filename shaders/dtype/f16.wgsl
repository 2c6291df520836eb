// f16 weights, two in a word.
// Needs: wide16.wgsl; `codes` [rows, 4*groups vectors].
fn codes8(row: Row, group: u32, j: u32) -> W8 {
    let w = codes[row.code + group * 4u + j];
    return W8(vec4<f32>(halves(w.x), halves(w.y)), vec4<f32>(halves(w.z), halves(w.w)));
}
