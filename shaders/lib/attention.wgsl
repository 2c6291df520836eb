// Attention is summed in blocks of BLOCK positions: within a block in order, then block after block. Every kernel does it
// in this order, so a column's result does not depend on the kernel, the split or the context's length.
const BLOCK: u32 = 64u;
// Below every score; a finite stand-in for -infinity, which fast math may not honour.
const MASKED: f32 = -3.0e38;

// A score after scale and soft cap, from the sum of products.
fn finish_score(products: vec4<f32>) -> f32 {
    let s = horizontal(products) * params.scale;
    // Past 15, tanh is 1 to f32's last bit, and some drivers' tanh overflows.
    let bent = params.softcap * tanh(clamp(s / params.softcap, -15.0, 15.0));
    return select(bent, s, params.softcap == 0.0);
}

// Whether a query at `pos` sees the key at `key`.
fn visible(key: u32, pos: u32) -> bool {
    return key <= pos && (params.window == 0u || key + params.window > pos);
}

// The first block that a query at `pos` sees.
fn first_block(pos: u32) -> u32 {
    if (params.window == 0u || pos < params.window) { return 0u; }
    return (pos + 1u - params.window) / BLOCK;
}

// The running softmax of the blocks so far: maximum, sum of weights.
struct Running { m: f32, l: f32 }

// The factors of the old and the new part when a block with maximum m joins.
fn join_factors(before: f32, block: f32) -> vec2<f32> {
    let m = max(before, block);
    return vec2<f32>(exp(before - m), exp(block - m));
}
