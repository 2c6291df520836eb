// Softmax attention in blocks of KV_PAGE positions. Every attention kernel sums within a block in order of positions,
// then adds block after block. A token's result therefore does not depend on the kernel, on how a prompt is split, or
// on the length of the context.
// Needs: params.scale, .softcap, .window, .heads, .kv_heads, .head_vectors, .query_vectors.

#import vector
#import tokens

// The score q · k * scale, with the soft cap if there is one. `products`: the sum of products, one for each component.
fn finish_score(products: vec4<f32>) -> f32 {
    let s = horizontal(products) * params.scale;
    // tanh(15) is 1 in f32, and tanh overflows for larger arguments in some drivers.
    let capped = params.softcap * tanh(clamp(s / params.softcap, -15.0, 15.0));
    return select(capped, s, params.softcap == 0.0);
}

// Whether a query at `pos` sees the key at `key`.
fn visible(key: u32, pos: u32) -> bool {
    return key <= pos && (params.window == 0u || key + params.window > pos);
}

// The first block that a query at `pos` sees.
fn first_block(pos: u32) -> u32 {
    if (params.window == 0u || pos < params.window) { return 0u; }
    return (pos + 1u - params.window) / KV_PAGE;
}

// Vectors of 4 from one token of `qkv` to the next.
fn qkv_stride() -> u32 { return params.heads * params.query_vectors + 2u * params.kv_heads * params.head_vectors; }

// The softmax over the blocks so far: largest score m, and l = sum exp(score - m).
struct Running { m: f32, l: f32 }

// Factors that bring the sums so far and the sums of the next block to a common maximum. Arguments: the two maxima.
fn join_factors(before: f32, block: f32) -> vec2<f32> {
    let m = max(before, block);
    return vec2<f32>(exp(before - m), exp(block - m));
}
