// y[c][head] = softmax(scores) * v, times the output gate, for the tokens c of this run. Sums have the order of
// attn_block.wgsl and attn_merge.wgsl.
// qkv [tokens, heads*query + 2*kv_heads*head vectors], queries rotated; caches and pages as in tokens.wgsl;
// y [tokens, y_stride vectors].
// A workgroup computes one head of CHUNK_TOKENS tokens, which share the keys and values that it loads. For the scores,
// thread t has the four tokens from 4 * (t / 32), and the positions t % 32 and t % 32 + 32 of a block. For the sums it has
// the four tokens from 4 * (t / 16 % 8) and vectors of the head: t % 16 + 32n, the second half of the threads 16 more.
// Between blocks the sums are in y.
// Masked: only the query heads that `list` names, as in attn_block.wgsl; outputs of other heads stay as they are.

#import attention
#import attention_sums
#import gate

// Threads for the scores of four tokens.
const ACROSS: u32 = 32u;
// Vectors of the head that are in `keys` at once, and the distance of two of them, which is odd to avoid conflicts.
const SLICE: u32 = 4u;
const KEY_STRIDE: u32 = KV_PAGE + 1u;
// Vectors of a query in a step of the loop over them. Two are what the lanes of a subgroup share; without sharing they take
// 120 registers instead of 96.
const AT_ONCE: u32 = select(1u, 2u, SHARES);
var<workgroup> keys: array<Kv4, SLICE * KEY_STRIDE>;
// exp(score - largest score): for each four tokens those of all positions. Before, what `find_largest` exchanges.
var<workgroup> weights: array<vec4<f32>, CHUNK_TOKENS / 4u * KV_PAGE>;
// For each four tokens, the largest scores that each 8 threads have found.
var<workgroup> maxima: array<vec4<f32>, THREADS / 8u>;

// A block of positions that the tokens of a workgroup read: the row of its page, the number of positions that are cached.
struct KeyBlock { page: u32, count: u32 }

// Loads the vectors of all keys from `slice` into workgroup memory. Those past the end of the head are 0, positions past
// the last one repeat it.
fn load_keys(block: KeyBlock, slice: u32, thread: u32) {
    for (var item = thread; item < SLICE * KV_PAGE; item += THREADS) {
        let key = item / SLICE;
        let i = slice + item % SLICE;
        let at = (block.page + min(key, block.count - 1u)) * params.head_vectors + min(i, params.head_vectors - 1u);
        keys[item % SLICE * KEY_STRIDE + key] = select(Kv4(), k_cache[at], i < params.head_vectors);
    }
}

// Vector i of the query that begins at vector q of `qkv`. Past the end of the head, where keys are 0, it repeats the last one.
fn query(q: u32, i: u32) -> vec4<f32> { return qkv[q + min(i, params.head_vectors - 1u)]; }
fn shared_query(own: vec4<f32>, lane: u32, q: u32, i: u32) -> vec4<f32> {
    if (SHARES) { return shared_from(own, lane); }
    return query(q, i);
}

// The scores of four tokens for the two keys of a thread.
struct Scores { first: vec4<f32>, second: vec4<f32> }

// The scores of the queries at vectors q of `qkv`. `used`: whether they are of tokens of the run.
fn block_scores(block: KeyBlock, q: vec4<u32>, used: bool, thread: u32) -> Scores {
    let across = thread % ACROSS;
    let lane = thread % 8u;
    #each 0..4 var a# = vec4<f32>(0.0);
    #each 0..4 var b# = vec4<f32>(0.0);
    // The factor 1 makes the bound depend on a storage buffer, see groups_of_run in matmul.wgsl.
    for (var slice = 0u; slice < params.head_vectors * min(batch.count, 1u); slice += SLICE) {
        workgroupBarrier();
        load_keys(block, slice, thread);
        workgroupBarrier();
        for (var i = 0u; i < select(0u, SLICE, used); i += AT_ONCE) {
            // Lanes 0 to 3 load a vector of a query each, the others the next vector.
            var own = vec4<f32>(0.0);
            if (SHARES) { own = query(q[lane % 4u], slice + i + lane / 4u); }
            let at = i * KEY_STRIDE + across;
            let k0 = kv_unpack(keys[at]);
            let k1 = kv_unpack(keys[at + ACROSS]);
            #each 0..4 let q# = shared_query(own, #u, q[#], slice + i);
            #each 0..4 a# = fma(q#, k0, a#);
            #each 0..4 b# = fma(q#, k1, b#);
            if (AT_ONCE > 1u) {
                let next0 = kv_unpack(keys[at + KEY_STRIDE]);
                let next1 = kv_unpack(keys[at + KEY_STRIDE + ACROSS]);
                #each 0..4 let r# = shared_query(own, 4u + #u, q[#], slice + i + 1u);
                #each 0..4 a# = fma(r#, next0, a#);
                #each 0..4 b# = fma(r#, next1, b#);
            }
        }
    }
    return Scores(
        vec4<f32>(finish_score(a0), finish_score(a1), finish_score(a2), finish_score(a3)),
        vec4<f32>(finish_score(b0), finish_score(b1), finish_score(b2), finish_score(b3)),
    );
}

