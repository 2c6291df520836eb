// y[c][head] = softmax(scores) * v, times the output gate: joins the blocks of attn_block.wgsl in order.
// qkv [tokens, heads*query + 2*kv_heads*head vectors]; partial [tokens, heads, blocks, 1 + head vectors];
// y [tokens, y_stride vectors]. A thread computes 4 elements of a head.
// Masked: only the query heads that `list` names, as in attn_block.wgsl; zeros for the other heads.

#import attention
#import gate

// Vector i of the output of one head.
fn merged(c: u32, head: u32, i: u32) -> vec4<f32> {
    let pos = batch.tokens[c].position;
    let record = 1u + params.head_vectors;
    let base = (c * params.heads + head) * params.blocks;
    var run = Running(LOWEST, 0.0);
    var acc = vec4<f32>(0.0);
    for (var block = first_block(pos); block <= pos / KV_PAGE; block += 1u) {
        let at = (base + block) * record;
        let head_of_block = partial[at];
        let f = join_factors(run.m, head_of_block.x);
        run = Running(max(run.m, head_of_block.x), fma(run.l, f.x, head_of_block.y * f.y));
        acc = fma(acc, vec4<f32>(f.x), partial[at + 1u + i] * f.y);
    }
    return acc / run.l * gate(c * qkv_stride() + head * params.query_vectors, i);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let item = workgroup.x * THREADS + thread;
    let c = workgroup.y;
    if (item >= params.heads * params.head_vectors || c >= batch.count) { return; }
    let entry = item / params.head_vectors;
    let i = item % params.head_vectors;
    var head = entry;
    if (MASKED) {
        head = list[LIST_HEADER + entry];
        if (entry >= list[0]) {
            y[c * params.y_stride + head * params.head_vectors + i] = vec4<f32>(0.0);
            return;
        }
    }
    y[c * params.y_stride + head * params.head_vectors + i] = merged(c, head, i);
}
