// A sum over the threads of a workgroup, in their order.

var<workgroup> sums: array<f32, THREADS>;

// The sum of the numbers that all threads pass. Every thread must call it.
fn sum_of_threads(thread: u32, number: f32) -> f32 {
    sums[thread] = number;
    workgroupBarrier();
    var total = 0.0;
    for (var t = 0u; t < THREADS; t += 1u) {
        total += sums[t];
    }
    // The next sum writes `sums` again.
    workgroupBarrier();
    return total;
}
