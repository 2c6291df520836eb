// h[c] += y[c] * post / sqrt(mean(y[c]^2) + eps); then x[c] = h[c] * g / sqrt(mean(h[c]^2) + eps);
// for the tokens c of this run.
// y, h, x [tokens, vectors]; post, g [vectors].
// A workgroup computes one token.

#import vector
#import tokens
#import workgroup_sum

fn norm_factor(thread: u32, squares: f32) -> f32 {
    return 1.0 / sqrt(fma(sum_of_threads(thread, squares), params.inv_cols, params.eps));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let c = workgroup.x;
    if (c >= batch.count) { return; }
    let base = c * params.vectors;
    var sum = 0.0;
    for (var i = thread; i < params.vectors; i += THREADS) {
        sum += square_sum(y[base + i]);
    }
    let factor = norm_factor(thread, sum);
    sum = 0.0;
    for (var i = thread; i < params.vectors; i += THREADS) {
        let v = fma(y[base + i] * factor, post[i], h[base + i]);
        h[base + i] = v;
        sum += square_sum(v);
    }
    let scale = norm_factor(thread, sum);
    for (var i = thread; i < params.vectors; i += THREADS) {
        x[base + i] = h[base + i] * g[i] * scale;
    }
}
