// What an operator and a weight type exchange: a unit is 32 consecutive columns of a row.
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

// An IEEE half in the low 16 bits. Drivers may flush its subnormals in unpack2x16float; the device's self-test decides.
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

fn halves(pair: u32) -> vec2<f32> {
    if (HALF_NATIVE) {
        return unpack2x16float(pair);
    }
    return vec2<f32>(half(pair & 0xffffu), half(pair >> 16u));
}

// Four unsigned bytes, each below 128.
fn bytes4(word: u32) -> vec4<f32> {
    return vec4<f32>(bitcast<vec4<i32>>(unpack4xU8(word)));
}
