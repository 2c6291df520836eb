// out[0] = the iterations of a loop that should take 2048 for each word of `out`. Some drivers end long loops early,
// without an error.
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@compute @workgroup_size(1)
fn main() {
    let wanted = arrayLength(&out) * 2048u;
    var state = 1u;
    var steps = 0u;
    while (steps < wanted) {
        state = state * 1664525u + 1013904223u;
        // The state does not become 0 within so few iterations, but the compiler cannot know that and replace the loop.
        steps += select(1u, 2u, state == 0u);
    }
    out[0] = steps;
}
