// Begins a speculative round. What the last run sampled becomes the columns of the draft head, which thereby catches up:
// draft = a run of tokens t[p + 1] at positions p, for the `count` positions p before ctl.pos. The run that judges the drafts
// gets a column for the token at ctl.pos and one a draft, but none whose sample would lie behind ctl.last. After the end of
// an answer neither has columns. One thread works.
struct Params {
    depth: u32,   // most drafts of a round
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> ctl: Ctl;
@group(0) @binding(2) var<storage, read_write> draft: Ctl;

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    if (thread != 0u) { return; }
    let over = ctl.stop != 0u || ctl.pos >= ctl.last;
    for (var i = 0u; i < 8u; i += 1u) {
        draft.tokens[i] = ctl.tokens[i + 1u];
    }
    draft.pos = ctl.pos - min(ctl.count, ctl.pos);
    draft.columns = select(ctl.count, 0u, over);
    draft.last = ctl.last;
    ctl.columns = select(min(params.depth + 1u, ctl.last - ctl.pos), 0u, over);
}
