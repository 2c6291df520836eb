// For every column c of this run at position p = pos + c: query and key heads are normalised (optional RMSNorm over the
// head, before or after the next) and rotated (pairs k, k + rot/2 by the table's cos and sin at p), value heads are divided
// by their root mean square (optional), and keys and values are appended to the cache.
// qkv [columns, heads*query + 2*kv_heads*head vectors]; table [positions, rot/2] of (cos, sin); caches [kv_heads, positions,
// head vectors]. A thread takes 4 elements of the lower half and 4 of the upper half of a head, or two vectors of a value.
struct Params {
    heads: u32,
    kv_heads: u32,
    head_vectors: u32,  // vectors of 4 in a head, even
    rot_vectors: u32,   // vectors of 4 in half of the rotated part
    positions: u32,     // positions the caches hold
    eps: f32,
    qk_norm: u32,       // 0 = none, 1 = query and key heads are normalised first, 2 = last
    v_norm: u32,        // 1 = value heads are normalised
    query_vectors: u32, // vectors from one query head to the next
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ctl: Ctl;
@group(0) @binding(2) var<storage, read> table: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> q_norm: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> k_norm: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> qkv: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> k_cache: array<Kv4>;
@group(0) @binding(7) var<storage, read_write> v_cache: array<Kv4>;

// Cosines and sines of vector i of the rotated half.
struct Turn { cosine: vec4<f32>, sine: vec4<f32> }

fn turn(pos: u32, i: u32) -> Turn {
    let t = (pos * params.rot_vectors + i) * 2u;
    let a = table[t];
    let b = table[t + 1u];
    return Turn(vec4<f32>(a.x, a.z, b.x, b.z), vec4<f32>(a.y, a.w, b.y, b.w));
}

// The factor of the norm of the head at `base`; every thread sums the whole head in the same order. `turned`: of the head
// after its rotation, which multiplies the squares of a pair by cos^2 + sin^2.
fn head_scale(base: u32, pos: u32, turned: bool) -> f32 {
    var sum = 0.0;
    for (var i = 0u; i < params.head_vectors; i += 1u) {
        var v = qkv[base + i];
        if (turned && i < 2u * params.rot_vectors) {
            let t = turn(pos, i % params.rot_vectors);
            v *= sqrt(fma(t.cosine, t.cosine, t.sine * t.sine));
        }
        sum += square_sum(v);
    }
    return 1.0 / sqrt(fma(sum, 1.0 / f32(params.head_vectors * 4u), params.eps));
}

fn norm_weight(is_key: bool, i: u32) -> vec4<f32> {
    if (is_key) { return k_norm[i]; }
    return q_norm[i];
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let head = group.x;
    let c = group.y;
    if (c >= ctl.columns) { return; }
    let pos = ctl.pos + c;
    let queries = params.heads * params.query_vectors;
    let stride = queries + 2u * params.kv_heads * params.head_vectors;
    let in_column = select(queries + (head - params.heads) * params.head_vectors, head * params.query_vectors,
        head < params.heads);
    let base = c * stride + in_column;
    let is_value = head >= params.heads + params.kv_heads;
    let is_key = head >= params.heads && !is_value;
    let kv_head = head - params.heads - select(0u, params.kv_heads, is_value);
    let cache = (kv_head * params.positions + pos) * params.head_vectors;
    if (is_value) {
        var scale = 1.0;
        if (params.v_norm != 0u) { scale = head_scale(base, pos, false); }
        for (var i = thread; i < params.head_vectors; i += THREADS) {
            v_cache[cache + i] = kv_pack(qkv[base + i] * scale);
        }
        return;
    }
    var scale = 1.0;
    if (params.qk_norm != 0u) { scale = head_scale(base, pos, params.qk_norm == 2u); }
    // No thread may overwrite a head that another still sums.
    workgroupBarrier();
    for (var i = thread; i < params.head_vectors; i += THREADS) {
        let half = params.rot_vectors;
        // Every pair is done by the thread of its lower vector.
        let rotated = i < 2u * half;
        if (rotated && i >= half) { continue; }
        var low = qkv[base + i];
        var high = vec4<f32>(0.0);
        if (rotated) { high = qkv[base + i + half]; }
        if (params.qk_norm == 1u) {
            low *= norm_weight(is_key, i) * scale;
            if (rotated) { high *= norm_weight(is_key, i + half) * scale; }
        }
        if (rotated) {
            let t = turn(pos, i);
            let turned = fma(low, t.cosine, -(high * t.sine));
            high = fma(high, t.cosine, low * t.sine);
            low = turned;
        }
        if (params.qk_norm == 2u) {
            low *= norm_weight(is_key, i) * scale;
            if (rotated) { high *= norm_weight(is_key, i + half) * scale; }
        }
        if (is_key) {
            k_cache[cache + i] = kv_pack(low);
            if (rotated) { k_cache[cache + i + half] = kv_pack(high); }
        } else {
            qkv[base + i] = low;
            if (rotated) { qkv[base + i + half] = high; }
        }
    }
}
