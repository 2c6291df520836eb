// y[p][r] = sum over taps t and inputs k of w[r][t][k] * x[p + t][k] + bias[r], for the pixels p of some rows of an
// image; added to y if `adds` is 1. Taps are the side * side pixels around p, row by row; pixels outside of the image
// are 0. If `doubled` is 1, each pixel of x stands for 2 * 2 pixels.
// w [rows, side * side taps, 32*tap_groups]; x [pixels, 32*tap_groups]; bias [rows]; y [pixels, y_stride vectors].
// Weights are f32, f16 or bf16: types without overlays.
// A thread computes 4 rows and 8 consecutive pixels: thread t of a workgroup rows 4 (t % 16) of its CONV_ROWS, and
// pixels 8 (t / 16) of its CONV_PIXELS. Each sum is one chain, over taps and then inputs.

#import matmul
#import frame

// The place of a pixel outside of the image.
const OUTSIDE: u32 = 0xffffffffu;

// The vector of x at which the pixel under a tap begins. The pixel is number p of the frame.
fn place(p: u32, dy: u32, dx: u32) -> u32 {
    let middle = params.side >> 1u;
    // Coordinates below 0 wrap around to large numbers.
    let row = first_row() + p / params.width + dy - middle;
    let column = p % params.width + dx - middle;
    let source = ((row >> params.doubled) - held_row()) * (params.width >> params.doubled) + (column >> params.doubled);
    let inside = row < image_height() && column < params.width && p < frame_rows() * params.width;
    return select(OUTSIDE, source * params.tap_groups * 8u, inside);
}

// Adds eight columns, from vector `offset` of the pixel at `at`.
fn add_pixel(sum: vec4<f32>, w: Weights4x8, at: u32, offset: u32) -> vec4<f32> {
    let inside = at != OUTSIDE;
    let i = select(0u, at + offset, inside);
    return select(sum, add_terms(sum, w, x[i], x[i + 1u]), inside);
}

fn put(p: u32, first: u32, sums: vec4<f32>) {
    if (p >= frame_rows() * params.width) { return; }
    let i = p * params.y_stride + ((params.row0 + first) >> 2u);
    let value = select(vec4<f32>(0.0), sums, four_from(first) < vec4<u32>(params.rows));
    y[i] = value + select(vec4<f32>(0.0), y[i], params.adds == 1u);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first = workgroup.x * CONV_ROWS + thread % 16u * 4u;
    let p = workgroup.y * CONV_PIXELS + thread / 16u * 8u;
    if (first >= params.rows || p >= frame_rows() * params.width) { return; }
    let rows = rows_from(first, params.rows - 1u);
    let opened = rows_open(rows);
    #each 0..8 var c# = vec4<f32>(0.0);
    // The factor 1 makes the bound depend on a storage buffer, see run_groups.wgsl.
    let taps = params.side * params.side * min(frame_rows(), 1u);
    for (var tap = 0u; tap < taps; tap += 1u) {
        let dy = tap / params.side;
        let dx = tap % params.side;
        #each 0..8 let p# = place(p + #u, dy, dx);
        for (var i = 0u; i < params.tap_groups; i += 1u) {
            let group = tap * params.tap_groups + i;
            let s = group_scales(opened, group);
            for (var j = 0u; j < 4u; j += 1u) {
                let w = load_weights(opened, 0u, group, j, s);
                let offset = i * 8u + j * 2u;
                #each 0..8 c# = add_pixel(c#, w, p#, offset);
            }
        }
    }
    let scale = row_scales(rows);
    let offset = bias[(params.row0 + first) >> 2u];
    #each 0..8 put(p + #u, first, fma(c#, scale, offset));
}
