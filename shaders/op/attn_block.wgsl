// One block of 64 positions of attention, for one token and the query heads of one key-value head. With scores s_j of
// the block's positions j, a record of `partial` is [m, sum exp(s_j - m), 0, 0] with m = max s_j, followed by
// sum exp(s_j - m) * v_j.
// qkv [tokens, heads*query + 2*kv_heads*head vectors], queries rotated; caches and pages as in tokens.wgsl;
// partial [tokens, heads, blocks, 1 + head vectors].
// A workgroup computes one block; for the scores, a thread has one position.
// Masked: only the query heads that `list` names; the records of other heads stay as they are.
// list: number of query heads to compute, number of key-value heads that they read, 0, 0;
//   all query heads, those to compute first;
//   for each key-value head that is read: its index, its first entry among the query heads, the number of its entries.

#import attention
#import kv

const HEADS_AT_ONCE: u32 = 8u;
var<workgroup> weights: array<f32, 512>;
var<workgroup> maxima: array<f32, 8>;

// A key-value head, and the entries of the query heads that read it.
struct Heads { kv_head: u32, first: u32, count: u32 }

fn heads_of(entry: u32) -> Heads {
    let shared_by = params.heads / params.kv_heads;
    if (!MASKED) { return Heads(entry, entry * shared_by, shared_by); }
    let at = LIST_HEADER + params.heads + 3u * entry;
    return Heads(list[at], list[at + 1u], list[at + 2u]);
}

fn head_at(entry: u32) -> u32 {
    if (MASKED) { return list[LIST_HEADER + entry]; }
    return entry;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let block = workgroup.x;
    let c = workgroup.z;
    if (c >= batch.count || (MASKED && workgroup.y >= list[1])) { return; }
    let heads = heads_of(workgroup.y);
    let token = batch.tokens[c];
    let pos = token.position;
    let start = block * KV_PAGE;
    if (start > pos || block < first_block(pos)) { return; }
    let key = start + thread;
    let sees = visible(key, pos);
    let page = page_row(pages[page_entry(token.slot, block, params.slot_pages)], heads.kv_head, params.kv_heads);
    let k_row = (page + min(key, pos) - start) * params.head_vectors;
    let count = min(KV_PAGE, pos + 1u - start);
    for (var h0 = 0u; h0 < heads.count; h0 += HEADS_AT_ONCE) {
        let head_count = min(HEADS_AT_ONCE, heads.count - h0);
        let entry0 = heads.first + h0;
        for (var h = 0u; h < head_count; h += 1u) {
            let q = c * qkv_stride() + head_at(entry0 + h) * params.query_vectors;
            var acc = vec4<f32>(0.0);
            for (var i = 0u; i < params.head_vectors; i += 1u) {
                acc = fma(qkv[q + i], kv_unpack(k_cache[k_row + i]), acc);
            }
            weights[h * KV_PAGE + thread] = select(LOWEST, finish_score(acc), sees);
        }
        workgroupBarrier();
        for (var h = 0u; h < head_count; h += 1u) {
            var m = LOWEST;
            for (var j = 0u; j < count; j += 1u) {
                m = max(m, weights[h * KV_PAGE + j]);
            }
            if (thread == 0u) { maxima[h] = m; }
        }
        workgroupBarrier();
        for (var h = 0u; h < head_count; h += 1u) {
            let w = h * KV_PAGE + thread;
            weights[w] = select(0.0, exp(weights[w] - maxima[h]), sees);
        }
        workgroupBarrier();
        for (var item = thread; item < head_count * params.head_vectors; item += THREADS) {
            let h = item / params.head_vectors;
            let i = item % params.head_vectors;
            var acc = vec4<f32>(0.0);
            var l = 0.0;
            for (var j = 0u; j < count; j += 1u) {
                let w = weights[h * KV_PAGE + j];
                l += w;
                acc = fma(vec4<f32>(w), kv_unpack(v_cache[(page + j) * params.head_vectors + i]), acc);
            }
            let record = (c * params.heads + head_at(entry0 + h)) * params.blocks + block;
            let out = record * (1u + params.head_vectors);
            partial[out + 1u + i] = acc;
            if (i == 0u) { partial[out] = vec4<f32>(maxima[h], l, 0.0, 0.0); }
        }
        // The next heads write `weights` again.
        workgroupBarrier();
    }
}
