// Output gate of attention: sigmoid(gate), for vector i of the head whose query begins at vector q of `qkv`. The gate
// follows the query. Without a gate, when query_vectors = head_vectors, the result is 1.
// Needs: `qkv`; params.query_vectors, .head_vectors.
fn gate(q: u32, i: u32) -> vec4<f32> {
    let gate_offset = params.query_vectors - params.head_vectors;
    let g = qkv[q + gate_offset + i];
    // exp overflows for arguments above 88.
    let factor = vec4<f32>(1.0) / (vec4<f32>(1.0) + exp(min(-g, vec4<f32>(87.0))));
    return select(factor, vec4<f32>(1.0), gate_offset == 0u);
}
