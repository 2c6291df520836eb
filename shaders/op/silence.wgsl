// y[c][i] = 0 where bit i of `bits`, least significant first, is 0. y [columns, 4*vectors]. A thread takes 4 elements.
struct Params {
    vectors: u32,  // vectors of 4 in a column
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ctl: Ctl;
@group(0) @binding(2) var<storage, read> bits: array<u32>;
@group(0) @binding(3) var<storage, read_write> y: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = group.x * THREADS + thread;
    let c = group.y;
    if (i >= params.vectors || c >= ctl.columns) { return; }
    let four = vec4<u32>(bits[i >> 3u] >> ((i & 7u) * 4u)) & vec4<u32>(1u, 2u, 4u, 8u);
    let at = c * params.vectors + i;
    y[at] = select(vec4<f32>(0.0), y[at], four != vec4<u32>(0u));
}
