// What the two attention kernels have in common, so that a token's result does not depend on which of them computes it:
// largest
// scores, and sums over the values of a block, for four queries at once.
// Needs: `weights`, vectors of exp(score - largest score) of four queries; `maxima`, a vector for each 8 threads; `v_cache`;
// params.head_vectors.

#import kv
#import share

fn shared_weights(own: vec4<f32>, lane: u32, at: u32) -> vec4<f32> {
    if (SHARES) { return shared_from(own, lane); }
    return weights[at];
}

// Sums over the positions of a block for four queries: of the weights, and of the weights times one vector of the values.
struct BlockSums { l: vec4<f32>, b0: vec4<f32>, b1: vec4<f32>, b2: vec4<f32>, b3: vec4<f32> }

fn add_value(s: BlockSums, w: vec4<f32>, v: vec4<f32>) -> BlockSums {
    return BlockSums(
        s.l + w,
        #each 0..4 fma(vec4<f32>(w[#]), v, s.b#),
    );
}

// Vector i of the values of a position of the block whose page begins at row `page`. Positions past the last one of
// `count` repeat it; their weights are 0.
fn value_at(page: u32, count: u32, j: u32, i: u32) -> vec4<f32> {
    return kv_unpack(v_cache[(page + min(j, count - 1u)) * params.head_vectors + i]);
}

// The sums for vector i of the head. `count`: cached positions of the block; `weights_at`: where the weights begin, the
// same for all lanes of a subgroup of 8; `lane`: of that subgroup.
fn block_sums(page: u32, count: u32, weights_at: u32, i: u32, lane: u32) -> BlockSums {
    var s = BlockSums();
    // Without sharing, eight positions in a step would take too many registers.
    for (var j = 0u; j < count; j += select(4u, 8u, SHARES)) {
        let at = weights_at + j;
        var own = vec4<f32>(0.0);
        if (SHARES) { own = weights[at + lane]; }
        #each 0..4 let v# = value_at(page, count, j + #u, i);
        #each 0..4 s = add_value(s, shared_weights(own, #u, at + #u), v#);
        if (SHARES) {
            #each 4..8 let v# = value_at(page, count, j + #u, i);
            #each 4..8 s = add_value(s, shared_weights(own, #u, at + #u), v#);
        }
    }
    return s;
}

// The largest scores of each 8 threads: leaves them in `maxima`, and ends with a barrier. Overwrites `weights`.
fn find_largest(score: vec4<f32>, thread: u32) {
    if (SHARES) {
        let m = shared_max(shared_max(shared_max(score, 1u), 2u), 4u);
        if (thread % 8u == 0u) { maxima[thread / 8u] = m; }
    } else {
        weights[thread] = score;
        workgroupBarrier();
        if (thread % 8u == 0u) {
            var m = score;
            #each 1..8 m = max(m, weights[thread + #u]);
            maxima[thread / 8u] = m;
        }
    }
    workgroupBarrier();
}
