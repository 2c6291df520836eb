// Products of 4 rows of one expert with up to 8 entries, whose activations can be anywhere in x. Sums are as in
// matmul_tile.wgsl. An entry is token * top_k + rank; moe_lists.wgsl lists the entries by expert.
// Needs: matmul.wgsl; `x` [tokens, 8*groups vectors], `lists`; params.tiles, .x_entries, .groups.

// Sums of four rows, for each entry of the tile.
struct TileSums {
    c0: vec4<f32>, c1: vec4<f32>, c2: vec4<f32>, c3: vec4<f32>,
    c4: vec4<f32>, c5: vec4<f32>, c6: vec4<f32>, c7: vec4<f32>,
}

// The vectors of x at which the activations of eight entries begin.
struct XStarts { x0: u32, x1: u32, x2: u32, x3: u32, x4: u32, x5: u32, x6: u32, x7: u32 }

// A tile: its expert, the first of its entries in the lists, and the number of its entries, 0 to 8.
struct ExpertTile { expert: u32, first: u32, count: u32 }

fn expert_tile(index: u32) -> ExpertTile {
    return ExpertTile(lists[3u * index], lists[3u * index + 1u], lists[3u * index + 2u]);
}

// The tile's entry number i; numbers past the end repeat the last entry.
fn entry_of(tile: ExpertTile, i: u32) -> u32 {
    return lists[3u * params.tiles + tile.first + min(i, tile.count - 1u)];
}

// The vector of x at which the tile's entry number i begins: x_entries consecutive entries share a row of x.
fn x_start(tile: ExpertTile, i: u32) -> u32 { return entry_of(tile, i) / params.x_entries * params.groups * 8u; }

// Adds the overlay of one row. row_unit: 1 in the component of this row, else 0.
fn overlay_tile(sums: TileSums, row: Row, row_unit: vec4<f32>, at: XStarts) -> TileSums {
    let range = overlay_range(row);
    var t = sums;
    for (var entry = range.x; entry < range.y; entry += 1u) {
        if (overlay_ends(entry)) { break; }
        let col = overlay_col(entry);
        let i = col >> 2u;
        let k = col & 3u;
        let change = row_unit * overlay_change(row, entry);
        t.c0 = fma(change, vec4<f32>(x[at.x0 + i][k]), t.c0);
        t.c1 = fma(change, vec4<f32>(x[at.x1 + i][k]), t.c1);
        t.c2 = fma(change, vec4<f32>(x[at.x2 + i][k]), t.c2);
        t.c3 = fma(change, vec4<f32>(x[at.x3 + i][k]), t.c3);
        t.c4 = fma(change, vec4<f32>(x[at.x4 + i][k]), t.c4);
        t.c5 = fma(change, vec4<f32>(x[at.x5 + i][k]), t.c5);
        t.c6 = fma(change, vec4<f32>(x[at.x6 + i][k]), t.c6);
        t.c7 = fma(change, vec4<f32>(x[at.x7 + i][k]), t.c7);
    }
    return t;
}

// The sums of four rows of a stacked tensor, row scales included.
fn tile_sums(rows: vec4<u32>, tensor: u32, tile: ExpertTile) -> TileSums {
    let opened = rows_open(rows);
    let at = XStarts(
        x_start(tile, 0u), x_start(tile, 1u), x_start(tile, 2u), x_start(tile, 3u),
        x_start(tile, 4u), x_start(tile, 5u), x_start(tile, 6u), x_start(tile, 7u),
    );
    var c0 = vec4<f32>(0.0);
    var c1 = vec4<f32>(0.0);
    var c2 = vec4<f32>(0.0);
    var c3 = vec4<f32>(0.0);
    var c4 = vec4<f32>(0.0);
    var c5 = vec4<f32>(0.0);
    var c6 = vec4<f32>(0.0);
    var c7 = vec4<f32>(0.0);
    for (var group = 0u; group < groups_of_run(); group += 1u) {
        let s = group_scales(opened, group);
        for (var j = 0u; j < 4u; j += 1u) {
            let w = load_weights(opened, tensor, group, j, s);
            let i = group * 8u + j * 2u;
            c0 = add_terms(c0, w, at.x0 + i);
            c1 = add_terms(c1, w, at.x1 + i);
            c2 = add_terms(c2, w, at.x2 + i);
            c3 = add_terms(c3, w, at.x3 + i);
            c4 = add_terms(c4, w, at.x4 + i);
            c5 = add_terms(c5, w, at.x5 + i);
            c6 = add_terms(c6, w, at.x6 + i);
            c7 = add_terms(c7, w, at.x7 + i);
        }
    }
    var t = TileSums(c0, c1, c2, c3, c4, c5, c6, c7);
    if (HAS_OVERLAY) {
        t = overlay_tile(t, opened.r0, vec4<f32>(1.0, 0.0, 0.0, 0.0), at);
        t = overlay_tile(t, opened.r1, vec4<f32>(0.0, 1.0, 0.0, 0.0), at);
        t = overlay_tile(t, opened.r2, vec4<f32>(0.0, 0.0, 1.0, 0.0), at);
        t = overlay_tile(t, opened.r3, vec4<f32>(0.0, 0.0, 0.0, 1.0), at);
    }
    let scale = row_scales(rows);
    return TileSums(
        t.c0 * scale, t.c1 * scale, t.c2 * scale, t.c3 * scale, t.c4 * scale, t.c5 * scale, t.c6 * scale, t.c7 * scale,
    );
}
