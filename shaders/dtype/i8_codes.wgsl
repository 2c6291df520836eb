// Products with signed bytes, for i8.wgsl, i8_col.wgsl and i8_group.wgsl.
// Needs: vector.wgsl, weights.wgsl; `codes` [rows, 2*groups vectors].

fn group_dot(row: Row, group: u32, x: X32, sum: f32) -> f32 {
    let w = codes[row.code + group * 2u];
    var acc = vec4<f32>(unpack4xI8(w.x)) * x.a;
    acc = fma(vec4<f32>(unpack4xI8(w.y)), x.b, acc);
    acc = fma(vec4<f32>(unpack4xI8(w.z)), x.c, acc);
    acc = fma(vec4<f32>(unpack4xI8(w.w)), x.d, acc);
    let v = codes[row.code + group * 2u + 1u];
    acc = fma(vec4<f32>(unpack4xI8(v.x)), x.e, acc);
    acc = fma(vec4<f32>(unpack4xI8(v.y)), x.f, acc);
    acc = fma(vec4<f32>(unpack4xI8(v.z)), x.g, acc);
    acc = fma(vec4<f32>(unpack4xI8(v.w)), x.h, acc);
    return horizontal(acc);
}

fn codes8(row: Row, group: u32, j: u32) -> W8 {
    let w = codes[row.code + group * 2u + (j >> 1u)];
    let pair = select(w.xy, w.zw, (j & 1u) == 1u);
    return W8(vec4<f32>(unpack4xI8(pair.x)), vec4<f32>(unpack4xI8(pair.y)));
}
