// y[p] = act((x[p] - mean) * factor * g + bias), for the pixels p of a frame; act is silu, or nothing.
// x, y [pixels, pixel_stride vectors]; stats [2, vectors]: means, then factors, of each channel's group; g, bias [vectors].
// A workgroup computes 64 pixels.

#import frame

fn activated(v: vec4<f32>) -> vec4<f32> {
    // exp overflows for arguments above 88. The result is negligible there.
    let bent = v / (1.0 + exp(min(-v, vec4<f32>(87.0))));
    return select(v, bent, params.silu == 1u);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first = workgroup.y * 64u;
    let pixels = min(64u, frame_rows() * params.width - min(first, frame_rows() * params.width));
    for (var n = thread; n < pixels * params.vectors; n += THREADS) {
        let i = n % params.vectors;
        let at = (first + n / params.vectors) * params.pixel_stride + i;
        let normed = (x[at] - stats[i]) * (stats[params.vectors + i] * g[i]);
        y[at] = activated(normed + bias[i]);
    }
}
