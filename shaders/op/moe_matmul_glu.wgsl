// y[entry][r] = act(gate) * up with the weights of the entry's expert, both a matmul of x; act is silu or gelu_tanh.
// w and places as in moe_glu.wgsl; lists as moe_lists.wgsl leaves them; x [columns, 32*units]; y [entries, 4*y_stride].
// A thread takes 4 outputs × 8 entries of one expert: gates first, which wait in y, then up projections.
struct Params {
    rows: u32,            // rows stored in this segment
    units: u32,           // units of 32 columns in a row
    outputs: u32,         // outputs of each expert in this segment
    placed: u32,          // experts in this segment
    shared_outputs: u32,  // outputs of the shared expert in this segment, 0 = it is not there
    row0: u32,            // first of an expert's outputs in this segment, a multiple of 4
    y_stride: u32,        // vectors of 4 from one entry of y to the next
    x_entries: u32,       // entries that share a column of x: the experts a token takes
    tiles: u32,           // tiles that lists have room for
    gelu: u32,            // 1 = gelu_tanh, 0 = silu
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> scales: array<u32>;
@group(0) @binding(3) var<storage, read> ctl: Ctl;
@group(0) @binding(4) var<storage, read> experts: Experts;
@group(0) @binding(5) var<storage, read> lists: array<u32>;
@group(0) @binding(6) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> y: array<vec4<f32>>;

fn keep(task: Task, i: u32, first: u32, gate: vec4<f32>) {
    if (i >= task.count) { return; }
    y[place_of_outputs(task, i, first)] = gate;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first = (group.x * THREADS + thread) * 4u;
    let task = task_of(group.y);
    if (first >= params.outputs || task.count == 0u) { return; }
    let place = experts.all[task.expert].place;
    if (place == ABSENT) { return; }
    let gate_row = 2u * params.shared_outputs + place * params.outputs;
    let up_row = gate_row + params.placed * params.outputs;
    let part = place + select(0u, 2u, params.shared_outputs != 0u);
    let here = rows_from(first, params.outputs - 1u);
    let g = tile(here + vec4<u32>(gate_row), part, task);
    keep(task, 0u, first, g.c0);
    keep(task, 1u, first, g.c1);
    keep(task, 2u, first, g.c2);
    keep(task, 3u, first, g.c3);
    keep(task, 4u, first, g.c4);
    keep(task, 5u, first, g.c5);
    keep(task, 6u, first, g.c6);
    keep(task, 7u, first, g.c7);
    store_products(task, first, tile(here + vec4<u32>(up_row), part + params.placed, task));
}
