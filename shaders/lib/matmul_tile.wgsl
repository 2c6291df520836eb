// Products of 4 rows and 8 consecutive tokens.
// Needs: `bias` [rows/4 vectors]; params.rows, .row0, .has_bias, .groups; put(token, first, sums), which stores the
// four rows from `first` of one token. All lanes of a subgroup have to be active.

#import stacked
#import matmul
#import run_groups
#import groups

// Sums of the first and the last four tokens, without row scales.
struct TileSums { first4: SumsOf4Tokens, last4: SumsOf4Tokens }

fn tile_sums(rows: vec4<u32>, token0: u32, lane: u32) -> TileSums {
    let opened = rows_open(rows);
    let tensor = tensor_of(rows.x);
    let stride = params.groups * 8u;
    let base = token0 * stride;
    #each 0..8 var c# = vec4<f32>(0.0);
    // The factor 1 makes the bound depend on a storage buffer, see run_groups.wgsl.
    for (var entry = 0u; entry < group_count() * min(batch.count, 1u); entry += 1u) {
        let group = group_at(entry);
        let s = group_scales(opened, group);
        for (var j = 0u; j < 4u; j += 1u) {
            let w = load_weights(opened, tensor, group, j, s);
            let i = base + group * 8u + j * 2u;
            let own_p = own_x(i + lane * stride);
            let own_q = own_x(i + lane * stride + 1u);
            #each 0..8 let p# = shared_x(own_p, #u, i + #u * stride);
            #each 0..8 c# = add_terms(c#, w, p#, shared_x(own_q, #u, i + #u * stride + 1u));
        }
    }
    return TileSums(
        add_overlays(SumsOf4Tokens(c0, c1, c2, c3), opened, base),
        add_overlays(SumsOf4Tokens(c4, c5, c6, c7), opened, base + 4u * stride),
    );
}

// Computes the four rows from `first` for the eight tokens from token0, and calls `put` for each token.
// `lane`: of a subgroup of 8.
fn put_rows(first: u32, token0: u32, lane: u32) {
    let rows = rows_from(first, params.rows - 1u);
    let t = tile_sums(rows, token0, lane);
    let scale = row_scales(rows);
    let offset = bias[((params.row0 + first) >> 2u) * params.has_bias];
    #each 0..4 put(token0 + #u, first, fma(t.first4.c#, scale, offset));
    #each 0..4 put(token0 + 4u + #u, first, fma(t.last4.c#, scale, offset));
}
