// act(gate) * up; act(v) = v / (1 + exp(-v)) or 0.5 v (1 + tanh(sqrt(2/pi) (v + 0.044715 v^3))) = v / (1 + exp(-2 t)).
fn glu(gate: f32, up: f32) -> f32 {
    let bent = 1.5957691216057308 * fma(0.044715 * gate * gate, gate, gate);
    let t = select(gate, bent, params.gelu != 0u);
    // Below -87 exp overflows; the quotient is zero there to f32's last bit anyway.
    return gate / (1.0 + exp(min(-t, 87.0))) * up;
}
