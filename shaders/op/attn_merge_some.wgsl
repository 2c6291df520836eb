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
    let pos = ctl.pos + c;
    let record = 1u + params.head_vectors;
    let base = (c * params.heads + head) * params.blocks;
    var run = Running(MASKED, 0.0);
    var acc = vec4<f32>(0.0);
    for (var number = first_block(pos); number <= pos / BLOCK; number += 1u) {
        let at = (base + number) * record;
        let head_of_block = part[at];
        let f = join_factors(run.m, head_of_block.x);
        run = Running(max(run.m, head_of_block.x), fma(run.l, f.x, head_of_block.y * f.y));
        acc = fma(acc, vec4<f32>(f.x), part[at + 1u + i] * f.y);
    }
    let stride = params.heads * params.query_vectors + 2u * params.kv_heads * params.head_vectors;
    y[out] = acc / run.l * gate(c * stride + head * params.query_vectors, i);
}
