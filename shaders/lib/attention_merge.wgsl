// One thread's share of a head's result: 4 elements of the blocks of attn_block joined in order, times the gate. Needs
// `params`, `ctl`, `part`, and what attention.wgsl and gate.wgsl need.

fn merged(c: u32, head: u32, i: u32) -> vec4<f32> {
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
    return acc / run.l * gate(c * stride + head * params.query_vectors, i);
}
