// h[c] += tanh(gate) * y[c] * post / sqrt(mean(y[c]^2) + eps); then x[c] = h[c] * g / sqrt(mean(h[c]^2) + eps) * (1 + s);
// for the tokens c of this run. Gates and s are in `mods`, from vectors gate_at and scale_at on.
// y, h, x [tokens, vectors]; post, g [vectors].
// A workgroup computes one token.

#import vector
#import tokens
#import workgroup_sum

fn norm_factor(thread: u32, squares: f32) -> f32 {
    return 1.0 / sqrt(fma(sum_of_threads(thread, squares), params.inv_cols, params.eps));
}

// tanh(15) is 1 in f32, and tanh overflows for larger arguments in some drivers.
fn gates(i: u32) -> vec4<f32> {
    return tanh(clamp(mods[params.gate_at + i], vec4<f32>(-15.0), vec4<f32>(15.0)));
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
        let v = fma(y[base + i] * factor, post[i] * gates(i), h[base + i]);
        h[base + i] = v;
        sum += square_sum(v);
    }
    let scale = norm_factor(thread, sum);
    for (var i = thread; i < params.vectors; i += THREADS) {
        x[base + i] = h[base + i] * g[i] * scale * (1.0 + mods[params.scale_at + i]);
    }
}
