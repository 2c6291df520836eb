// How many steps a loop takes that should take 2048 for each word of `out`: some drivers end loops early and say nothing.
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@compute @workgroup_size(1)
fn main() {
    let wanted = arrayLength(&out) * 2048u;
    var state = 1u;
    var steps = 0u;
    while (steps < wanted) {
        state = state * 1664525u + 1013904223u;
        // The state is not 0 so soon, but nobody can know that the count is a simple one.
        steps += select(1u, 2u, state == 0u);
    }
    out[0] = steps;
}
