// Products of up projections with gates that an earlier step, or an earlier tile of this one, has stored in `y`.
// Gates and up projections at once would take too many registers.
// Needs: moe_tile.wgsl, glu.wgsl; `y` [entries, y_stride vectors]; params.y_stride, .row0, .outputs.

// The vector of `y` with the four outputs from `first` of the tile's entry number i.
fn output_index(tile: ExpertTile, i: u32, first: u32) -> u32 {
    return entry_of(tile, i) * params.y_stride + ((params.row0 + first) >> 2u);
}

// Replaces four gates by act(gate) * up.
fn store(tile: ExpertTile, i: u32, first: u32, up: vec4<f32>) {
    if (i >= tile.count) { return; }
    let all = vec4<u32>(first, first + 1u, first + 2u, first + 3u);
    let at = output_index(tile, i, first);
    let gate = y[at];
    let value = vec4<f32>(glu(gate.x, up.x), glu(gate.y, up.y), glu(gate.z, up.z), glu(gate.w, up.w));
    y[at] = select(vec4<f32>(0.0), value, all < vec4<u32>(params.outputs));
}

fn store_products(tile: ExpertTile, first: u32, u: TileSums) {
    store(tile, 0u, first, u.c0);
    store(tile, 1u, first, u.c1);
    store(tile, 2u, first, u.c2);
    store(tile, 3u, first, u.c3);
    store(tile, 4u, first, u.c4);
    store(tile, 5u, first, u.c5);
    store(tile, 6u, first, u.c6);
    store(tile, 7u, first, u.c7);
}
