// Makes the columns c of this run ready for decoding: with h = source[c], hg[c] = h * g and squares[c][i] = the sum of h^2
// over 4 elements. source, hg [columns, vectors]; g [vectors]; squares [columns, vectors padded to units of 32]. A thread
// takes 4 elements.
struct Params {
    vectors: u32,   // vectors of 4 in a column
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ctl: Ctl;
@group(0) @binding(2) var<storage, read> source: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> g: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> hg: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> squares: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = group.x * THREADS + thread;
    let c = group.y;
    if (i >= params.vectors || c >= ctl.columns) { return; }
    let v = source[c * params.vectors + i];
    hg[c * params.vectors + i] = v * g[i];
    squares[c * ((params.vectors + 31u) & ~31u) + i] = square_sum(v);
}
