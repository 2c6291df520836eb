// The canonical order of a row's sum: 32 logical lanes, each of which sums every 32nd group, and an XOR tree with the
// distances 16, 8, 4, 2, 1 that adds the lanes. In a team of fewer than 32 physical lanes, each lane visits several
// logical lanes. It visits them in bit-reversed order and adds their sums on a stack, which computes the first levels
// of the same tree. So every kind of team gives the same bits.
// Needs: LANES.
const LOGICAL_LANES: u32 = 32u;
// Logical lanes that one physical lane visits.
const LANE_VISITS: u32 = LOGICAL_LANES / LANES;

// Sums of 1, 2, 4 and 8 visited lanes.
struct SumStack { a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32> }

// The logical lane of a physical lane's visit number `visit`.
fn logical_lane(lane: u32, visit: u32) -> u32 {
    return lane + LANES * (reverseBits(visit) >> ((32u - firstTrailingBit(LANE_VISITS)) & 31u));
}

// Adds the sum of visit number `visit`; visits come in order.
fn push_sum(stack: ptr<function, SumStack>, visit: u32, value: vec4<f32>) {
    var v = value;
    if ((visit & 1u) == 0u) { (*stack).a = v; return; }
    v = (*stack).a + v;
    if ((visit & 2u) == 0u) { (*stack).b = v; return; }
    v = (*stack).b + v;
    if ((visit & 4u) == 0u) { (*stack).c = v; return; }
    (*stack).d = (*stack).c + v;
}

// The sum of all visits.
fn stack_sum(stack: ptr<function, SumStack>) -> vec4<f32> {
    if (LANE_VISITS == 1u) { return (*stack).a; }
    if (LANE_VISITS == 2u) { return (*stack).b; }
    if (LANE_VISITS == 4u) { return (*stack).c; }
    return (*stack).d;
}
