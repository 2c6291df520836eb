// y[c][head] = softmax(q . k * scale) * v over all tokens of this run, for each of its tokens c.
// qkv [tokens, qkv_stride vectors]: query heads, key heads, value heads; consecutive query heads share a key-value
// head; y [tokens, y_stride vectors].
// Keys are summed in blocks of KV_PAGE tokens. The sums so far and those of the next block are brought to a common
// maximum, so no matrix of all scores exists.
// A workgroup computes FULL_QUERIES tokens of one head, and FULL_VECTORS vectors of their results: of a longer head,
// several workgroups compute the same scores. For the scores, thread t has the queries 4 (t / 16) to + 3 and the keys
// t % 16 + 16n. For the softmax it has query t / 4 and a quarter of the block. For the sums it has the same queries as
// for the scores and the vectors t % 16 and t % 16 + 16.

#import vector
#import tokens

// Scores, then weights, of each query.
var<workgroup> weights: array<f32, FULL_QUERIES * KV_PAGE>;
// The largest score of a quarter of a block, and the sum of weights.
var<workgroup> quarter_max: array<f32, THREADS>;
var<workgroup> quarter_sum: array<f32, THREADS>;
// For each query: the largest score so far, the sum of weights, and the factor of the sums so far.
var<workgroup> largest: array<f32, FULL_QUERIES>;
var<workgroup> total: array<f32, FULL_QUERIES>;
var<workgroup> factor: array<f32, FULL_QUERIES>;

fn add_dot(a: vec4<f32>, b: vec4<f32>, sum: f32) -> f32 {
    return fma(a.x, b.x, fma(a.y, b.y, fma(a.z, b.z, fma(a.w, b.w, sum))));
}

// The largest of four values of a query's quarters.
fn max_of_quarters(query: u32) -> f32 {
    let i = query * 4u;
    return max(max(quarter_max[i], quarter_max[i + 1u]), max(quarter_max[i + 2u], quarter_max[i + 3u]));
}

// The scores of the queries from `first_query` and of the block from `start`.
fn score_block(thread: u32, first_query: u32, head: u32, start: u32) {
    let last = batch.count - 1u;
    let query = thread / 16u * 4u;
    let key = thread % 16u;
    let kv_head = params.heads + head / (params.heads / params.kv_heads);
    #each 0..4 let q# = min(first_query + query + #u, last) * params.qkv_stride + head * params.head_vectors;
    #each 0..4 let k# = min(start + key + 16u * #u, last) * params.qkv_stride + kv_head * params.head_vectors;
    #each 0..4 var s# = vec4<f32>(0.0);
    for (var i = 0u; i < params.head_vectors; i += 1u) {
        #each 0..4 let key# = qkv[k# + i];
        #each 0..4 let query# = qkv[q# + i];
        #each 0..4 s# = vec4<f32>(add_dot(query#, key0, s#.x), add_dot(query#, key1, s#.y), add_dot(query#, key2, s#.z), add_dot(query#, key3, s#.w));
    }
    let keys = vec4<u32>(start + key) + vec4<u32>(0u, 16u, 32u, 48u);
    // All threads have read the weights of the block before.
    workgroupBarrier();
    #each 0..4 let scores# = select(vec4<f32>(LOWEST), s# * params.scale, keys <= vec4<u32>(last));
    #each 0..4 weights[query * KV_PAGE + key + #u * 16u] = scores0[#];
    #each 0..4 weights[(query + 1u) * KV_PAGE + key + #u * 16u] = scores1[#];
    #each 0..4 weights[(query + 2u) * KV_PAGE + key + #u * 16u] = scores2[#];
    #each 0..4 weights[(query + 3u) * KV_PAGE + key + #u * 16u] = scores3[#];
    workgroupBarrier();
}

// Turns scores into weights, relative to the largest score so far.
fn weigh_block(thread: u32, start: u32) {
    let query = thread / 4u;
    let first = thread % 4u * 16u;
    var m = LOWEST;
    for (var j = first; j < first + 16u; j += 1u) {
        m = max(m, weights[query * KV_PAGE + j]);
    }
    quarter_max[thread] = m;
    workgroupBarrier();
    let before = largest[query];
    let top = max(before, max_of_quarters(query));
    var sum = 0.0;
    for (var j = first; j < first + 16u; j += 1u) {
        let i = query * KV_PAGE + j;
        let w = select(0.0, exp(weights[i] - top), start + j < batch.count);
        weights[i] = w;
        sum += w;
    }
    quarter_sum[thread] = sum;
    workgroupBarrier();
    if (thread % 4u == 0u) {
        let rescale = exp(before - top);
        let block = (sum + quarter_sum[thread + 1u]) + (quarter_sum[thread + 2u] + quarter_sum[thread + 3u]);
        largest[query] = top;
        factor[query] = rescale;
        total[query] = fma(total[query], rescale, block);
    }
    workgroupBarrier();
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let slices = (params.head_vectors + FULL_VECTORS - 1u) / FULL_VECTORS;
    let head = workgroup.x / slices;
    let first_query = workgroup.y * FULL_QUERIES;
    if (first_query >= batch.count) { return; }
    let value_head = params.heads + params.kv_heads + head / (params.heads / params.kv_heads);
    // Vectors past the end of the head are never stored; they read vector 0 instead.
    let vector0 = workgroup.x % slices * FULL_VECTORS + thread % 16u;
    let vector1 = vector0 + 16u;
    let has0 = vector0 < params.head_vectors;
    let has1 = vector1 < params.head_vectors;
    let values = value_head * params.head_vectors;
    let at0 = values + select(0u, vector0, has0);
    let at1 = values + select(0u, vector1, has1);
    let query = thread / 16u * 4u;
    if (thread < FULL_QUERIES) {
        largest[thread] = LOWEST;
        total[thread] = 0.0;
    }
    #each 0..4 var a# = vec4<f32>(0.0);
    #each 0..4 var b# = vec4<f32>(0.0);
    for (var start = 0u; start < batch.count; start += KV_PAGE) {
        score_block(thread, first_query, head, start);
        weigh_block(thread, start);
        #each 0..4 a# *= factor[query + #u];
        #each 0..4 b# *= factor[query + #u];
        let count = min(KV_PAGE, batch.count - start);
        for (var j = 0u; j < count; j += 1u) {
            let row = (start + j) * params.qkv_stride;
            let v0 = qkv[row + at0];
            let v1 = qkv[row + at1];
            #each 0..4 let w# = vec4<f32>(weights[(query + #u) * KV_PAGE + j]);
            #each 0..4 a# = fma(w#, v0, a#);
            #each 0..4 b# = fma(w#, v1, b#);
        }
    }
    let out = (first_query + query) * params.y_stride + head * params.head_vectors;
    let left = batch.count - first_query - min(query, batch.count - first_query);
    #each 0..4 if (#u < left && has0) { y[out + #u * params.y_stride + vector0] = a# / total[query + #u]; }
    #each 0..4 if (#u < left && has1) { y[out + #u * params.y_stride + vector1] = b# / total[query + #u]; }
}
