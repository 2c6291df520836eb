// y[c][head] as in attn_chunk.wgsl, to the bit, for the query heads that `list` names; the others are left as they are.
// list: heads to attend, unused, unused, unused, then every head, those to attend first. The others as in attn_chunk.wgsl.
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
@group(0) @binding(5) var<storage, read> list: array<u32>;
@group(0) @binding(6) var<storage, read_write> y: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    if (group.x >= list[0]) { return; }
    attend_chunk(list[4u + group.x], group.y * COLUMNS, thread);
}
