// Sums over the four components of a vector, in a fixed order.
fn horizontal(v: vec4<f32>) -> f32 {
    return (v.x + v.y) + (v.z + v.w);
}

// The sum of four squares; the fused form leaves a driver nothing to contract.
fn square_sum(v: vec4<f32>) -> f32 {
    return fma(v.x, v.x, v.y * v.y) + fma(v.z, v.z, v.w * v.w);
}
