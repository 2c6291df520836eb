// Attention of one query head for 4 columns of this run from column0 on, in the same order as attn_block and attn_merge.
// Thread t owns column t/16 and vectors t%16 + 16n of its head: heads of at most 256. Needs `ctl`, `qkv`, `k_cache`,
// `v_cache` and `y`.
const COLUMNS: u32 = 4u;
var<workgroup> weights: array<f32, 256>;

fn values(at: u32, i: u32) -> vec4<f32> {
    // Vectors past a short head are read from its first and never stored.
    return kv_unpack(v_cache[at + select(0u, i, i < params.head_vectors)]);
}

fn attend_chunk(head: u32, column0: u32, thread: u32) {
    if (column0 >= ctl.columns) { return; }
    let kv_head = head / (params.heads / params.kv_heads);
    let cache = kv_head * params.positions;
    let stride = params.heads * params.query_vectors + 2u * params.kv_heads * params.head_vectors;
    let last_column = ctl.columns - 1u;
    let q0 = column0 * stride + head * params.query_vectors;
    let q1 = min(column0 + 1u, last_column) * stride + head * params.query_vectors;
    let q2 = min(column0 + 2u, last_column) * stride + head * params.query_vectors;
    let q3 = min(column0 + 3u, last_column) * stride + head * params.query_vectors;
    let pos0 = ctl.pos + column0;
    let pos_last = ctl.pos + min(column0 + COLUMNS - 1u, last_column);
    let mine = thread / 16u;
    let i0 = thread % 16u;
    var run = Running(MASKED, 0.0);
    var acc0 = vec4<f32>(0.0);
    var acc1 = vec4<f32>(0.0);
    var acc2 = vec4<f32>(0.0);
    var acc3 = vec4<f32>(0.0);
    for (var number = first_block(pos0); number <= pos_last / BLOCK; number += 1u) {
        let start = number * BLOCK;
        let key = start + thread;
        let k_row = (cache + min(key, pos_last)) * params.head_vectors;
        var s0 = vec4<f32>(0.0);
        var s1 = vec4<f32>(0.0);
        var s2 = vec4<f32>(0.0);
        var s3 = vec4<f32>(0.0);
        for (var i = 0u; i < params.head_vectors; i += 1u) {
            let k = kv_unpack(k_cache[k_row + i]);
            s0 = fma(qkv[q0 + i], k, s0);
            s1 = fma(qkv[q1 + i], k, s1);
            s2 = fma(qkv[q2 + i], k, s2);
            s3 = fma(qkv[q3 + i], k, s3);
        }
        workgroupBarrier();
        weights[thread] = select(MASKED, finish_score(s0), visible(key, pos0));
        weights[BLOCK + thread] = select(MASKED, finish_score(s1), visible(key, pos0 + 1u));
        weights[2u * BLOCK + thread] = select(MASKED, finish_score(s2), visible(key, pos0 + 2u));
        weights[3u * BLOCK + thread] = select(MASKED, finish_score(s3), visible(key, pos0 + 3u));
        workgroupBarrier();
        let count = min(BLOCK, pos_last + 1u - start);
        var m = MASKED;
        for (var j = 0u; j < count; j += 1u) {
            m = max(m, weights[mine * BLOCK + j]);
        }
        var l = 0.0;
        var b0 = vec4<f32>(0.0);
        var b1 = vec4<f32>(0.0);
        var b2 = vec4<f32>(0.0);
        var b3 = vec4<f32>(0.0);
        for (var j = 0u; j < count; j += 1u) {
            let w = select(0.0, exp(weights[mine * BLOCK + j] - m), visible(start + j, pos0 + mine));
            l += w;
            let at = (cache + start + j) * params.head_vectors;
            let factor = vec4<f32>(w);
            b0 = fma(factor, values(at, i0), b0);
            if (params.head_vectors > 16u) { b1 = fma(factor, values(at, i0 + 16u), b1); }
            if (params.head_vectors > 32u) { b2 = fma(factor, values(at, i0 + 32u), b2); }
            if (params.head_vectors > 48u) { b3 = fma(factor, values(at, i0 + 48u), b3); }
        }
        let f = join_factors(run.m, m);
        run = Running(max(run.m, m), fma(run.l, f.x, l * f.y));
        acc0 = fma(acc0, vec4<f32>(f.x), b0 * f.y);
        acc1 = fma(acc1, vec4<f32>(f.x), b1 * f.y);
        acc2 = fma(acc2, vec4<f32>(f.x), b2 * f.y);
        acc3 = fma(acc3, vec4<f32>(f.x), b3 * f.y);
    }
    if (column0 + mine > last_column) { return; }
    let out = (column0 + mine) * params.y_stride + head * params.head_vectors;
    let q = (column0 + mine) * stride + head * params.query_vectors;
    if (i0 < params.head_vectors) { y[out + i0] = acc0 / run.l * gate(q, i0); }
    if (i0 + 16u < params.head_vectors) { y[out + i0 + 16u] = acc1 / run.l * gate(q, i0 + 16u); }
    if (i0 + 32u < params.head_vectors) { y[out + i0 + 32u] = acc2 / run.l * gate(q, i0 + 32u); }
    if (i0 + 48u < params.head_vectors) { y[out + i0 + 48u] = acc3 / run.l * gate(q, i0 + 48u); }
}
