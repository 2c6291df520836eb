// bf16 weights, two in a word. A bf16 is the upper half of an f32.
// Needs: wide16.wgsl; `codes` [rows, 4*groups vectors].
fn codes8(row: Row, group: u32, j: u32) -> W8 {
    let w = codes[row.code + group * 4u + j];
    let low = bitcast<vec4<f32>>(w << vec4<u32>(16u));
    let high = bitcast<vec4<f32>>(w & vec4<u32>(0xffff0000u));
    return W8(vec4<f32>(low.x, high.x, low.y, high.y), vec4<f32>(low.z, high.z, low.w, high.w));
}
