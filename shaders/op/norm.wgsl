// RMSNorm: y[c] = x[c] * g / sqrt(mean(x[c]^2) + eps), for the tokens c of this run.
// x [tokens, vectors]; g [vectors]; y [tokens, y_stride vectors], from vector y_first of each.
// A workgroup computes one token.

#import vector
#import tokens
#import workgroup_sum

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let c = workgroup.x;
    if (c >= batch.count) { return; }
    let base = c * params.vectors;
    var sum = 0.0;
    for (var i = thread; i < params.vectors; i += THREADS) {
        sum += square_sum(x[base + i]);
    }
    let scale = 1.0 / sqrt(fma(sum_of_threads(thread, sum), params.inv_cols, params.eps));
    for (var i = thread; i < params.vectors; i += THREADS) {
        y[c * params.y_stride + params.y_first + i] = x[base + i] * g[i] * scale;
    }
}
