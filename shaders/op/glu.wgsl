// y[c][k] = act(y[c][k]) * up[c][k] for the columns c of this run; act is silu or gelu_tanh.
// y, up [columns, vectors]. A thread takes 4 elements.
struct Params {
    vectors: u32,  // vectors of 4 in a column
    gelu: u32,     // 1 = gelu_tanh, 0 = silu
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ctl: Ctl;
@group(0) @binding(2) var<storage, read> up: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> y: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = group.x * THREADS + thread;
    if (at >= params.vectors || group.y >= ctl.columns) { return; }
    let i = group.y * params.vectors + at;
    let g = y[i];
    let u = up[i];
    y[i] = vec4<f32>(glu(g.x, u.x), glu(g.y, u.y), glu(g.z, u.z), glu(g.w, u.w));
}
