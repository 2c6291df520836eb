// y[c][head] = softmax(scores) * v, times the output gate, for the tokens c of this run. Sums have the order of
// attn_block.wgsl and attn_merge.wgsl.
// qkv [tokens, heads*query + 2*kv_heads*head vectors], queries rotated; caches and pages as in tokens.wgsl;
// y [tokens, y_stride vectors].
// A workgroup computes one head of CHUNK_TOKENS tokens, which share the keys and values that it loads. For the scores,
// a thread has one position. For the sums, thread t has token t / 16 and the vectors t % 16 + 16n of the head, so a
// head has at most 256 elements.
// Masked: only the query heads that `list` names, as in attn_block.wgsl; outputs of other heads stay as they are.

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
    let t0 = first;
    #each 1..4 let t# = token_of(first, #u, last);
    let p = vec4<u32>(
        #each 0..4 batch.tokens[t#].position,
    );
    #each 0..4 let q# = t# * qkv_stride() + head * params.query_vectors;
    let pos_first = min(min(p.x, p.y), min(p.z, p.w));
    let pos_last = max(max(p.x, p.y), max(p.z, p.w));
    let own_index = thread / 16u;
    let own = token_of(first, own_index, last);
    let own_pos = batch.tokens[own].position;
    let i0 = thread % 16u;
    var run = Running(LOWEST, 0.0);
    #each 0..4 var acc# = vec4<f32>(0.0);
    for (var block = first_block(pos_first); block <= pos_last / KV_PAGE; block += 1u) {
        let start = block * KV_PAGE;
        let key = start + thread;
        let page = page_row(pages[page_entry(slot, block, params.slot_pages)], kv_head, params.kv_heads);
        let k_row = (page + min(key, pos_last) - start) * params.head_vectors;
        #each 0..4 var s# = vec4<f32>(0.0);
        for (var i = 0u; i < params.head_vectors; i += 1u) {
            let k = kv_unpack(k_cache[k_row + i]);
            #each 0..4 s# = fma(qkv[q# + i], k, s#);
        }
        workgroupBarrier();
        #each 0..4 weights[#u * KV_PAGE + thread] = select(LOWEST, finish_score(s#), visible(key, p[#]));
        workgroupBarrier();
        let count = min(KV_PAGE, pos_last + 1u - start);
        var m = LOWEST;
        for (var j = 0u; j < count; j += 1u) {
            m = max(m, weights[own_index * KV_PAGE + j]);
        }
        var l = 0.0;
        #each 0..4 var b# = vec4<f32>(0.0);
        for (var j = 0u; j < count; j += 1u) {
            let w = select(0.0, exp(weights[own_index * KV_PAGE + j] - m), visible(start + j, own_pos));
            l += w;
            let at = (page + j) * params.head_vectors;
            let factor = vec4<f32>(w);
            b0 = fma(factor, values(at, i0), b0);
            #each 1..4 if (params.head_vectors > #u * 16u) { b# = fma(factor, values(at, i0 + #u * 16u), b#); }
        }
        let f = join_factors(run.m, m);
        run = Running(max(run.m, m), fma(run.l, f.x, l * f.y));
        #each 0..4 acc# = fma(acc#, vec4<f32>(f.x), b# * f.y);
    }
    if (first + own_index > last) { return; }
    let out = own * params.y_stride + head * params.head_vectors;
    let q = own * qkv_stride() + head * params.query_vectors;
    #each 0..4 if (i0 + #u * 16u < params.head_vectors) { y[out + i0 + #u * 16u] = acc# / run.l * gate(q, i0 + #u * 16u); }
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
