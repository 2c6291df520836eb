// 1 / sqrt(mean(h^2) + eps) of each column, from the sums of squares that the producer of h left, one for each 4 elements;
// needs `squares` [COLS, square_vectors padded to whole units of 8].
struct Scales { c0: f32, c1: f32, c2: f32, c3: f32, c4: f32, c5: f32, c6: f32, c7: f32 }

fn lane_squares(column: u32, logical: u32) -> vec4<f32> {
    let base = column * ((params.square_vectors + 7u) & ~7u);
    var sum = vec4<f32>(0.0);
    for (var i = logical; i < params.square_vectors; i += LOGICAL_LANES) {
        sum += squares[base + i];
    }
    return sum;
}

fn norm_scale(thread: u32, column: u32) -> f32 {
    let lane = thread % LANES;
    var mine = vec4<f32>(0.0);
    if (STEPS == 1u) {
        mine = lane_squares(column, lane);
    } else {
        var stack: Joined;
        for (var step = 0u; step < STEPS; step += 1u) {
            join(&stack, step, lane_squares(column, logical_lane(lane, step)));
        }
        mine = joined(&stack);
    }
    let total = horizontal(team_sum(thread, mine));
    return 1.0 / sqrt(fma(total, params.inv_cols, params.eps));
}

fn norm_scales(thread: u32) -> Scales {
    var all = Scales();
    all.c0 = norm_scale(thread, 0u);
    if (COLS > 1u) { all.c1 = norm_scale(thread, 1u); }
    if (COLS > 2u) {
        all.c2 = norm_scale(thread, 2u);
        all.c3 = norm_scale(thread, 3u);
    }
    if (COLS > 4u) {
        all.c4 = norm_scale(thread, 4u);
        all.c5 = norm_scale(thread, 5u);
        all.c6 = norm_scale(thread, 6u);
        all.c7 = norm_scale(thread, 7u);
    }
    return all;
}
