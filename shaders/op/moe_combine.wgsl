// h[c] += sum_rank weight[rank] * expert_y[c][rank] + shared weight * shared_y[c], summed in this order, for the
// tokens c of this run.
// routes as moe_route.wgsl writes them; expert_y [tokens, top_k, vectors]; shared_y, h [tokens, vectors].
// A thread computes 4 elements.

#import tokens

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = workgroup.x * THREADS + thread;
    let c = workgroup.y;
    if (i >= params.vectors || c >= batch.count) { return; }
    let at = c * (params.top_k + 1u) * 2u + 1u;
    // The factor 1 makes the bound depend on a storage buffer, see run_groups.wgsl.
    let ranks = params.top_k * min(batch.count, 1u);
    var sum = vec4<f32>(0.0);
    for (var rank = 0u; rank < ranks; rank += 1u) {
        let weight = bitcast<f32>(routes[at + 2u * rank]);
        sum = fma(vec4<f32>(weight), expert_y[(c * params.top_k + rank) * params.vectors + i], sum);
    }
    let weight = bitcast<f32>(routes[at + 2u * ranks]);
    let own = c * params.vectors + i;
    // The weight is 0 in a layer without a shared expert. Then shared_y, which may contain NaN, must not be used.
    h[own] += select(sum, fma(vec4<f32>(weight), shared_y[own], sum), weight != 0.0);
}
