// The matvec family: 4 rows of weights times WIDTH tokens. Each token is summed in the canonical order of canon.wgsl,
// so its sums do not depend on WIDTH. Fields c0 to c7 belong to tokens 0 to 7; those from WIDTH on are unused. They
// have names because an array that is indexed by a variable would be kept in memory.
// Needs: dtype; team; vector.wgsl, weights.wgsl, grid.wgsl, canon.wgsl; group_count and group_at of groups_all.wgsl or
// groups_masked.wgsl; lane_tokens of matvec_registers.wgsl or matvec_spilled.wgsl; `x` [WIDTH, 8*groups vectors];
// TWO_TENSORS: whether the last two rows belong to another stacked tensor than the first two; params.groups, .rows.
struct Sums {
    c0: vec4<f32>, c1: vec4<f32>, c2: vec4<f32>, c3: vec4<f32>,
    c4: vec4<f32>, c5: vec4<f32>, c6: vec4<f32>, c7: vec4<f32>,
}

// Four rows and their numbers. tensor, other_tensor: the stacked tensors that the first two and the last two rows
// belong to. token: the first token of x; 0 if WIDTH is more than 2.
struct Rows4 { r0: Row, r1: Row, r2: Row, r3: Row, numbers: vec4<u32>, tensor: u32, other_tensor: u32, token: u32 }

// Sums of two rows, for each token.
struct Pairs {
    c0: vec2<f32>, c1: vec2<f32>, c2: vec2<f32>, c3: vec2<f32>,
    c4: vec2<f32>, c5: vec2<f32>, c6: vec2<f32>, c7: vec2<f32>,
}

fn load_x(token: u32, group: u32) -> X32 {
    let i = (token * params.groups + group) * 8u;
    return X32(x[i], x[i + 1u], x[i + 2u], x[i + 3u], x[i + 4u], x[i + 5u], x[i + 6u], x[i + 7u]);
}

fn x_sum_if_needed(x: X32) -> f32 {
    if (NEEDS_SUM) { return x_sum(x); }
    return 0.0;
}

// The share of one logical lane in the dot products of four rows, overlays included.
fn lane_dots(thread: u32, rows: Rows4, logical: u32) -> Sums {
    var acc = lane_tokens(thread, rows, logical);
    if (HAS_OVERLAY) {
        let base = rows.token * params.groups * 8u;
        let r0 = lane_overlay(rows.r0, logical, base);
        let r1 = lane_overlay(rows.r1, logical, base);
        let r2 = lane_overlay(rows.r2, logical, base);
        let r3 = lane_overlay(rows.r3, logical, base);
        acc.c0 += vec4<f32>(r0.a.x, r1.a.x, r2.a.x, r3.a.x);
        if (WIDTH > 1u) { acc.c1 += vec4<f32>(r0.a.y, r1.a.y, r2.a.y, r3.a.y); }
        if (WIDTH > 2u) {
            acc.c2 += vec4<f32>(r0.a.z, r1.a.z, r2.a.z, r3.a.z);
            acc.c3 += vec4<f32>(r0.a.w, r1.a.w, r2.a.w, r3.a.w);
        }
        if (WIDTH > 4u) {
            acc.c4 += vec4<f32>(r0.b.x, r1.b.x, r2.b.x, r3.b.x);
            acc.c5 += vec4<f32>(r0.b.y, r1.b.y, r2.b.y, r3.b.y);
            acc.c6 += vec4<f32>(r0.b.z, r1.b.z, r2.b.z, r3.b.z);
            acc.c7 += vec4<f32>(r0.b.w, r1.b.w, r2.b.w, r3.b.w);
        }
    }
    return acc;
}

// Sums of one row: tokens 0 to 3, tokens 4 to 7.
struct RowSums { a: vec4<f32>, b: vec4<f32> }

