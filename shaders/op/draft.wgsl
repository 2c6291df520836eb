// Drafts one token: the lowest index of the largest logit. It becomes token `number` of the batch that the network
// verifies. It also becomes the next token of the draft head, unless no sample can follow its position.
// logits [vocab]. One workgroup.

#import tokens

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
    if (thread != 0u || draft_batch.count == 0u) { return; }
    for (var t = 1u; t < THREADS; t += 1u) {
        let v = best_values[t];
        if (v > value || (v == value && best_tokens[t] < token)) { value = v; token = best_tokens[t]; }
    }
    batch.tokens[params.number].id = token;
    let before = draft_batch.tokens[0];
    let position = before.position + 1u;
    draft_batch.tokens[0] = Token(token, before.slot, position, 0u);
    draft_batch.count = u32(position < slots[before.slot].last);
}
