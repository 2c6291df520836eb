// Products of 4 rows and 8 consecutive tokens.
// Needs: matmul.wgsl, stacked.wgsl, matmul_groups_all.wgsl or matmul_groups_masked.wgsl; `bias` [rows/4 vectors];
// params.rows, .row0, .has_bias, .groups; put(token, first, sums), which stores the four rows from `first` of one
// token.

// Sums of the first and the last four tokens, without row scales.
struct TileSums { first4: SumsOf4Tokens, last4: SumsOf4Tokens }

fn tile_sums(rows: vec4<u32>, token0: u32) -> TileSums {
    let opened = rows_open(rows);
    let tensor = tensor_of(rows.x);
    let stride = params.groups * 8u;
    let base = token0 * stride;
    var c0 = vec4<f32>(0.0);
    var c1 = vec4<f32>(0.0);
    var c2 = vec4<f32>(0.0);
    var c3 = vec4<f32>(0.0);
    var c4 = vec4<f32>(0.0);
    var c5 = vec4<f32>(0.0);
    var c6 = vec4<f32>(0.0);
    var c7 = vec4<f32>(0.0);
    for (var entry = 0u; entry < tile_groups(); entry += 1u) {
        let group = tile_group(entry);
        let s = group_scales(opened, group);
        for (var j = 0u; j < 4u; j += 1u) {
            let w = load_weights(opened, tensor, group, j, s);
            let i = base + group * 8u + j * 2u;
            c0 = add_terms(c0, w, i);
            c1 = add_terms(c1, w, i + stride);
            c2 = add_terms(c2, w, i + 2u * stride);
            c3 = add_terms(c3, w, i + 3u * stride);
            c4 = add_terms(c4, w, i + 4u * stride);
            c5 = add_terms(c5, w, i + 5u * stride);
            c6 = add_terms(c6, w, i + 6u * stride);
            c7 = add_terms(c7, w, i + 7u * stride);
        }
    }
    return TileSums(
        add_overlays(SumsOf4Tokens(c0, c1, c2, c3), opened, base),
        add_overlays(SumsOf4Tokens(c4, c5, c6, c7), opened, base + 4u * stride),
    );
}

// Computes the four rows from `first` for the eight tokens from token0, and calls `put` for each token.
fn put_rows(first: u32, token0: u32) {
    let rows = rows_from(first, params.rows - 1u);
    let t = tile_sums(rows, token0);
    let scale = row_scales(rows);
    let offset = bias[((params.row0 + first) >> 2u) * params.has_bias];
    put(token0, first, fma(t.first4.c0, scale, offset));
    put(token0 + 1u, first, fma(t.first4.c1, scale, offset));
    put(token0 + 2u, first, fma(t.first4.c2, scale, offset));
    put(token0 + 3u, first, fma(t.first4.c3, scale, offset));
    put(token0 + 4u, first, fma(t.last4.c0, scale, offset));
    put(token0 + 5u, first, fma(t.last4.c1, scale, offset));
    put(token0 + 6u, first, fma(t.last4.c2, scale, offset));
    put(token0 + 7u, first, fma(t.last4.c3, scale, offset));
}
