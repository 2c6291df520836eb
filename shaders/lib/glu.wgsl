// act(gate) * up, where act is silu(v) = v / (1 + exp(-v)), or if params.gelu is 1
// gelu_tanh(v) = 0.5 v (1 + tanh(t)) = v / (1 + exp(-2 t)) with t = sqrt(2/pi) (v + 0.044715 v^3).
// Needs: params.gelu.
fn glu(gate: f32, up: f32) -> f32 {
    let gelu_argument = 1.5957691216057308 * fma(0.044715 * gate * gate, gate, gate);
    let t = select(gate, gelu_argument, params.gelu != 0u);
    // exp overflows for arguments above 88. The result is negligible there.
    return gate / (1.0 + exp(min(-t, 87.0))) * up;
}
