// Mean and sum of squares around it of every channel, for each row of pixels.
// x [pixels, pixel_stride vectors]; partials [rows of the whole image, 2, vectors]: means, then sums of squares.
// A workgroup computes 16 vectors of channels of one row: thread t has vector t % 16 and every fourth pixel from t / 16.

#import frame

var<workgroup> sums: array<vec4<f32>, THREADS>;

// The sum of what the four threads of a vector pass.
fn sum_of_four(thread: u32, sum: vec4<f32>) -> vec4<f32> {
    sums[thread] = sum;
    workgroupBarrier();
    let i = thread % 16u;
    let all = (sums[i] + sums[i + 16u]) + (sums[i + 32u] + sums[i + 48u]);
    // The next sum writes `sums` again.
    workgroupBarrier();
    return all;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = workgroup.y;
    if (row >= frame_rows()) { return; }
    let i = workgroup.x * 16u + thread % 16u;
    // Vectors past the last are never stored.
    let vector = min(i, params.vectors - 1u);
    let base = row * params.width * params.pixel_stride + vector;
    var sum = vec4<f32>(0.0);
    for (var p = thread / 16u; p < params.width; p += 4u) {
        sum += x[base + p * params.pixel_stride];
    }
    let mean = sum_of_four(thread, sum) / f32(params.width);
    sum = vec4<f32>(0.0);
    for (var p = thread / 16u; p < params.width; p += 4u) {
        let v = x[base + p * params.pixel_stride] - mean;
        sum = fma(v, v, sum);
    }
    let squares = sum_of_four(thread, sum);
    if (thread >= 16u || i >= params.vectors) { return; }
    let at = (first_row() + row) * 2u * params.vectors + i;
    partials[at] = mean;
    partials[at + params.vectors] = squares;
}
