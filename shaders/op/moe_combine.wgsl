// h[c] += sum_rank weight * parts[c][rank] + shared weight * shared_y[c] for the columns c of this run, in that order.
// routes as moe_route.wgsl leaves them; parts [columns, top_k, vectors]; shared_y, h [columns, vectors]. A thread takes 4
// elements.
struct Params {
    vectors: u32,  // vectors of 4 in a column
    top_k: u32,    // experts of a column
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ctl: Ctl;
@group(0) @binding(2) var<storage, read> routes: array<u32>;
@group(0) @binding(3) var<storage, read> parts: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> shared_y: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> h: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = group.x * THREADS + thread;
    let c = group.y;
    if (i >= params.vectors || c >= ctl.columns) { return; }
    let at = c * (params.top_k + 1u) * 2u + 1u;
    // A bound that depends on more than uniforms.
    let ranks = params.top_k * min(ctl.columns, 1u);
    var sum = vec4<f32>(0.0);
    for (var rank = 0u; rank < ranks; rank += 1u) {
        let weight = bitcast<f32>(routes[at + 2u * rank]);
        sum = fma(vec4<f32>(weight), parts[(c * params.top_k + rank) * params.vectors + i], sum);
    }
    let weight = bitcast<f32>(routes[at + 2u * ranks]);
    let own = c * params.vectors + i;
    // A layer without a shared expert has a weight of 0.
    h[own] += select(sum, fma(vec4<f32>(weight), shared_y[own], sum), weight != 0.0);
}
