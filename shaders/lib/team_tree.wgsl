// A team of 32 consecutive threads that add their values through workgroup memory, in the XOR order of
// team_subgroup.wgsl.
var<workgroup> team_values: array<vec4<f32>, THREADS>;

// Adds a value over the threads of the team; all of them get the sum. All threads of the workgroup must call it.
fn team_sum(thread: u32, value: vec4<f32>) -> vec4<f32> {
    var v = value;
    for (var offset = 16u; offset > 0u; offset >>= 1u) {
        team_values[thread] = v;
        workgroupBarrier();
        v += team_values[thread ^ offset];
        workgroupBarrier();
    }
    return v;
}