// The share of one logical lane in the overlay of a row: every 32nd entry. The first token of x begins at vector `base`.
fn lane_overlay(row: Row, logical: u32, base: u32) -> RowSums {
    let range = overlay_range(row);
    let stride = params.groups * 8u;
    var acc = RowSums();
    for (var entry = range.x + logical; entry < range.y; entry += LOGICAL_LANES) {
        if (overlay_ends(entry)) { break; }
        let col = overlay_col(entry);
        let change = overlay_change(row, entry);
        let i = base + (col >> 2u);
        let k = col & 3u;
        acc.a.x = fma(change, x[i][k], acc.a.x);
        if (WIDTH > 1u) { acc.a.y = fma(change, x[i + stride][k], acc.a.y); }
        if (WIDTH > 2u) {
            acc.a.z = fma(change, x[i + 2u * stride][k], acc.a.z);
            acc.a.w = fma(change, x[i + 3u * stride][k], acc.a.w);
        }
        if (WIDTH > 4u) {
            acc.b.x = fma(change, x[i + 4u * stride][k], acc.b.x);
            acc.b.y = fma(change, x[i + 5u * stride][k], acc.b.y);
            acc.b.z = fma(change, x[i + 6u * stride][k], acc.b.z);
            acc.b.w = fma(change, x[i + 7u * stride][k], acc.b.w);
        }
    }
    return acc;
}

// Adds the shares of all lanes of the team.
fn team_sums(thread: u32, s: Sums) -> Sums {
    var all = s;
    all.c0 = team_sum(thread, s.c0);
    if (WIDTH > 1u) { all.c1 = team_sum(thread, s.c1); }
    if (WIDTH > 2u) {
        all.c2 = team_sum(thread, s.c2);
        all.c3 = team_sum(thread, s.c3);
    }
    if (WIDTH > 4u) {
        all.c4 = team_sum(thread, s.c4);
        all.c5 = team_sum(thread, s.c5);
        all.c6 = team_sum(thread, s.c6);
        all.c7 = team_sum(thread, s.c7);
    }
    return all;
}

// The dot products of four rows without row scales, by a whole team. Rows x and y belong to `tensor`, z and w to
// `other_tensor`.
fn dot_rows(thread: u32, numbers: vec4<u32>, tensor: u32, other_tensor: u32) -> Sums {
    return dot_rows_from(thread, numbers, tensor, other_tensor, 0u);
}

// The same for the tokens of x from `token`.
fn dot_rows_from(thread: u32, numbers: vec4<u32>, tensor: u32, other_tensor: u32, token: u32) -> Sums {
    let lane = thread % LANES;
    let rows = Rows4(
        row_open(numbers.x), row_open(numbers.y), row_open(numbers.z), row_open(numbers.w),
        numbers, tensor, other_tensor, token,
    );
    // No loop around a single visit: drivers would not optimise the loop inside as the innermost one.
    if (LANE_VISITS == 1u) {
        return team_sums(thread, lane_dots(thread, rows, lane));
    }
    var j0: SumStack;
    var j1: SumStack;
    var j2: SumStack;
    var j3: SumStack;
    var j4: SumStack;
    var j5: SumStack;
    var j6: SumStack;
    var j7: SumStack;
    for (var visit = 0u; visit < LANE_VISITS; visit += 1u) {
        let s = lane_dots(thread, rows, logical_lane(lane, visit));
        push_sum(&j0, visit, s.c0);
        if (WIDTH > 1u) { push_sum(&j1, visit, s.c1); }
        if (WIDTH > 2u) {
            push_sum(&j2, visit, s.c2);
            push_sum(&j3, visit, s.c3);
        }
        if (WIDTH > 4u) {
            push_sum(&j4, visit, s.c4);
            push_sum(&j5, visit, s.c5);
            push_sum(&j6, visit, s.c6);
            push_sum(&j7, visit, s.c7);
        }
    }
    return team_sums(thread, Sums(
        stack_sum(&j0), stack_sum(&j1), stack_sum(&j2), stack_sum(&j3),
        stack_sum(&j4), stack_sum(&j5), stack_sum(&j6), stack_sum(&j7),
    ));
}

fn row_scales(rows: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(row_scale(rows.x), row_scale(rows.y), row_scale(rows.z), row_scale(rows.w));
}

// Numbers of the four rows from `first`; rows past the end repeat the last one.
fn rows_from(first: u32) -> vec4<u32> {
    return min(vec4<u32>(first, first + 1u, first + 2u, first + 3u), vec4<u32>(params.rows - 1u));
}

// The index of this team in the grid, which is the block of rows that it computes.
fn team_block(workgroup: vec3<u32>, thread: u32) -> u32 { return workgroup_index(workgroup) * TEAMS + thread / LANES; }
