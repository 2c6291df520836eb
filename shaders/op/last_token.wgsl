// Keeps only the last token of this run: to[0] = source[count - 1], and the batch becomes that token.
// source [tokens, vectors]; to [1, vectors]. One workgroup.

#import tokens

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    let count = batch.count;
    let last = max(count, 1u) - 1u;
    for (var i = thread; i < params.vectors * min(count, 1u); i += THREADS) {
        to[i] = source[last * params.vectors + i];
    }
    // All threads have read the count before it changes.
    workgroupBarrier();
    if (thread == 0u) {
        batch.tokens[0] = batch.tokens[last];
        batch.count = min(count, 1u);
    }
}
