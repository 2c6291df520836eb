// Prepares queries, keys and values of every token c of this run, at position p of its sequence:
//   query and key heads are rotated: elements k and k + rot/2 are a pair, with cosine and sine in `table` at p;
//   an RMSNorm of the head may come before or after the rotation;
//   value heads are divided by their root mean square, if v_norm is 1;
//   keys and values are stored in the cache, queries in place.
// qkv [tokens, heads*query + 2*kv_heads*head vectors]; table [positions, rot/2] of (cos, sin);
// q_norm, k_norm [head vectors]; caches and pages as in tokens.wgsl.
// A workgroup computes one head of a token. A thread computes vectors of the lower half of it, with their pairs.

#import vector
#import tokens
#import kv

// Cosines and sines of four pairs.
struct Rotation { cosine: vec4<f32>, sine: vec4<f32> }

// The rotation of the pairs of vector i at a position.
fn rotation(pos: u32, i: u32) -> Rotation {
    let t = (pos * params.rot_vectors + i) * 2u;
    let a = table[t];
    let b = table[t + 1u];
    return Rotation(vec4<f32>(a.x, a.z, b.x, b.z), vec4<f32>(a.y, a.w, b.y, b.w));
}

// The factor of the norm of the head at vector `base`. Every thread sums the whole head in the same order. If the
// norm comes after the rotation, the squares of a pair are multiplied by cos^2 + sin^2, because `table` may have a
// scale.
fn head_scale(base: u32, pos: u32, after_rotation: bool) -> f32 {
    var sum = 0.0;
    for (var i = 0u; i < params.head_vectors; i += 1u) {
        var v = qkv[base + i];
        if (after_rotation && i < 2u * params.rot_vectors) {
            let t = rotation(pos, i % params.rot_vectors);
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
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let head = workgroup.x;
    let c = workgroup.y;
    if (c >= batch.count) { return; }
    let token = batch.tokens[c];
    let pos = token.position;
    let queries = params.heads * params.query_vectors;
    let stride = queries + 2u * params.kv_heads * params.head_vectors;
    let in_token = select(queries + (head - params.heads) * params.head_vectors, head * params.query_vectors,
        head < params.heads);
    let base = c * stride + in_token;
    let is_value = head >= params.heads + params.kv_heads;
    let is_key = head >= params.heads && !is_value;
    let kv_head = head - params.heads - select(0u, params.kv_heads, is_value);
    let entry = page_entry(token.slot, pos / KV_PAGE, params.slot_pages);
    let row = page_row(pages[entry], kv_head, params.kv_heads) + pos % KV_PAGE;
    let cache = row * params.head_vectors;
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
    // All threads have summed the head before any of them changes it.
    workgroupBarrier();
    for (var i = thread; i < params.head_vectors; i += THREADS) {
        let half = params.rot_vectors;
        // The thread of the lower vector computes both vectors of a pair.
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
            let t = rotation(pos, i);
            let rotated_low = fma(low, t.cosine, -(high * t.sine));
            high = fma(high, t.cosine, low * t.sine);
            low = rotated_low;
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
