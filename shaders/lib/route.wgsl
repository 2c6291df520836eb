// Which experts a token takes, and with which weights. The logits of a token begin at word `base` of `router`, as
// bits. Experts are ranked by score + bias, or, if there are no biases, by their logits, which have the same order as
// the scores. If two are equal, the one with the lower index is first.
// Needs: `experts`, `router`.

#import experts

var<workgroup> keys: array<vec4<u32>, MAX_EXPERTS / 4u>;
var<workgroup> lane_values: array<f32, 32>;
// The chosen experts by rank.
var<workgroup> chosen: array<u32, MAX_TOP_K>;

fn logit(at: u32) -> f32 { return bitcast<f32>(router[at]); }

fn sigmoid(v: f32) -> f32 { return 1.0 / (1.0 + exp(min(-v, 87.0))); }

// The largest logit, and the sum of exp(logit - largest), which is made of 32 partial sums. All threads take part.
fn softmax_of(thread: u32, base: u32) -> vec2<f32> {
    if (thread < 32u) {
        var largest = logit(base);
        for (var e = thread; e < experts.count; e += 32u) { largest = max(largest, logit(base + e)); }
        lane_values[thread] = largest;
    }
    workgroupBarrier();
    var largest = lane_values[0];
    for (var lane = 1u; lane < 32u; lane += 1u) { largest = max(largest, lane_values[lane]); }
    workgroupBarrier();
    if (thread < 32u) {
        var sum = 0.0;
        for (var e = thread; e < experts.count; e += 32u) { sum += exp(logit(base + e) - largest); }
        lane_values[thread] = sum;
    }
    workgroupBarrier();
    var total = 0.0;
    for (var lane = 0u; lane < 32u; lane += 1u) { total += lane_values[lane]; }
    return vec2<f32>(largest, total);
}

// The score of logit v.
fn score(v: f32, softmax: vec2<f32>) -> f32 {
    return select(exp(min(v - softmax.x, 0.0)) / softmax.y, sigmoid(v), experts.sigmoid != 0u);
}

// An integer that orders like v. Both zeros have the same integer. A NaN has one too, so the ranks are always a
// permutation. The largest u32 is not used, because rank_experts adds 1.
fn sortable(v: f32) -> u32 {
    let bits = bitcast<u32>(select(v, 0.0, v == 0.0));
    return min(select(bits | 0x80000000u, ~bits, (bits >> 31u) != 0u), 0xfffffffeu);
}

// The key by which an expert is ranked.
fn key(base: u32, expert: u32, softmax: vec2<f32>) -> u32 {
    // Padding after the last expert is never ranked before an expert.
    if (expert >= experts.count) { return 0u; }
    var v = logit(base + expert);
    if (experts.biased != 0u) { v = score(v, softmax) + experts.all[expert].bias; }
    return sortable(v);
}

// Fills `chosen`; a barrier must follow. The rank of an expert is the number of experts with a larger key, or with an
// equal key and a lower index.
fn rank_experts(thread: u32, base: u32) {
    var softmax = vec2<f32>(0.0, 1.0);
    if (experts.biased != 0u) { softmax = softmax_of(thread, base); }
    for (var four = thread; four * 4u < experts.count; four += THREADS) {
        let e = four * 4u;
        keys[four] = vec4<u32>(
            key(base, e, softmax), key(base, e + 1u, softmax), key(base, e + 2u, softmax), key(base, e + 3u, softmax),
        );
    }
    workgroupBarrier();
    for (var e = thread; e < experts.count; e += THREADS) {
        let own_key = vec4<u32>(keys[e >> 2u][e & 3u]);
        var better = vec4<u32>(0u);
        for (var four = 0u; four * 4u < experts.count; four += 1u) {
            let experts_here = vec4<u32>(four * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
            let earlier = select(vec4<u32>(0u), vec4<u32>(1u), experts_here < vec4<u32>(e));
            better += select(vec4<u32>(0u), vec4<u32>(1u), keys[four] + earlier > own_key);
        }
        let rank = (better.x + better.y) + (better.z + better.w);
        if (rank < experts.top_k) { chosen[rank] = e; }
    }
}

// The weight of the expert with this rank.
fn route_weight(base: u32, rank: u32, softmax: vec2<f32>) -> f32 {
    var sum = 0.0;
    for (var r = 0u; r < experts.top_k; r += 1u) { sum += score(logit(base + chosen[r]), softmax); }
    let own = score(logit(base + chosen[rank]), softmax);
    // The sum is 0 if all sigmoids underflow.
    return experts.scale * select(own, own / max(sum, 1e-20), experts.renormalise != 0u);
}

// The weight of the shared expert.
fn shared_weight(base: u32) -> f32 {
    if (experts.gate == ABSENT) { return 1.0; }
    return sigmoid(logit(base + experts.gate));
}
