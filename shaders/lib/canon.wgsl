// The canonical order of a sum: 32 logical lanes, each summing every 32nd unit, joined by an XOR tree 16, 8, 4, 2, 1.
// A team of fewer physical lanes visits several logical lanes each, in bit-reversed order, and joins them on this stack,
// so that every subgroup size and the workgroup-memory variant give the same bits.
const LOGICAL_LANES: u32 = 32u;
const STEPS: u32 = LOGICAL_LANES / LANES;

struct Joined { a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32> }

// The logical lane that a physical lane visits in its given step.
fn logical_lane(lane: u32, step: u32) -> u32 {
    return lane + LANES * (reverseBits(step) >> ((32u - firstTrailingBit(STEPS)) & 31u));
}

// Adds the value of step `step` to the stack.
fn join(stack: ptr<function, Joined>, step: u32, value: vec4<f32>) {
    var v = value;
    if ((step & 1u) == 0u) { (*stack).a = v; return; }
    v = (*stack).a + v;
    if ((step & 2u) == 0u) { (*stack).b = v; return; }
    v = (*stack).b + v;
    if ((step & 4u) == 0u) { (*stack).c = v; return; }
    (*stack).d = (*stack).c + v;
}

// The sum of all steps of this physical lane.
fn joined(stack: ptr<function, Joined>) -> vec4<f32> {
    if (STEPS == 1u) { return (*stack).a; }
    if (STEPS == 2u) { return (*stack).b; }
    if (STEPS == 4u) { return (*stack).c; }
    return (*stack).d;
}
