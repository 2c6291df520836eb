// y[c][head] = softmax(scores) * v, times the output gate, for the tokens c of this run. Sums have the order of
// attn_block.wgsl and attn_merge.wgsl.
// qkv [tokens, heads*query + 2*kv_heads*head vectors], queries rotated; caches and pages as in tokens.wgsl;
// y [tokens, y_stride vectors].
// A workgroup computes one head of CHUNK_TOKENS tokens, which share the keys and values that it loads. For the scores,
// a thread has one position. For the sums, thread t has token t / 16 and the vectors t % 16 + 16n of the head, so a
// head has at most 256 elements.
// Masked: only the query heads that `list` names, as in attn_block.wgsl; outputs of other heads stay as they are.

#import vector
#import tokens
#import attention
#import gate
#import kv

var<workgroup> weights: array<f32, 256>;

// Vector i of the value row that begins at vector `at`.
fn values(at: u32, i: u32) -> vec4<f32> {
    // Vectors past the end of the head are never stored; they read vector 0 instead.
    return kv_unpack(v_cache[at + select(0u, i, i < params.head_vectors)]);
}

// Token number i of the chunk; numbers past its end repeat the last token.
fn token_of(first: u32, i: u32, last: u32) -> u32 { return min(first + i, last); }

// Computes the tokens from `first` to `last`, at most CHUNK_TOKENS tokens of one slot.
fn attend(head: u32, first: u32, last: u32, thread: u32) {
    let kv_head = head / (params.heads / params.kv_heads);
    let slot = batch.tokens[first].slot;
    let t1 = token_of(first, 1u, last);
    let t2 = token_of(first, 2u, last);
    let t3 = token_of(first, 3u, last);
    let p = vec4<u32>(
        batch.tokens[first].position, batch.tokens[t1].position, batch.tokens[t2].position, batch.tokens[t3].position,
    );
    let q0 = first * qkv_stride() + head * params.query_vectors;
    let q1 = t1 * qkv_stride() + head * params.query_vectors;
    let q2 = t2 * qkv_stride() + head * params.query_vectors;
    let q3 = t3 * qkv_stride() + head * params.query_vectors;
    let pos_first = min(min(p.x, p.y), min(p.z, p.w));
    let pos_last = max(max(p.x, p.y), max(p.z, p.w));
    let own_index = thread / 16u;
    let own = token_of(first, own_index, last);
    let own_pos = batch.tokens[own].position;
    let i0 = thread % 16u;
    var run = Running(LOWEST, 0.0);
    var acc0 = vec4<f32>(0.0);
    var acc1 = vec4<f32>(0.0);
    var acc2 = vec4<f32>(0.0);
    var acc3 = vec4<f32>(0.0);
    for (var block = first_block(pos_first); block <= pos_last / KV_PAGE; block += 1u) {
        let start = block * KV_PAGE;
        let key = start + thread;
        let page = page_row(pages[page_entry(slot, block, params.slot_pages)], kv_head, params.kv_heads);
        let k_row = (page + min(key, pos_last) - start) * params.head_vectors;
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
        weights[thread] = select(LOWEST, finish_score(s0), visible(key, p.x));
        weights[KV_PAGE + thread] = select(LOWEST, finish_score(s1), visible(key, p.y));
        weights[2u * KV_PAGE + thread] = select(LOWEST, finish_score(s2), visible(key, p.z));
        weights[3u * KV_PAGE + thread] = select(LOWEST, finish_score(s3), visible(key, p.w));
        workgroupBarrier();
        let count = min(KV_PAGE, pos_last + 1u - start);
        var m = LOWEST;
        for (var j = 0u; j < count; j += 1u) {
            m = max(m, weights[own_index * KV_PAGE + j]);
        }
        var l = 0.0;
        var b0 = vec4<f32>(0.0);
        var b1 = vec4<f32>(0.0);
        var b2 = vec4<f32>(0.0);
        var b3 = vec4<f32>(0.0);
        for (var j = 0u; j < count; j += 1u) {
            let w = select(0.0, exp(weights[own_index * KV_PAGE + j] - m), visible(start + j, own_pos));
            l += w;
            let at = (page + j) * params.head_vectors;
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
    if (first + own_index > last) { return; }
    let out = own * params.y_stride + head * params.head_vectors;
    let q = own * qkv_stride() + head * params.query_vectors;
    if (i0 < params.head_vectors) { y[out + i0] = acc0 / run.l * gate(q, i0); }
    if (i0 + 16u < params.head_vectors) { y[out + i0 + 16u] = acc1 / run.l * gate(q, i0 + 16u); }
    if (i0 + 32u < params.head_vectors) { y[out + i0 + 32u] = acc2 / run.l * gate(q, i0 + 32u); }
    if (i0 + 48u < params.head_vectors) { y[out + i0 + 48u] = acc3 / run.l * gate(q, i0 + 48u); }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    var head = workgroup.x;
    if (MASKED) {
        if (workgroup.x >= list[0]) { return; }
        head = list[LIST_HEADER + workgroup.x];
    }
    let end = min((workgroup.y + 1u) * CHUNK_TOKENS, batch.count);
    // Consecutive tokens of one slot are computed together.
    var first = workgroup.y * CHUNK_TOKENS;
    while (first < end) {
        var last = first;
        while (last + 1u < end && batch.tokens[last + 1u].slot == batch.tokens[first].slot) { last += 1u; }
        attend(head, first, last, thread);
        first = last + 1u;
    }
}
