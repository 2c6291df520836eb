// y[c][r] = scale[c] * sum_k w[r][k] * x[c][k] + bias[r], for WIDTH tokens c. If x = h * g, then the factor
// scale[c] = 1 / sqrt(mean(h[c]^2) + eps) completes an RMSNorm of h; see norm_scale.wgsl.
// w [rows, 32*groups]; x [WIDTH, 32*groups]; squares [WIDTH, square_vectors padded to a multiple of 8]; bias [rows];
// y [WIDTH, y_stride vectors].
// A team computes 4 rows.
// Masked: only the blocks of 4 rows that `list` names, summed over the groups that it names; zeros in the other rows.
// For the list see groups_masked.wgsl.

#import stacked
#import norm_scale
#import groups
#import matvec

const TWO_TENSORS: bool = false;

fn store(token: u32, first: u32, values: vec4<f32>) {
    let i = token * params.y_stride + ((params.row0 + first) >> 2u);
    y[i] = select(vec4<f32>(0.0), values, four_from(first) < vec4<u32>(params.rows));
}

// The number of blocks of 4 rows.
fn row_blocks() -> u32 { return (params.rows + 3u) >> 2u; }

// Whether a team computes nothing. Without a mask, the row tells: then the number of the team needs no register.
fn is_past_end(team: u32, first: u32) -> bool {
    if (MASKED) { return team >= list[0]; }
    return first >= params.rows;
}

// The first of the four rows that a team computes.
fn first_row(team: u32) -> u32 {
    if (MASKED) { return list[list[2] + min(team, row_blocks() - 1u)] * 4u; }
    return team * 4u;
}

// Stores zeros in the blocks that the list leaves out. The teams that compute blocks share this work.
fn zero_left_out(team: u32, lane: u32) {
    let count = list[0];
    let teams = max(count, 1u);
    if (team >= teams) { return; }
    for (var i = count + team * LANES + lane; i < row_blocks(); i += teams * LANES) {
        let vector = (params.row0 >> 2u) + list[list[2] + i];
        for (var token = 0u; token < WIDTH; token += 1u) { y[token * params.y_stride + vector] = vec4<f32>(0.0); }
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let team = team_block(workgroup, thread);
    let first = first_row(team);
    let rows = rows_from(first);
    let dots = dot_rows(thread, rows, tensor_of(rows.x), tensor_of(rows.z));
    let norms = norm_scales(thread);
    if (MASKED) { zero_left_out(team, thread % LANES); }
    if (thread % LANES != 0u || is_past_end(team, first)) { return; }
    let scale = row_scales(rows);
    let offset = bias[((params.row0 + first) >> 2u) * params.has_bias];
    #each 0..WIDTH store(#u, first, fma(dots.c#, scale * norms.c#, offset));
}
