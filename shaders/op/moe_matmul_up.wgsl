// y[entry][r] = act(y[entry][r]) * sum_k w[r][k] * x[entry / x_entries][k] with the weights of the entry's expert: what
// moe_matmul.wgsl left in y are gates. act is silu or gelu_tanh; all else as in moe_matmul.wgsl.
// A thread takes 4 rows × 8 entries of one expert.
struct Params {
    rows: u32,       // rows stored in this segment
    units: u32,      // units of 32 columns in a row
    outputs: u32,    // rows of each expert in this segment
    row0: u32,       // first row of this segment in y, a multiple of 4
    y_stride: u32,   // vectors of 4 from one entry of y to the next
    x_entries: u32,  // entries that share a column of x: the experts a token takes
    tiles: u32,      // tiles that lists have room for
    gelu: u32,       // 1 = gelu_tanh, 0 = silu
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> scales: array<u32>;
@group(0) @binding(3) var<storage, read> ctl: Ctl;
@group(0) @binding(4) var<storage, read> experts: Experts;
@group(0) @binding(5) var<storage, read> lists: array<u32>;
@group(0) @binding(6) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> y: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first = (group.x * THREADS + thread) * 4u;
    let task = task_of(group.y);
    if (first >= params.outputs || task.count == 0u) { return; }
    let place = experts.all[task.expert].place;
    if (place == ABSENT) { return; }
    let rows = rows_from(first, params.outputs - 1u) + vec4<u32>(place * params.outputs);
    store_products(task, first, tile(rows, place, task));
}