// The largest scores of the four tokens number `four`. `lane`: of a subgroup of 8, which has one `four`.
fn largest(four: u32, lane: u32) -> vec4<f32> {
    let at = four * (ACROSS / 8u);
    if (SHARES) { return shared_max(shared_max(maxima[at + lane % 4u], 1u), 2u); }
    return max(max(maxima[at], maxima[at + 1u]), max(maxima[at + 2u], maxima[at + 3u]));
}

// Which of four tokens, at these positions, see a key.
fn visible4(key: u32, pos: vec4<u32>) -> vec4<bool> {
    return vec4<bool>(visible(key, pos.x), visible(key, pos.y), visible(key, pos.z), visible(key, pos.w));
}

// Tokens of one slot, at most CHUNK_TOKENS: the first and the last one, and their smallest and largest position.
struct Run { first: u32, last: u32, pos_first: u32, pos_last: u32 }

// The tokens from `first` that are of one slot.
fn run_from(first: u32, end: u32) -> Run {
    let token = batch.tokens[first];
    var run = Run(first, first, token.position, token.position);
    while (run.last + 1u < end && batch.tokens[run.last + 1u].slot == token.slot) {
        run.last += 1u;
        let pos = batch.tokens[run.last].position;
        run.pos_first = min(run.pos_first, pos);
        run.pos_last = max(run.pos_last, pos);
    }
    return run;
}

// The four tokens number `four` of a run; numbers past the end repeat the last token.
fn tokens_of(run: Run, four: u32) -> vec4<u32> { return min(four_from(run.first + four * 4u), vec4<u32>(run.last)); }

// Computes one head of the tokens of a run.
fn attend(head: u32, run: Run, thread: u32) {
    let kv_head = head / (params.heads / params.kv_heads);
    let slot = batch.tokens[run.first].slot;
    let across = thread % ACROSS;
    let lane = thread % 8u;
    let scored = thread / ACROSS;
    let scored_tokens = tokens_of(run, scored);
    let pos = vec4<u32>(
        #each 0..4 batch.tokens[scored_tokens[#]].position,
    );
    let summed = thread / 16u % 8u;
    let summed_tokens = tokens_of(run, summed);
    let stores = four_from(run.first + summed * 4u) <= vec4<u32>(run.last);
    let out = summed_tokens * params.y_stride + head * params.head_vectors;
    let i_first = thread % 16u + thread / 128u * 16u;
    let vectors = select(0u, params.head_vectors, stores.x);
    let first_seen = first_block(run.pos_first);
    // The softmax over the blocks so far, of the tokens that this thread sums.
    var m = vec4<f32>(LOWEST);
    var l = vec4<f32>(0.0);
    for (var number = first_seen; number <= run.pos_last / KV_PAGE; number += 1u) {
        let start = number * KV_PAGE;
        let page = page_row(pages[page_entry(slot, number, params.slot_pages)], kv_head, params.kv_heads);
        let block = KeyBlock(page, min(KV_PAGE, run.pos_last + 1u - start));
        let q = scored_tokens * qkv_stride() + head * params.query_vectors;
        let found = block_scores(block, q, run.first + scored * 4u <= run.last, thread);
        let sees0 = visible4(start + across, pos);
        let sees1 = visible4(start + across + ACROSS, pos);
        let s0 = select(vec4<f32>(LOWEST), found.first, sees0);
        let s1 = select(vec4<f32>(LOWEST), found.second, sees1);
        find_largest(max(s0, s1), thread);
        let scored_m = largest(scored, lane);
        let at = scored * KV_PAGE + across;
        weights[at] = select(vec4<f32>(0.0), exp(s0 - scored_m), sees0);
        weights[at + ACROSS] = select(vec4<f32>(0.0), exp(s1 - scored_m), sees1);
        workgroupBarrier();
        let block_m = largest(summed, lane);
        let both = max(m, block_m);
        let f = exp(m - both);
        let g = exp(block_m - both);
        m = both;
        var block_l = vec4<f32>(0.0);
        // The lanes of a subgroup stay together, because they share weights.
        for (var i0 = i_first - lane; i0 < vectors; i0 += 32u) {
            let i = i0 + lane;
            let sums = block_sums(page, block.count, summed * KV_PAGE, min(i, params.head_vectors - 1u), lane);
            block_l = sums.l;
            if (i < vectors) {
                #each 0..4 if (stores[#]) { add_block(out[#] + i, f[#], sums.b# * g[#], number == first_seen); }
            }
        }
        l = fma(l, f, block_l * g);
    }
    let q = summed_tokens * qkv_stride() + head * params.query_vectors;
    for (var i = i_first; i < vectors; i += 32u) {
        #each 0..4 if (stores[#]) { y[out[#] + i] = y[out[#] + i] / l[#] * gate(q[#], i); }
    }
}

// Adds the sums of a block to those of earlier blocks, which are 0 at the first one.
fn add_block(at: u32, factor: f32, sum: vec4<f32>, is_first: bool) {
    y[at] = fma(select(y[at], vec4<f32>(0.0), is_first), vec4<f32>(factor), sum);
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
        let run = run_from(first, end);
        attend(head, run, thread);
        first = run.last + 1u;
    }
}
