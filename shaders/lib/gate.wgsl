// What a head reads is multiplied by sigmoid(gate) where a gate follows the query at `q`; vector i of it.
fn gate(q: u32, i: u32) -> vec4<f32> {
    let behind = params.query_vectors - params.head_vectors;
    let g = qkv[q + behind + i];
    // Past 87 exp overflows.
    let open = vec4<f32>(1.0) / (vec4<f32>(1.0) + exp(min(-g, vec4<f32>(87.0))));
    return select(open, vec4<f32>(1.0), behind == 0u);
}
