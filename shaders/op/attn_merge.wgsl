// y[c][head] = the blocks of attn_block joined in order, softmax(scores) · v over every visible position, times the gate.
// qkv [columns, heads*query + 2*kv_heads*head vectors]; part [columns, heads, blocks, 1 + head vectors]; y [columns, y_stride]. A thread takes 4 elements of a head.
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
@group(0) @binding(4) var<storage, read_write> y: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let item = group.x * THREADS + thread;
    let c = group.y;
    if (item >= params.heads * params.head_vectors || c >= ctl.columns) { return; }
    y[c * params.y_stride + item] = merged(c, item / params.head_vectors, item % params.head_vectors);
}
