// The factor 1 / sqrt(mean(h^2) + eps) of a norm, from the sums of squares that the step before left, one for 4
// elements of h. The kernel multiplies its products by this factor, so the norm takes no step of its own.
// Needs: `squares` [WIDTH, square_vectors padded to a multiple of 8]; params.square_vectors, .inv_cols, .eps.

#import team
#import vector
#import canon

// The factors of all tokens.
struct NormScales { c0: f32, c1: f32, c2: f32, c3: f32, c4: f32, c5: f32, c6: f32, c7: f32 }

// The share of one logical lane in the sum of a token.
fn lane_squares(token: u32, logical: u32) -> vec4<f32> {
    let base = token * ((params.square_vectors + 7u) & ~7u);
    var sum = vec4<f32>(0.0);
    for (var i = logical; i < params.square_vectors; i += LOGICAL_LANES) {
        sum += squares[base + i];
    }
    return sum;
}

// The factor of one token, by a whole team.
fn norm_scale(thread: u32, token: u32) -> f32 {
    let lane = thread % LANES;
    var lane_sum = vec4<f32>(0.0);
    if (LANE_VISITS == 1u) {
        lane_sum = lane_squares(token, lane);
    } else {
        var stack: SumStack;
        for (var visit = 0u; visit < LANE_VISITS; visit += 1u) {
            push_sum(&stack, visit, lane_squares(token, logical_lane(lane, visit)));
        }
        lane_sum = stack_sum(&stack);
    }
    let total = horizontal(team_sum(thread, lane_sum));
    return 1.0 / sqrt(fma(total, params.inv_cols, params.eps));
}

fn norm_scales(thread: u32) -> NormScales {
    var all = NormScales();
    #each 0..WIDTH all.c# = norm_scale(thread, #u);
    return all;
}
