// The share of one logical lane in the dot products of four rows with one or two tokens; all sums are in registers.
// Needs: matvec.wgsl.

// The products of one group of four rows with one token, without the groups' scales.
fn group_dots(rows: Rows4, group: u32, token: u32) -> vec4<f32> {
    let v = prep_x(rows.tensor, group, load_x(rows.token + token, group));
    let sum = x_sum_if_needed(v);
    return vec4<f32>(
        group_dot(rows.r0, group, v, sum), group_dot(rows.r1, group, v, sum),
        group_dot(rows.r2, group, v, sum), group_dot(rows.r3, group, v, sum),
    );
}

// One loop visits all tokens of a group, then the next group. The weights of the group are loaded for each token
// again, from cache: registers hold the activations of one token only. The sums rotate, so that c0 is the sum of the
// current token.
fn lane_tokens(thread: u32, rows: Rows4, logical: u32) -> Sums {
    // Column scales differ between the tensors, so x does too. Both in one loop would take twice the registers.
    if (PREPARES_X && TWO_TENSORS) {
        let a = lane_row_pair(rows.r0, rows.r1, rows.tensor, rows.token, logical);
        let b = lane_row_pair(rows.r2, rows.r3, rows.other_tensor, rows.token, logical);
        var pair_sums = Sums();
        pair_sums.c0 = vec4<f32>(a.c0, b.c0);
        pair_sums.c1 = vec4<f32>(a.c1, b.c1);
        return pair_sums;
    }
    let count = group_count();
    var acc = Sums();
    var token = 0u;
    for (var entry = logical; entry < count; entry += select(0u, LOGICAL_LANES, token == 0u)) {
        let group = group_at(entry);
        let dots = group_dots(rows, group, token);
        let scales = vec4<f32>(
            group_scale(rows.r0, group), group_scale(rows.r1, group),
            group_scale(rows.r2, group), group_scale(rows.r3, group),
        );
        let sum = fma(scales, dots, acc.c0);
        token = (token + 1u) % WIDTH;
        acc.c0 = acc.c1;
        if (WIDTH == 1u) { acc.c0 = sum; } else { acc.c1 = sum; }
    }
    return acc;
}

// The share of one logical lane in the dot products of two rows of one tensor, for the tokens of x from `first`.
fn lane_row_pair(r0: Row, r1: Row, tensor: u32, first: u32, logical: u32) -> Pairs {
    let count = group_count();
    var acc = Pairs();
    var token = 0u;
    for (var entry = logical; entry < count; entry += select(0u, LOGICAL_LANES, token == 0u)) {
        let group = group_at(entry);
        let v = prep_x(tensor, group, load_x(first + token, group));
        let sum = x_sum_if_needed(v);
        let dots = vec2<f32>(group_dot(r0, group, v, sum), group_dot(r1, group, v, sum));
        let value = fma(vec2<f32>(group_scale(r0, group), group_scale(r1, group)), dots, acc.c0);
        token = (token + 1u) % WIDTH;
        acc.c0 = acc.c1;
        if (WIDTH == 1u) { acc.c0 = value; } else { acc.c1 = value; }
    }
    return acc;
}
