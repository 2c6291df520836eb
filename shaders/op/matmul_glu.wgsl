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

fn store(column: u32, first: u32, gate: vec4<f32>, up: vec4<f32>) {
    if (column >= ctl.columns) { return; }
    let all = vec4<u32>(first, first + 1u, first + 2u, first + 3u);
    let value = vec4<f32>(glu(gate.x, up.x), glu(gate.y, up.y), glu(gate.z, up.z), glu(gate.w, up.w));
    let i = column * params.y_stride + ((params.row0 + first) >> 2u);
    y[i] = select(vec4<f32>(0.0), value, all < vec4<u32>(params.part1));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first = (group.x * THREADS + thread) * 4u;
    let column0 = group.y * 4u;
    if (first >= params.part1 || column0 >= ctl.columns) { return; }
    let gate_rows = rows_from(first, params.part1 - 1u);
    let up_rows = gate_rows + vec4<u32>(params.part1);
    let gate = rows_open(gate_rows);
    let up = rows_open(up_rows);
    let stride = params.units * 8u;
    let base = column0 * stride;
    var g0 = vec4<f32>(0.0);
    var g1 = vec4<f32>(0.0);
    var g2 = vec4<f32>(0.0);
    var g3 = vec4<f32>(0.0);
    var u0 = vec4<f32>(0.0);
    var u1 = vec4<f32>(0.0);
    var u2 = vec4<f32>(0.0);
    var u3 = vec4<f32>(0.0);
    for (var unit = 0u; unit < units_of_run(); unit += 1u) {
        let gate_scales = unit_scales(gate, unit);
        let up_scales = unit_scales(up, unit);
        for (var j = 0u; j < 4u; j += 1u) {
            let i = base + unit * 8u + j * 2u;
            let g = block(gate, 0u, unit, j, gate_scales);
            g0 = column(g0, g, i);
            g1 = column(g1, g, i + stride);
            g2 = column(g2, g, i + 2u * stride);
            g3 = column(g3, g, i + 3u * stride);
            if (!APART) {
                let u = block(up, 1u, unit, j, up_scales);
                u0 = column(u0, u, i);
                u1 = column(u1, u, i + stride);
                u2 = column(u2, u, i + 2u * stride);
                u3 = column(u3, u, i + 3u * stride);
            }
        }
        // Where rows take many registers, all of it at once would take too many; apart, x is read twice.
        for (var j = 0u; j < select(0u, 4u, APART); j += 1u) {
            let i = base + unit * 8u + j * 2u;
            let u = block(up, 1u, unit, j, up_scales);
            u0 = column(u0, u, i);
            u1 = column(u1, u, i + stride);
            u2 = column(u2, u, i + 2u * stride);
            u3 = column(u3, u, i + 3u * stride);
        }
    }
    let g = overlaid(Four(g0, g1, g2, g3), gate, base);
    let u = overlaid(Four(u0, u1, u2, u3), up, base);
    let gs = row_scales(gate_rows);
    let us = row_scales(up_rows);
    let gate_bias = bias[((params.row0 + first) >> 2u) * params.has_bias];
    let up_bias = bias[((params.bias_up + params.row0 + first) >> 2u) * params.has_bias];
    store(column0, first, fma(g.c0, gs, gate_bias), fma(u.c0, us, up_bias));
    store(column0 + 1u, first, fma(g.c1, gs, gate_bias), fma(u.c1, us, up_bias));
    store(column0 + 2u, first, fma(g.c2, gs, gate_bias), fma(u.c2, us, up_bias));
    store(column0 + 3u, first, fma(g.c3, gs, gate_bias), fma(u.c3, us, up_bias));
}
