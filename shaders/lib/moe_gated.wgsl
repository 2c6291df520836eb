// Products of up projections with gates that an earlier step, or an earlier tile of this one, has stored in `y`.
// Gates and up projections at once would take too many registers.
// Needs: `y` [entries, y_stride vectors]; params.y_stride, .row0, .outputs.

#import moe_tile
#import glu

// The vector of `y` with the four outputs from `first` of the tile's entry number i.
fn output_index(tile: ExpertTile, i: u32, first: u32) -> u32 {
    return entry_of(tile, i) * params.y_stride + ((params.row0 + first) >> 2u);
}

// Replaces four gates by act(gate) * up.
fn store(tile: ExpertTile, i: u32, first: u32, up: vec4<f32>) {
    if (i >= tile.count || first >= params.outputs) { return; }
    let at = output_index(tile, i, first);
    let gate = y[at];
    let value = vec4<f32>(glu(gate.x, up.x), glu(gate.y, up.y), glu(gate.z, up.z), glu(gate.w, up.w));
    y[at] = select(vec4<f32>(0.0), value, four_from(first) < vec4<u32>(params.outputs));
}

fn store_products(tile: ExpertTile, first: u32, u: TileSums) {
    #each 0..8 store(tile, #u, first, u.c#);
}
