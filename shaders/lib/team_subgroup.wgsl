// A team of LANES consecutive lanes of one subgroup. LANES is the subgroup size of the device, at most 32.
// Adds a value over the lanes of the team; all of them get the sum.
fn team_sum(lane: u32, value: vec4<f32>) -> vec4<f32> {
    var v = value;
    if (LANES > 16u) { v += subgroupShuffleXor(v, 16u); }
    if (LANES > 8u) { v += subgroupShuffleXor(v, 8u); }
    if (LANES > 4u) { v += subgroupShuffleXor(v, 4u); }
    v += subgroupShuffleXor(v, 2u);
    v += subgroupShuffleXor(v, 1u);
    return v;
}
