// One block of 64 positions of attention for one of the query heads that `list` names and one column: what attn_block.wgsl
// makes of that head, to the bit; the records of other heads are left as they are. list: heads to attend, unused, unused,
// unused, then every head, those to attend first. The others as in attn_block.wgsl. A workgroup takes one block of one head.
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
@group(0) @binding(5) var<storage, read> list: array<u32>;
@group(0) @binding(6) var<storage, read_write> part: array<vec4<f32>>;
var<workgroup> weights: array<f32, BLOCK>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let number = group.x;
    let c = group.z;
    let pos = ctl.pos + c;
    let start = number * BLOCK;
    if (group.y >= list[0] || c >= ctl.columns || start > pos || number < first_block(pos)) { return; }
    // Not by uniforms alone: there is a column.
    let head_vectors = params.head_vectors * min(ctl.columns, 1u);
    let head = list[4u + group.y];
    let cache = head / (params.heads / params.kv_heads) * params.positions;
    let key = start + thread;
    let sees = visible(key, pos);
    let k_row = (cache + min(key, pos)) * head_vectors;
    let count = min(BLOCK, pos + 1u - start);
    let stride = params.heads * params.query_vectors + 2u * params.kv_heads * head_vectors;
    let q = c * stride + head * params.query_vectors;
    var products = vec4<f32>(0.0);
    for (var i = 0u; i < head_vectors; i += 1u) {
        products = fma(qkv[q + i], kv_unpack(k_cache[k_row + i]), products);
    }
    let score = select(MASKED, finish_score(products), sees);
    weights[thread] = score;
    workgroupBarrier();
    var m = MASKED;
    for (var j = 0u; j < count; j += 1u) {
        m = max(m, weights[j]);
    }
    // No thread may overwrite a score that another still reads.
    workgroupBarrier();
    weights[thread] = select(0.0, exp(score - m), sees);
    workgroupBarrier();
    for (var i = thread; i < head_vectors; i += THREADS) {
        var acc = vec4<f32>(0.0);
        var l = 0.0;
        for (var j = 0u; j < count; j += 1u) {
            let w = weights[j];
            l += w;
            acc = fma(vec4<f32>(w), kv_unpack(v_cache[(cache + start + j) * head_vectors + i]), acc);
        }
        let out = ((c * params.heads + head) * params.blocks + number) * (1u + head_vectors);
        part[out + 1u + i] = acc;
        if (i == 0u) { part[out] = vec4<f32>(m, l, 0.0, 0.0); }
    }
}
