// y[c][head] as in attn_merge.wgsl, to the bit, for the query heads that `list` names, zeros for the others. list: heads to
// attend, unused, unused, unused, then every head, those to attend first. The others as in attn_merge.wgsl.
struct Params {
    heads: u32,
    kv_heads: u32,
    head_vectors: u32,  // vectors of 4 in a head
    blocks: u32,        // blocks that part holds for a head
    scale: f32,         // unused here; as in attn_block
    softcap: f32,       // unused here
    window: u32,        // positions a query sees, itself included; 0 = all
    y_stride: u32,      // vectors of 4 from one column of y to the next
    query_vectors: u32, // vectors from one query head to the next; more than a head has: its gate follows
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ctl: Ctl;
@group(0) @binding(2) var<storage, read> part: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> qkv: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> list: array<u32>;
@group(0) @binding(5) var<storage, read_write> y: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let item = group.x * THREADS + thread;
    let c = group.y;
    if (item >= params.heads * params.head_vectors || c >= ctl.columns) { return; }
    let entry = item / params.head_vectors;
    let i = item % params.head_vectors;
    let head = list[4u + entry];
    let out = c * params.y_stride + head * params.head_vectors + i;
    if (entry >= list[0]) {
        y[out] = vec4<f32>(0.0);
        return;
    }
    y[out] = merged(c, head, i);
}
