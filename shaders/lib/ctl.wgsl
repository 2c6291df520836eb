// Everything that changes from token to token; kernels read it, the sampler advances it.
struct Ctl {
    token: u32,      // the token to run next
    pos: u32,        // position of the first column of this run
    columns: u32,    // columns of this run
    step: u32,       // tokens sampled so far
    stop: u32,       // 0 running, 1 a stop token was sampled, 2 the logits were not finite
    sampled: u32,    // the token sampled last
}
