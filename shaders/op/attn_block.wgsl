// One block of 64 positions of attention for all query heads of one key-value head and one column: with s_j the scores,
// part = [max s, sum exp(s_j - max), 0, 0] followed by sum exp(s_j - max) * v_j, per column, head and block.
// qkv [columns, heads*query + 2*kv_heads*head vectors], queries rotated; caches [kv_heads, positions, head vectors];
// part [columns, heads, blocks, 1 + head vectors]. A workgroup takes one block.
struct Params {
    heads: u32,
    kv_heads: u32,
    head_vectors: u32,  // vectors of 4 in a head
    positions: u32,     // positions the caches hold
    blocks: u32,        // blocks that part holds for a head
    scale: f32,
    softcap: f32,       // 0 = none
    window: u32,        // positions a query sees, itself included; 0 = all
    query_vectors: u32, // vectors from one query head to the next
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ctl: Ctl;
@group(0) @binding(2) var<storage, read> qkv: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> k_cache: array<Kv4>;
@group(0) @binding(4) var<storage, read> v_cache: array<Kv4>;
@group(0) @binding(5) var<storage, read_write> part: array<vec4<f32>>;
const HEADS_AT_ONCE: u32 = 8u;
var<workgroup> weights: array<f32, 512>;
var<workgroup> maxima: array<f32, 8>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let number = group.x;
    let kv_head = group.y;
    let c = group.z;
    let pos = ctl.pos + c;
    let start = number * BLOCK;
    if (c >= ctl.columns || start > pos || number < first_block(pos)) { return; }
    let shared_by = params.heads / params.kv_heads;
    let key = start + thread;
    let sees = visible(key, pos);
    let cache = kv_head * params.positions;
    let k_row = (cache + min(key, pos)) * params.head_vectors;
    let count = min(BLOCK, pos + 1u - start);
    for (var h0 = 0u; h0 < shared_by; h0 += HEADS_AT_ONCE) {
        let some = min(HEADS_AT_ONCE, shared_by - h0);
        let head0 = kv_head * shared_by + h0;
        let stride = params.heads * params.query_vectors + 2u * params.kv_heads * params.head_vectors;
        let q0 = c * stride + head0 * params.query_vectors;
        for (var h = 0u; h < some; h += 1u) {
            let q = q0 + h * params.query_vectors;
            var acc = vec4<f32>(0.0);
            for (var i = 0u; i < params.head_vectors; i += 1u) {
                acc = fma(qkv[q + i], kv_unpack(k_cache[k_row + i]), acc);
            }
            weights[h * BLOCK + thread] = select(MASKED, finish_score(acc), sees);
        }
        workgroupBarrier();
        for (var h = 0u; h < some; h += 1u) {
            var m = MASKED;
            for (var j = 0u; j < count; j += 1u) {
                m = max(m, weights[h * BLOCK + j]);
            }
            if (thread == 0u) { maxima[h] = m; }
        }
        workgroupBarrier();
        for (var h = 0u; h < some; h += 1u) {
            let w = h * BLOCK + thread;
            weights[w] = select(0.0, exp(weights[w] - maxima[h]), sees);
        }
        workgroupBarrier();
        for (var item = thread; item < some * params.head_vectors; item += THREADS) {
            let h = item / params.head_vectors;
            let i = item % params.head_vectors;
            var acc = vec4<f32>(0.0);
            var l = 0.0;
            for (var j = 0u; j < count; j += 1u) {
                let w = weights[h * BLOCK + j];
                l += w;
                acc = fma(vec4<f32>(w), kv_unpack(v_cache[(cache + start + j) * params.head_vectors + i]), acc);
            }
            let out = ((c * params.heads + head0 + h) * params.blocks + number) * (1u + params.head_vectors);
            part[out + 1u + i] = acc;
            if (i == 0u) { part[out] = vec4<f32>(maxima[h], l, 0.0, 0.0); }
        }
        // The next heads reuse the workgroup's memory.
        workgroupBarrier();
    }
}
