// Drafts one token: the lowest index of the largest logit. It becomes draft number `number` of ctl and the token that the
// draft head runs next, at the next position, unless that lies too far for any sample. logits [vocab].
struct Params {
    vocab: u32,
    number: u32,   // which draft of the round, from 1
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> logits: array<f32>;
@group(0) @binding(2) var<storage, read_write> ctl: Ctl;
@group(0) @binding(3) var<storage, read_write> draft: Ctl;

var<workgroup> best_values: array<f32, THREADS>;
var<workgroup> best_tokens: array<u32, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    var value = -3.4e38;
    var token = 0u;
    for (var i = thread; i < params.vocab; i += THREADS) {
        let v = logits[i];
        if (v > value) { value = v; token = i; }
    }
    best_values[thread] = value;
    best_tokens[thread] = token;
    workgroupBarrier();
    if (thread != 0u || draft.columns == 0u) { return; }
    for (var t = 1u; t < THREADS; t += 1u) {
        let v = best_values[t];
        if (v > value || (v == value && best_tokens[t] < token)) { value = v; token = best_tokens[t]; }
    }
    ctl.tokens[params.number] = token;
    draft.tokens[0] = token;
    draft.pos += 1u;
    draft.columns = u32(draft.pos < draft.last);
}
