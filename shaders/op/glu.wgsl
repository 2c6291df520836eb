// y[c] = act(y[c]) * up[c], for the tokens c of this run; act is silu or gelu_tanh.
// y, up [tokens, vectors]. A thread computes 4 elements.

#import tokens
#import glu

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = workgroup.x * THREADS + thread;
    if (at >= params.vectors || workgroup.y >= batch.count) { return; }
    let i = workgroup.y * params.vectors + at;
    let g = y[i];
    let u = up[i];
    y[i] = vec4<f32>(glu(g.x, u.x), glu(g.y, u.y), glu(g.z, u.z), glu(g.w, u.w));
}
