// y[first + c] = x[c], for the tokens c of this run.
// x [tokens, vectors]; y [rows, vectors]. A thread copies 4 elements.

#import tokens

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = workgroup.x * THREADS + thread;
    let c = workgroup.y;
    if (i >= params.vectors || c >= batch.count) { return; }
    y[(params.first + c) * params.vectors + i] = x[c * params.vectors + i];
}
