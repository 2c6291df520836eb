// 4 outputs and 4 columns of gate and up projections. Needs `x`, `bias` and `y`.
fn store(column: u32, first: u32, gate: vec4<f32>, up: vec4<f32>) {
    if (column >= ctl.columns) { return; }
    let all = vec4<u32>(first, first + 1u, first + 2u, first + 3u);
    let value = vec4<f32>(glu(gate.x, up.x), glu(gate.y, up.y), glu(gate.z, up.z), glu(gate.w, up.w));
    let i = column * params.y_stride + ((params.row0 + first) >> 2u);
    y[i] = select(vec4<f32>(0.0), value, all < vec4<u32>(params.part1));
}

// The four outputs from `first` on in the columns from column0 on.
fn store_outputs(first: u32, column0: u32) {
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
