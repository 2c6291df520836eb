// The matvec family: 4 rows of weights times WIDTH tokens. Each token is summed in the canonical order of canon.wgsl,
// so its sums do not depend on WIDTH. Fields c0 to c7 belong to tokens 0 to 7; those from WIDTH on are unused. They
// have names because an array that is indexed by a variable would be kept in memory.
// Needs: groups_all.wgsl or groups_masked.wgsl; `x` [WIDTH, 8*groups vectors]; TWO_TENSORS: whether the last two rows
// belong to another stacked tensor than the first two; params.groups, .rows.

#import team
#import vector
#import weights
#import grid
#import canon
#import tokens_side_by_side
#import dtype

struct Sums {
    #each 0..8 c#: vec4<f32>,
}

// Four rows and their numbers. tensor, other_tensor: the stacked tensors that the first two and the last two rows
// belong to. token: the first token of x; 0 if WIDTH is more than 2.
struct Rows4 { r0: Row, r1: Row, r2: Row, r3: Row, numbers: vec4<u32>, tensor: u32, other_tensor: u32, token: u32 }

// Sums of two rows, for each token.
struct Pairs {
    #each 0..8 c#: vec2<f32>,
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
            #each 2..4 acc.c# += vec4<f32>(r0.a[#], r1.a[#], r2.a[#], r3.a[#]);
        }
        if (WIDTH > 4u) {
            #each 4..8 acc.c# += vec4<f32>(r0.b[#u - 4u], r1.b[#u - 4u], r2.b[#u - 4u], r3.b[#u - 4u]);
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
            #each 2..4 acc.a[#] = fma(change, x[i + #u * stride][k], acc.a[#]);
        }
        if (WIDTH > 4u) {
            #each 4..8 acc.b[#u - 4u] = fma(change, x[i + #u * stride][k], acc.b[#u - 4u]);
        }
    }
    return acc;
}

// Adds the shares of all lanes of the team.
fn team_sums(thread: u32, s: Sums) -> Sums {
    var all = s;
    #each 0..WIDTH all.c# = team_sum(thread, s.c#);
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
    #each 0..8 var j#: SumStack;
    for (var visit = 0u; visit < LANE_VISITS; visit += 1u) {
        let s = lane_dots(thread, rows, logical_lane(lane, visit));
        #each 0..WIDTH push_sum(&j#, visit, s.c#);
    }
    return team_sums(thread, Sums(
        #each 0..8 stack_sum(&j#),
    ));
}

fn row_scales(rows: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(row_scale(rows.x), row_scale(rows.y), row_scale(rows.z), row_scale(rows.w));
}

// Numbers of the four rows from `first`; rows past the end repeat the last one.
fn rows_from(first: u32) -> vec4<u32> {
    return min(four_from(first), vec4<u32>(params.rows - 1u));
}

// The index of this team in the grid, which is the block of rows that it computes.
fn team_block(workgroup: vec3<u32>, thread: u32) -> u32 { return workgroup_index(workgroup) * TEAMS + thread / LANES; }
