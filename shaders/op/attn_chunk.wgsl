// y[c][head] = softmax(scores) · v for 4 columns of this run and one query head, in the same order as attn_block and
// attn_merge, times the gate. qkv [columns, heads*query + 2*kv_heads*head vectors], queries rotated; caches [kv_heads,
// positions, head vectors]; y [columns, y_stride].
struct Params {
    heads: u32,
    kv_heads: u32,
    head_vectors: u32,  // vectors of 4 in a head, at most 64
    positions: u32,     // positions the caches hold
    scale: f32,
    softcap: f32,       // 0 = none
    window: u32,        // positions a query sees, itself included; 0 = all
    y_stride: u32,      // vectors of 4 from one column of y to the next
    query_vectors: u32, // vectors from one query head to the next; more than a head has: its gate follows
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ctl: Ctl;
@group(0) @binding(2) var<storage, read> qkv: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> k_cache: array<Kv4>;
@group(0) @binding(4) var<storage, read> v_cache: array<Kv4>;
@group(0) @binding(5) var<storage, read_write> y: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    attend_chunk(group.x, group.y * COLUMNS, thread);
}
