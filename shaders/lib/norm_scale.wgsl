// 1 / sqrt(mean(h^2) + eps) from the sums of squares that the producer of h left, one for each 4 elements; needs `squares`.
fn lane_squares(logical: u32) -> vec4<f32> {
    var sum = vec4<f32>(0.0);
    for (var i = logical; i < params.square_vectors; i += LOGICAL_LANES) {
        sum += squares[i];
    }
    return sum;
}

fn norm_scale(thread: u32) -> f32 {
    let lane = thread % LANES;
    var mine = vec4<f32>(0.0);
    if (STEPS == 1u) {
        mine = lane_squares(lane);
    } else {
        var stack: Joined;
        for (var step = 0u; step < STEPS; step += 1u) {
            join(&stack, step, lane_squares(logical_lane(lane, step)));
        }
        mine = joined(&stack);
    }
    let total = horizontal(team_sum(thread, mine));
    return 1.0 / sqrt(fma(total, params.inv_cols, params.eps));
}
