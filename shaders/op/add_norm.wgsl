// h[c] += y[c] * post / sqrt(mean(y[c]^2) + eps); then x[c] = h[c] * g / sqrt(mean(h[c]^2) + eps), for the columns c of this
// run. y, h, x [columns, vectors]; post, g [vectors]. A workgroup takes one column.
struct Params {
    vectors: u32,   // vectors of 4 in a column
    inv_cols: f32,  // 1 / number of elements under the norms
    eps: f32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ctl: Ctl;
@group(0) @binding(2) var<storage, read> y: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> post: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> g: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> h: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> x: array<vec4<f32>>;
var<workgroup> sums: array<f32, THREADS>;

// The factor of the norm, from every thread's sum of squares.
fn norm_factor(thread: u32, sum: f32) -> f32 {
    sums[thread] = sum;
    workgroupBarrier();
    var total = 0.0;
    for (var t = 0u; t < THREADS; t += 1u) {
        total += sums[t];
    }
    // The sums are used again.
    workgroupBarrier();
    return 1.0 / sqrt(fma(total, params.inv_cols, params.eps));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let c = group.x;
    if (c >= ctl.columns) { return; }
    let base = c * params.vectors;
    var sum = 0.0;
    for (var i = thread; i < params.vectors; i += THREADS) {
        sum += square_sum(y[base + i]);
    }
    let factor = norm_factor(thread, sum);
    sum = 0.0;
    for (var i = thread; i < params.vectors; i += THREADS) {
        let v = fma(y[base + i] * factor, post[i], h[base + i]);
        h[base + i] = v;
        sum += square_sum(v);
    }
    let scale = norm_factor(thread, sum);
    for (var i = thread; i < params.vectors; i += THREADS) {
        x[base + i] = h[base + i] * g[i] * scale;
    }
}
