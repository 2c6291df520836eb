// y[c][r] = act(gate) * up for the columns c of this run, both a matmul of x with bias; act is silu or gelu_tanh.
// w [2*part1, 32*units] quantised: gate rows, then as many up rows; x [columns, 32*units]; bias; y [columns, 4*y_stride].
// A thread takes 4 outputs × 4 columns.
struct Params {
    rows: u32,      // rows stored in this segment, gate and up together
    units: u32,     // units of 32 columns in a row
    row0: u32,      // first output of this segment in y, a multiple of 4
    part1: u32,     // outputs of this segment: where its up rows begin
    part2: u32,     // unused third part
    y_stride: u32,  // vectors of 4 from one column of y to the next
    has_bias: u32,  // 0 = bias[0] is zero and stands for all
    bias_up: u32,   // where the up biases begin, a multiple of 4
    gelu: u32,      // 1 = gelu_tanh, 0 = silu
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> scales: array<u32>;
@group(0) @binding(3) var<storage, read> ctl: Ctl;
@group(0) @binding(4) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> bias: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> y: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first = (group.x * THREADS + thread) * 4u;
    let column0 = group.y * 4u;
    if (first >= params.part1 || column0 >= ctl.columns) { return; }
    store_outputs(first, column0);
}
