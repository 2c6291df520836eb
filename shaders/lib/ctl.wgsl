// Everything that changes from token to token; kernels read it, the sampler advances it.
struct Ctl {
    tokens: array<u32, 9>,  // the token to run next and drafts of those after it; the sampler leaves what it sampled from 1 on
    pos: u32,        // position of the first column of this run
    columns: u32,    // columns of this run; 0 = it does nothing
    step: u32,       // tokens sampled so far
    stop: u32,       // 0 running, 1 a stop token was sampled, 2 the logits were not finite
    count: u32,      // tokens that the last run sampled
    drafted: u32,    // drafts that it judged
    last: u32,       // position of the last token that a speculative round may sample
}
