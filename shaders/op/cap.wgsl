// y[c] = cap * tanh(multiplier * y[c] / cap), or multiplier * y[c] if cap is 0, for the columns c of this run.
// y [columns, vectors]. A thread takes 4 elements.
struct Params {
    vectors: u32,     // vectors of 4 in a column
    multiplier: f32,
    cap: f32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ctl: Ctl;
@group(0) @binding(2) var<storage, read_write> y: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = group.x * THREADS + thread;
    if (i >= params.vectors || group.y >= ctl.columns) { return; }
    let at = group.y * params.vectors + i;
    let v = y[at] * params.multiplier;
    // Past 15, tanh is 1 to f32's last bit, and some drivers' tanh overflows.
    let bent = params.cap * tanh(clamp(v / params.cap, vec4<f32>(-15.0), vec4<f32>(15.0)));
    y[at] = select(bent, v, params.cap == 0.0);
}
