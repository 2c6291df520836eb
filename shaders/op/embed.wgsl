// h[c][k] = multiplier * w[tokens[c]][k] for the columns c of this run whose token lies in this segment of the table.
// w [rows, 32*units] quantised; tokens [columns]; h [columns, 8*units vectors]. A thread takes 8 elements.
struct Params {
    rows: u32,        // rows stored in this segment
    units: u32,       // units of 32 columns in a row
    row0: u32,        // first token of this segment
    multiplier: f32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> scales: array<u32>;
@group(0) @binding(3) var<storage, read> ctl: Ctl;
@group(0) @binding(4) var<storage, read> tokens: array<u32>;
@group(0) @binding(5) var<storage, read_write> h: array<vec4<f32>>;

// Eight weights from column `first`, those that the overlay names replaced by its values.
fn overlaid(row: Row, first: u32, weights: W8) -> W8 {
    var w = weights;
    if (HAS_OVERLAY) {
        let range = overlay_range(row);
        var low = range.x;
        var high = range.y;
        while (low < high) {
            let middle = (low + high) >> 1u;
            if (overlay_col(middle) < first) { low = middle + 1u; } else { high = middle; }
        }
        for (; low < range.y; low += 1u) {
            let at = overlay_col(low) - first;
            if (at >= 8u) { break; }
            let value = vec4<f32>(overlay_value(low));
            w.a = select(w.a, value, vec4<u32>(at) == vec4<u32>(0u, 1u, 2u, 3u));
            w.b = select(w.b, value, vec4<u32>(at) == vec4<u32>(4u, 5u, 6u, 7u));
        }
    }
    return w;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let eight = group.x * THREADS + thread;
    let c = group.y;
    if (eight >= params.units * 4u || c >= ctl.columns) { return; }
    let row = tokens[c] - params.row0;
    // A token below this segment wraps to a huge row.
    if (row >= params.rows) { return; }
    let unit = eight >> 2u;
    let opened = row_open(row);
    let s = unit_scale(opened, unit) * row_scale(row);
    let w = prep_w(0u, unit, eight & 3u, codes8(opened, unit, eight & 3u));
    let i = c * params.units * 8u + eight * 2u;
    let v = overlaid(opened, eight * 8u, W8(w.a * s, w.b * s));
    h[i] = v.a * params.multiplier;
    h[i + 1u] = v.b * params.multiplier;
}
