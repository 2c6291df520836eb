// A team is 32 neighbouring threads that join their sums in workgroup memory, in the same XOR order as subgroups do.
var<workgroup> team_values: array<vec4<f32>, TEAM_THREADS>;

fn team_sum(thread: u32, value: vec4<f32>) -> vec4<f32> {
    var v = value;
    for (var step = 16u; step > 0u; step >>= 1u) {
        team_values[thread] = v;
        workgroupBarrier();
        v += team_values[thread ^ step];
        workgroupBarrier();
    }
    return v;
}
