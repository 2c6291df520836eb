// Begins a speculative step. The batch of the draft head gets the tokens that the last run sampled: token t[p + 1] at
// position p, for the `count` positions p before the next token's. There the draft head reads the network's hidden
// states. The batch that verifies the drafts gets the next token and one token for each draft, but no token whose
// sample would be after position `last`. At the end of an answer both batches become empty. One thread works.

#import tokens

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    if (thread != 0u) { return; }
    let next = batch.tokens[0];
    let last = slots[next.slot].last;
    let finished = slots[next.slot].stop != 0u || next.position >= last;
    let count = select(slots[next.slot].count, 0u, finished);
    let start = next.position - min(count, next.position);
    for (var i = 0u; i < count; i += 1u) {
        draft_batch.tokens[i] = Token(slots[next.slot].sampled[i], next.slot, start + i, 0u);
    }
    draft_batch.count = count;
    let verified = select(min(params.depth + 1u, last - next.position), 0u, finished);
    for (var i = 1u; i < verified; i += 1u) {
        batch.tokens[i] = Token(next.id, next.slot, next.position + i, 0u);
    }
    batch.count = verified;
}
