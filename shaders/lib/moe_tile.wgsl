// Products of 4 rows of one expert with up to 8 entries, whose activations can be anywhere in x. Sums are as in
// matmul_tile.wgsl. An entry is token * top_k + rank; moe_lists.wgsl lists the entries by expert.
// Needs: `x` [tokens, 8*groups vectors], `lists`; params.tiles, .x_entries, .groups.

#import matmul
#import run_groups
#import experts

// Sums of four rows, for each entry of the tile.
struct TileSums {
    #each 0..8 c#: vec4<f32>,
}

// The vectors of x at which the activations of eight entries begin.
struct XStarts {
    #each 0..8 x#: u32,
}

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
        #each 0..8 t.c# = fma(change, vec4<f32>(x[at.x# + i][k]), t.c#);
    }
    return t;
}

// The sums of four rows of a stacked tensor, row scales included. `lane`: of a subgroup of 8, whose lanes are all active.
fn tile_sums(rows: vec4<u32>, tensor: u32, tile: ExpertTile, lane: u32) -> TileSums {
    let own = x_start(tile, lane);
    let opened = rows_open(rows);
    let at = XStarts(
        #each 0..8 x_start(tile, #u),
    );
    #each 0..8 var c# = vec4<f32>(0.0);
    for (var group = 0u; group < groups_of_run(); group += 1u) {
        let s = group_scales(opened, group);
        for (var j = 0u; j < 4u; j += 1u) {
            let w = load_weights(opened, tensor, group, j, s);
            let i = group * 8u + j * 2u;
            let own_p = own_x(own + i);
            let own_q = own_x(own + i + 1u);
            #each 0..8 let p# = shared_x(own_p, #u, at.x# + i);
            #each 0..8 c# = add_terms(c#, w, p#, shared_x(own_q, #u, at.x# + i + 1u));
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
        #each 0..8 t.c# * scale,
    );
}
