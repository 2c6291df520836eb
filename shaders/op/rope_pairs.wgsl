// Query and key heads of every token c of this run, in place: x = x * norm / sqrt(mean(x^2) + eps), then the pairs of
// elements 2j and 2j + 1 are rotated by the angle whose cosine and sine row c of `table` has.
// qkv [tokens, qkv_stride vectors]: query heads, then key heads, then others; table [tokens, head vectors] of two
// (cos, sin) each; q_norm, k_norm [head vectors].
// A workgroup computes one head of a token.

#import vector
#import tokens

fn norm_weight(is_key: bool, i: u32) -> vec4<f32> {
    if (is_key) { return k_norm[i]; }
    return q_norm[i];
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let head = workgroup.x;
    let c = workgroup.y;
    if (c >= batch.count) { return; }
    let base = c * params.qkv_stride + head * params.head_vectors;
    // Every thread sums the whole head in the same order.
    var sum = 0.0;
    for (var i = 0u; i < params.head_vectors; i += 1u) {
        sum += square_sum(qkv[base + i]);
    }
    let scale = 1.0 / sqrt(fma(sum, 1.0 / f32(params.head_vectors * 4u), params.eps));
    // All threads have summed the head before any of them changes it.
    workgroupBarrier();
    for (var i = thread; i < params.head_vectors; i += THREADS) {
        let v = qkv[base + i] * norm_weight(head >= params.heads, i) * scale;
        let t = table[c * params.head_vectors + i];
        // (x, y) becomes (x cos - y sin, y cos + x sin).
        qkv[base + i] = fma(v, t.xxzz, v.yxwz * t.yyww * vec4<f32>(-1.0, 1.0, -1.0, 1.0));
    }
}
