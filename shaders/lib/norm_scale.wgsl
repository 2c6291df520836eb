// 1 / sqrt(mean(h^2) + eps) from the sums of squares that the producer of h left, one for each 4 elements; needs `squares`.
fn norm_scale(thread: u32) -> f32 {
    let lane = thread % LANES;
    var stack: Joined;
    for (var step = 0u; step < STEPS; step += 1u) {
        var sum = vec4<f32>(0.0);
        for (var i = logical_lane(lane, step); i < params.square_vectors; i += LOGICAL_LANES) {
            sum += squares[i];
        }
        join(&stack, step, sum);
    }
    let total = horizontal(team_sum(thread, joined(&stack)));
    return 1.0 / sqrt(fma(total, params.inv_cols, params.eps));
}
