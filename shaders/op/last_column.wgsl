// Makes the last column of this run the only one: to[0] = source[columns - 1], and ctl becomes that of a run of this column
// alone. source [columns, vectors]; to [1, vectors]. One workgroup.
struct Params {
    vectors: u32,   // vectors of 4 in a column
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> source: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> to: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> ctl: Ctl;

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    let columns = ctl.columns;
    let earlier = max(columns, 1u) - 1u;
    for (var i = thread; i < params.vectors * min(columns, 1u); i += THREADS) {
        to[i] = source[earlier * params.vectors + i];
    }
    // Every thread has read the columns before they change.
    workgroupBarrier();
    if (thread == 0u) {
        ctl.pos += earlier;
        ctl.columns = min(columns, 1u);
    }
}
