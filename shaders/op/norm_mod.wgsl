// y[c] = norm(x[c]) * (1 + s), for the tokens c of this run; s are `cols` elements of `mods` from vector scale_at on.
// norm(x) = x * g / sqrt(mean(x^2) + eps), or if `centred` is 1, (x - mean(x)) / sqrt(variance(x) + eps).
// x, y [tokens, vectors]; g [vectors]. Elements from `cols` on are 0.
// A workgroup computes one token.

#import vector
#import tokens
#import workgroup_sum

// Vector i of the row at `base` minus the mean; zeros past the last column.
fn centred(base: u32, i: u32, mean: f32) -> vec4<f32> {
    return select(vec4<f32>(0.0), x[base + i] - mean, four_from(i * 4u) < vec4<u32>(params.cols));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let c = workgroup.x;
    if (c >= batch.count) { return; }
    let base = c * params.vectors;
    let inv_cols = 1.0 / f32(params.cols);
    var sum = 0.0;
    for (var i = thread; i < params.vectors; i += THREADS) {
        sum += horizontal(x[base + i]);
    }
    let mean = f32(params.centred) * sum_of_threads(thread, sum) * inv_cols;
    sum = 0.0;
    for (var i = thread; i < params.vectors; i += THREADS) {
        sum += square_sum(centred(base, i, mean));
    }
    let scale = 1.0 / sqrt(fma(sum_of_threads(thread, sum), inv_cols, params.eps));
    for (var i = thread; i < params.vectors; i += THREADS) {
        let weight = select(g[i * (1u - params.centred)], vec4<f32>(1.0), params.centred == 1u);
        y[base + i] = centred(base, i, mean) * weight * scale * (1.0 + mods[params.scale_at + i]);
    }
}
