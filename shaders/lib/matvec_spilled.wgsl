// The share of one logical lane in the dot products of four rows with four or eight tokens. These sums take too many
// registers. Workgroup memory holds the sums of rows r1 and r3, and those of r2 too if ONE_IN_REGISTERS; each thread
// has its own elements, so no barriers are needed. The tokens of a group are visited as in matvec_registers.wgsl.
// A row that repeats the row before it is not summed, because its result is not stored. The conditions for that have
// a second purpose: they keep drivers from loading the weights of all four rows at once, which would take more
// registers.
// Needs: matvec.wgsl; LOOKS_UP_GROUPS of groups_all.wgsl or groups_masked.wgsl.

// Whether only the sums of r0 stay in registers: if the weight type takes many registers, or if groups are looked up
// in a list and there are eight tokens.
const ONE_IN_REGISTERS: bool = MANY_REGISTERS || (LOOKS_UP_GROUPS && WIDTH > 4u);

var<workgroup> spilled_r1_r3: array<vec2<f32>, WIDTH * THREADS>;
var<workgroup> spilled_r2: array<f32, select(1u, WIDTH * THREADS, ONE_IN_REGISTERS)>;

// Replaces c0, the sums of r0 and r2 of the current token, and rotates the sums, so that c0 belongs to the next token.
fn replace_and_rotate(s: Pairs, value: vec2<f32>) -> Pairs {
    if (WIDTH == 4u) { return Pairs(s.c1, s.c2, s.c3, value, s.c4, s.c5, s.c6, s.c7); }
    return Pairs(s.c1, s.c2, s.c3, s.c4, s.c5, s.c6, s.c7, value);
}

// Adds the product of one group of a row to its sum.
fn add_group(acc: f32, row: Row, group: u32, v: X32, sum: f32) -> f32 {
    return fma(group_scale(row, group), group_dot(row, group, v, sum), acc);
}

// For rows of two tensors that prepare x differently: one loop for each tensor. Returns the sums of r0 and r2.
fn lane_two_tensors(thread: u32, rows: Rows4, logical: u32) -> Pairs {
    let distinct = rows.numbers.y != rows.numbers.x;
    let count = group_count();
    var in_registers = Pairs();
    var token = 0u;
    for (var entry = logical; entry < count; entry += select(0u, LOGICAL_LANES, token == 0u)) {
        let group = group_at(entry);
        let v = prep_x(rows.tensor, group, load_x(token, group));
        let sum = x_sum_if_needed(v);
        let at = token * THREADS + thread;
        let value = add_group(in_registers.c0.x, rows.r0, group, v, sum);
        if (distinct) { spilled_r1_r3[at].x = add_group(spilled_r1_r3[at].x, rows.r1, group, v, sum); }
        token = (token + 1u) % WIDTH;
        in_registers = replace_and_rotate(in_registers, vec2<f32>(value, 0.0));
    }
    token = 0u;
    for (var entry = logical; entry < count; entry += select(0u, LOGICAL_LANES, token == 0u)) {
        let group = group_at(entry);
        let v = prep_x(rows.other_tensor, group, load_x(token, group));
        let sum = x_sum_if_needed(v);
        let at = token * THREADS + thread;
        let value = add_group(in_registers.c0.y, rows.r2, group, v, sum);
        if (distinct) { spilled_r1_r3[at].y = add_group(spilled_r1_r3[at].y, rows.r3, group, v, sum); }
        token = (token + 1u) % WIDTH;
        in_registers = replace_and_rotate(in_registers, vec2<f32>(in_registers.c0.x, value));
    }
    return in_registers;
}

// For rows that use the same x. Returns the sums of r0 and, unless ONE_IN_REGISTERS, r2.
fn lane_one_tensor(thread: u32, rows: Rows4, logical: u32) -> Pairs {
    let repeated = rows.numbers.yzw == rows.numbers.xyz;
    let count = group_count();
    var in_registers = Pairs();
    var token = 0u;
    for (var entry = logical; entry < count; entry += select(0u, LOGICAL_LANES, token == 0u)) {
        let group = group_at(entry);
        let v = prep_x(rows.tensor, group, load_x(token, group));
        let sum = x_sum_if_needed(v);
        let at = token * THREADS + thread;
        var value = in_registers.c0;
        value.x = add_group(value.x, rows.r0, group, v, sum);
        if (ONE_IN_REGISTERS) {
            if (!repeated.y) { spilled_r2[at] = add_group(spilled_r2[at], rows.r2, group, v, sum); }
            if (!repeated.x) { spilled_r1_r3[at].x = add_group(spilled_r1_r3[at].x, rows.r1, group, v, sum); }
            if (!repeated.z) { spilled_r1_r3[at].y = add_group(spilled_r1_r3[at].y, rows.r3, group, v, sum); }
        } else {
            value.y = add_group(value.y, rows.r2, group, v, sum);
            if (!repeated.x) {
                let spilled = spilled_r1_r3[at];
                spilled_r1_r3[at] = vec2<f32>(
                    add_group(spilled.x, rows.r1, group, v, sum), add_group(spilled.y, rows.r3, group, v, sum),
                );
            }
        }
        token = (token + 1u) % WIDTH;
        in_registers = replace_and_rotate(in_registers, value);
    }
    return in_registers;
}

// The sums of all four rows of one token, from registers and workgroup memory.
fn all_rows(thread: u32, in_registers: vec2<f32>, token: u32) -> vec4<f32> {
    let at = token * THREADS + thread;
    let spilled = spilled_r1_r3[at];
    if (ONE_IN_REGISTERS) { return vec4<f32>(in_registers.x, spilled.x, spilled_r2[at], spilled.y); }
    return vec4<f32>(in_registers.x, spilled.x, in_registers.y, spilled.y);
}

fn lane_tokens(thread: u32, rows: Rows4, logical: u32) -> Sums {
    for (var token = 0u; token < WIDTH; token += 1u) {
        spilled_r1_r3[token * THREADS + thread] = vec2<f32>(0.0);
        if (ONE_IN_REGISTERS) { spilled_r2[token * THREADS + thread] = 0.0; }
    }
    var in_registers: Pairs;
    if (PREPARES_X && TWO_TENSORS) {
        in_registers = lane_two_tensors(thread, rows, logical);
    } else {
        in_registers = lane_one_tensor(thread, rows, logical);
    }
    var all = Sums();
    #each 0..WIDTH all.c# = all_rows(thread, in_registers.c#, #u);
    return all;
}
