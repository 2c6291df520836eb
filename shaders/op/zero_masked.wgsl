// y[c][i] = 0 if bit i of `bits` is 0, for the tokens c of this run. Bits are counted from the least significant one
// of each word.
// y [tokens, vectors]; bits [4*vectors / 32] words.
// A thread computes 4 elements.

#import tokens

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = workgroup.x * THREADS + thread;
    let c = workgroup.y;
    if (i >= params.vectors || c >= batch.count) { return; }
    let kept = vec4<u32>(bits[i >> 3u] >> ((i & 7u) * 4u)) & vec4<u32>(1u, 2u, 4u, 8u);
    let at = c * params.vectors + i;
    y[at] = select(vec4<f32>(0.0), y[at], kept != vec4<u32>(0u));
}
