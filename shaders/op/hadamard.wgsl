// y[c] = H(s * x[c]), or inverse: y[c] = s * H(x[c]), for the tokens c of this run.
// H is the blockwise Walsh-Hadamard matrix: H[i][j] = (-1)^popcount(i & j) / sqrt(block) for i and j in one block.
// x [tokens, x_stride vectors]; signs [vectors], each 1 or -1; y [tokens, y_stride vectors].
// A workgroup computes HADAMARD_TILE elements of a token in three rounds. In each round a thread has 16 elements that
// are 1, 16 or 256 apart, and adds and subtracts those whose indices differ in one bit. Bits past the block are skipped
// by a select: the code has no branch or loop that depends on a uniform, and every barrier is reached.

#import tokens

const ROUND: u32 = 16u;

var<workgroup> values: array<f32, HADAMARD_TILE>;

struct Sixteen { a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32> }

// Sums and differences of elements whose indices differ in one of four bits. `distance`: how far the elements of a
// thread are apart.
fn butterflies(v: Sixteen, distance: u32) -> Sixteen {
    let bit0 = distance < params.block;
    let bit1 = distance * 2u < params.block;
    let bit2 = distance * 4u < params.block;
    let bit3 = distance * 8u < params.block;
    var r = Sixteen(
        pairs(v.a, bit0, bit1), pairs(v.b, bit0, bit1), pairs(v.c, bit0, bit1), pairs(v.d, bit0, bit1));
    r = Sixteen(
        select(r.a, r.a + r.b, bit2), select(r.b, r.a - r.b, bit2),
        select(r.c, r.c + r.d, bit2), select(r.d, r.c - r.d, bit2));
    return Sixteen(
        select(r.a, r.a + r.c, bit3), select(r.b, r.b + r.d, bit3),
        select(r.c, r.a - r.c, bit3), select(r.d, r.b - r.d, bit3));
}

// The first two of the four bits: those within a vector.
fn pairs(v: vec4<f32>, bit0: bool, bit1: bool) -> vec4<f32> {
    let u = select(v, vec4<f32>(v.x + v.y, v.x - v.y, v.z + v.w, v.z - v.w), bit0);
    return select(u, vec4<f32>(u.x + u.z, u.y + u.w, u.x - u.z, u.y - u.w), bit1);
}

fn load_four(first: u32, distance: u32) -> vec4<f32> {
    return vec4<f32>(
        values[first], values[first + distance], values[first + 2u * distance], values[first + 3u * distance]);
}

fn keep_four(first: u32, distance: u32, v: vec4<f32>) {
    values[first] = v.x;
    values[first + distance] = v.y;
    values[first + 2u * distance] = v.z;
    values[first + 3u * distance] = v.w;
}

fn keep(first: u32, distance: u32, v: Sixteen) {
    keep_four(first, distance, v.a);
    keep_four(first + 4u * distance, distance, v.b);
    keep_four(first + 8u * distance, distance, v.c);
    keep_four(first + 12u * distance, distance, v.d);
}

// One round over elements that other threads have kept.
fn round(first: u32, distance: u32) {
    let v = Sixteen(
        load_four(first, distance), load_four(first + 4u * distance, distance),
        load_four(first + 8u * distance, distance), load_four(first + 12u * distance, distance));
    keep(first, distance, butterflies(v, distance));
}

// Vector i of x times its signs; zeros past the end. The inverse takes the signs later.
fn load(c: u32, i: u32) -> vec4<f32> {
    if (i >= params.vectors) { return vec4<f32>(0.0); }
    return x[c * params.x_stride + i] * select(signs[i], vec4<f32>(1.0), params.inverse != 0u);
}

fn store(c: u32, i: u32, at: u32) {
    if (i >= params.vectors) { return; }
    let v = load_four(at, 1u) * params.factor;
    y[c * params.y_stride + i] = v * select(vec4<f32>(1.0), signs[i], params.inverse != 0u);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let c = workgroup.y;
    if (c >= batch.count) { return; }
    let tile = workgroup.x * (HADAMARD_TILE / 4u);
    let first = tile + thread * 4u;
    let v = Sixteen(load(c, first), load(c, first + 1u), load(c, first + 2u), load(c, first + 3u));
    keep(thread * ROUND, 1u, butterflies(v, 1u));
    workgroupBarrier();
    round(thread / 16u * 256u + thread % 16u, 16u);
    workgroupBarrier();
    round(thread, 256u);
    workgroupBarrier();
    for (var i = thread; i < HADAMARD_TILE / 4u; i += THREADS) {
        store(c, tile + i, i * 4u);
    }
}
