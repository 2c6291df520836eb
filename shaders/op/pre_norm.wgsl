// The first half of a norm, for the tokens c of this run: with h = source[c], x_scaled[c] = h * g, and
// squares[c][i] = the sum of h^2 over 4 elements. The matvec family computes the second half, see norm_scale.wgsl.
// source, x_scaled [tokens, vectors]; g [vectors]; squares [tokens, vectors padded to a multiple of 32].
// A thread computes 4 elements.

#import vector
#import tokens

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = workgroup.x * THREADS + thread;
    let c = workgroup.y;
    if (i >= params.vectors || c >= batch.count) { return; }
    let v = source[c * params.vectors + i];
    x_scaled[c * params.vectors + i] = v * g[i];
    squares[c * ((params.vectors + 31u) & ~31u) + i] = square_sum(v);
}
