// y as in matmul_glu.wgsl for the blocks of 4 outputs that `list` names; the other blocks are left as they are. list: blocks to
// compute, unused, where the blocks begin, 0, and from there every block of this segment, those to compute first. The
// others as in matmul_glu.wgsl.
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
@group(0) @binding(5) var<storage, read> list: array<u32>;
@group(0) @binding(6) var<storage, read> bias: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> y: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let entry = group.x * THREADS + thread;
    let column0 = group.y * 4u;
    if (entry >= list[0] || column0 >= ctl.columns) { return; }
    store_outputs(list[list[2] + entry] * 4u, column0);
}
