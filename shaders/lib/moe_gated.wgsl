// Products with gates that wait where the products go: both tiles at once would take too many registers. Needs `y`
// [entries, 4*y_stride], tiles as in moe_tile.wgsl.

// Where the four outputs from `first` of the task's entry number i lie.
fn place_of_outputs(task: Task, i: u32, first: u32) -> u32 {
    return entry_of(task, i) * params.y_stride + ((params.row0 + first) >> 2u);
}

fn store(task: Task, i: u32, first: u32, up: vec4<f32>) {
    if (i >= task.count) { return; }
    let all = vec4<u32>(first, first + 1u, first + 2u, first + 3u);
    let at = place_of_outputs(task, i, first);
    let gate = y[at];
    let value = vec4<f32>(glu(gate.x, up.x), glu(gate.y, up.y), glu(gate.z, up.z), glu(gate.w, up.w));
    y[at] = select(vec4<f32>(0.0), value, all < vec4<u32>(params.outputs));
}

fn store_products(task: Task, first: u32, u: Tile) {
    store(task, 0u, first, u.c0);
    store(task, 1u, first, u.c1);
    store(task, 2u, first, u.c2);
    store(task, 3u, first, u.c3);
    store(task, 4u, first, u.c4);
    store(task, 5u, first, u.c5);
    store(task, 6u, first, u.c6);
    store(task, 7u, first, u.c7);
}
