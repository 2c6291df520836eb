// y[c][k] = x[c][k] * g[k] / sqrt(mean(x[c]^2) + eps) for the columns c of this run (RMSNorm).
// x [columns, vectors]; g [vectors]; y [columns, y_stride], from vector y_first of each. A workgroup takes one column.
struct Params {
    vectors: u32,   // vectors of 4 in a column
    inv_cols: f32,  // 1 / number of elements under the norm
    eps: f32,
    y_stride: u32,  // vectors of 4 from one column of y to the next
    y_first: u32,   // where in a column of y the result begins
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ctl: Ctl;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> g: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> y: array<vec4<f32>>;
var<workgroup> sums: array<f32, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let c = group.x;
    if (c >= ctl.columns) { return; }
    let base = c * params.vectors;
    var sum = 0.0;
    for (var i = thread; i < params.vectors; i += THREADS) {
        sum += square_sum(x[base + i]);
    }
    sums[thread] = sum;
    workgroupBarrier();
    var total = 0.0;
    for (var t = 0u; t < THREADS; t += 1u) {
        total += sums[t];
    }
    let scale = 1.0 / sqrt(fma(total, params.inv_cols, params.eps));
    for (var i = thread; i < params.vectors; i += THREADS) {
        y[c * params.y_stride + params.y_first + i] = x[base + i] * g[i] * scale;
    }
}
