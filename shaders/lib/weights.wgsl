// The values that operators and weight types exchange. A group is 32 consecutive columns of a row.

// The activations of one group.
struct X32 {
    a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>,
    e: vec4<f32>, f: vec4<f32>, g: vec4<f32>, h: vec4<f32>,
}

// Eight consecutive weights.
struct W8 { a: vec4<f32>, b: vec4<f32> }

fn x_sum(x: X32) -> f32 {
    let s = ((x.a + x.b) + (x.c + x.d)) + ((x.e + x.f) + (x.g + x.h));
    return (s.x + s.y) + (s.z + s.w);
}

// The f16 in the low 16 bits. Some drivers flush subnormals in unpack2x16float; HALF_NATIVE is true if a test at the
// opening of the device found that this one does not.
fn half(bits: u32) -> f32 {
    if (HALF_NATIVE) {
        return unpack2x16float(bits).x;
    }
    let sign = (bits & 0x8000u) << 16u;
    let magnitude = bits & 0x7fffu;
    let subnormal = f32(i32(magnitude)) * 0x1p-24;
    let exponent = select(112u, 224u, magnitude >= 0x7c00u);
    let normal = (magnitude << 13u) + (exponent << 23u);
    return bitcast<f32>(select(normal, bitcast<u32>(subnormal), magnitude < 0x400u) | sign);
}

// The two f16 of a word.
fn halves(pair: u32) -> vec2<f32> {
    if (HALF_NATIVE) {
        return unpack2x16float(pair);
    }
    return vec2<f32>(half(pair & 0xffffu), half(pair >> 16u));
}

// The four bytes of a word, unsigned.
fn bytes4(word: u32) -> vec4<f32> {
    return vec4<f32>(bitcast<vec4<i32>>(unpack4xU8(word)));
}
