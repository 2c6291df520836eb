// h[c][k] = multiplier * w[id of token c][k], for the tokens c of this run whose id is in this segment of the table.
// w [rows, 32*groups]; h [tokens, 8*groups vectors].
// A thread computes 8 elements.

#import vector
#import weights
#import tokens
#import dtype

// Eight weights from column `first`, of which the overlay replaces some.
fn replace_by_overlay(row: Row, first: u32, weights: W8) -> W8 {
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
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let eight = workgroup.x * THREADS + thread;
    let c = workgroup.y;
    if (eight >= params.groups * 4u || c >= batch.count) { return; }
    let row = batch.tokens[c].id - params.row0;
    // An id below this segment wraps around to a large number.
    if (row >= params.rows) { return; }
    let group = eight >> 2u;
    let opened = row_open(row);
    let s = group_scale(opened, group) * row_scale(row);
    let w = prep_w(0u, group, eight & 3u, codes8(opened, group, eight & 3u));
    let i = c * params.groups * 8u + eight * 2u;
    let v = replace_by_overlay(opened, eight * 8u, W8(w.a * s, w.b * s));
    h[i] = v.a * params.multiplier;
    h[i + 1u] = v.b * params.multiplier;
}
