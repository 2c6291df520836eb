// Sums over the four components of a vector, in a fixed order.
fn horizontal(v: vec4<f32>) -> f32 {
    return (v.x + v.y) + (v.z + v.w);
}

// Four numbers from `first`.
fn four_from(first: u32) -> vec4<u32> { return vec4<u32>(first, first + 1u, first + 2u, first + 3u); }

// The sum of four squares. One chain of fma leaves a driver nothing to contract or to regroup. Mesa would regroup a sum
// of two sums.
fn square_sum(v: vec4<f32>) -> f32 {
    return fma(v.x, v.x, fma(v.y, v.y, fma(v.z, v.z, v.w * v.w)));
}
