// y[c] = cap * tanh(multiplier * y[c] / cap), or multiplier * y[c] if cap is 0, for the tokens c of this run.
// y [tokens, vectors]. A thread computes 4 elements.

#import tokens

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = workgroup.x * THREADS + thread;
    if (i >= params.vectors || workgroup.y >= batch.count) { return; }
    let at = workgroup.y * params.vectors + i;
    let v = y[at] * params.multiplier;
    // tanh(15) is 1 in f32, and tanh overflows for larger arguments in some drivers.
    let capped = params.cap * tanh(clamp(v / params.cap, vec4<f32>(-15.0), vec4<f32>(15.0)));
    y[at] = select(capped, v, params.cap == 0.0);
}
