// One block of 64 positions of attention, for one token and the query heads of one key-value head. With scores s_j of
// the block's positions j, a record of `partial` is [m, sum exp(s_j - m), 0, 0] with m = max s_j, followed by
// sum exp(s_j - m) * v_j.
// qkv [tokens, heads*query + 2*kv_heads*head vectors], queries rotated; caches and pages as in tokens.wgsl;
// partial [tokens, heads, blocks, 1 + head vectors].
// A workgroup computes one block, four query heads at a time. For the scores a thread has one position, for the sums one
// vector of the head.
// Masked: only the query heads that `list` names; the records of other heads stay as they are.
// list: number of query heads to compute, number of key-value heads that they read, 0, 0;
//   all query heads, those to compute first;
//   for each key-value head that is read: its index, its first entry among the query heads, the number of its entries.

#import attention
#import attention_sums

// For each position of the block, exp(score - largest score) of four query heads. Before, what `find_largest` exchanges.
var<workgroup> weights: array<vec4<f32>, KV_PAGE>;
// The largest scores of 8 positions each.
var<workgroup> maxima: array<vec4<f32>, KV_PAGE / 8u>;
// Four queries, one after another.
const QUERY_STRIDE: u32 = 64u;
var<workgroup> queries: array<vec4<f32>, 4u * QUERY_STRIDE>;

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

fn shared_query(own: vec4<f32>, lane: u32, at: u32) -> vec4<f32> {
    if (SHARES) { return shared_from(own, lane); }
    return queries[at];
}

// The scores of the four queries for the key whose row begins at vector k_row. A head has an even number of vectors.
fn scores(k_row: u32, lane: u32) -> vec4<f32> {
    #each 0..4 var p# = vec4<f32>(0.0);
    // The factor 1 makes the bound depend on a storage buffer, see groups_of_run in matmul.wgsl.
    for (var i = 0u; i < params.head_vectors * min(batch.count, 1u); i += 2u) {
        // Lanes 0 to 3 load vector i of a query each, the others vector i + 1.
        var own = vec4<f32>(0.0);
        if (SHARES) { own = queries[lane % 4u * QUERY_STRIDE + i + lane / 4u]; }
        let k0 = kv_unpack(k_cache[k_row + i]);
        let k1 = kv_unpack(k_cache[k_row + i + 1u]);
        #each 0..4 p# = fma(shared_query(own, #u, #u * QUERY_STRIDE + i), k0, p#);
        #each 0..4 p# = fma(shared_query(own, 4u + #u, #u * QUERY_STRIDE + i + 1u), k1, p#);
    }
    return vec4<f32>(
        #each 0..4 finish_score(p#),
    );
}

// The largest scores of the block, for each of four heads.
fn largest(lane: u32) -> vec4<f32> {
    if (SHARES) { return shared_max(shared_max(shared_max(maxima[lane], 1u), 2u), 4u); }
    var m = maxima[0];
    #each 1..8 m = max(m, maxima[#]);
    return m;
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
    let sees = visible(start + thread, pos);
    let page = page_row(pages[page_entry(token.slot, block, params.slot_pages)], heads.kv_head, params.kv_heads);
    let count = min(KV_PAGE, pos + 1u - start);
    let k_row = (page + min(thread, count - 1u)) * params.head_vectors;
    let lane = thread % 8u;
    for (var h = 0u; h < heads.count; h += 4u) {
        // Numbers past the last head repeat it.
        let entries = heads.first + min(four_from(h), vec4<u32>(heads.count - 1u));
        let own = vec4<u32>(
            #each 0..4 head_at(entries[#]),
        );
        let q = c * qkv_stride() + own * params.query_vectors;
        // A head has at most 64 vectors.
        if (thread < params.head_vectors) {
            #each 0..4 queries[#u * QUERY_STRIDE + thread] = qkv[q[#] + thread];
        }
        workgroupBarrier();
        let score = select(vec4<f32>(LOWEST), scores(k_row, lane), sees);
        find_largest(score, thread);
        let m = largest(lane);
        weights[thread] = select(vec4<f32>(0.0), exp(score - m), sees);
        workgroupBarrier();
        let out = ((c * params.heads + own) * params.blocks + block) * (1u + params.head_vectors);
        // The lanes of a subgroup stay together, because they share weights.
        if (thread - lane < params.head_vectors) {
            let sums = block_sums(page, count, 0u, min(thread, params.head_vectors - 1u), lane);
            if (thread < params.head_vectors) {
                #each 0..4 if (h + #u < heads.count) { partial[out[#] + 1u + thread] = sums.b#; }
            }
            if (thread == 0u) {
                #each 0..4 if (h + #u < heads.count) { partial[out[#]] = vec4<f32>(m[#], sums.l[#], 0.0, 0.0); }
            }
        }
        // The next heads write `weights` again.
        workgroupBarrier();
    }
}
