// Gated DeltaNet for one value head h. For each token c of this run, in order, at position p of its sequence:
//   q, k, v = silu(sum_j conv[j] * input at p - j);  q *= q_scale / |q|;  k /= |k|
//   beta = 1 / (1 + exp(-b));  decay = exp(-exp(a_log[h]) * softplus(a + dt_bias[h]))
//   S' = decay * S;  S = S' + k (beta * (v - S'^T k))^T;  o = S^T q;  y = o / sqrt(mean(o^2) + eps) * norm * silu(z)
// proj [tokens, stride vectors]: q, k, v, z, b, a at the offsets that the parameters give;
// conv [channels of q, k, v; taps, the newest last]; gates: a_log [value heads], then dt_bias [value heads];
// norm [value vectors]; y [tokens, y_stride vectors];
// state [slots, states, value heads, 4*key vectors, value vectors]: S after position p is in state p % states;
// ring [slots, value heads, ring, 2*key + value vectors]: the inputs of q, k, v at position p are in entry p % ring.
// Each value head has its own copy of the inputs of its key head, so that no workgroup overwrites inputs that another
// one has yet to read.
// After position p, a sequence can go back and continue at any position from p - states + 2, without a copy, if the
// ring has at least taps - 2 + states entries. A token at position 0 reads neither state nor ring.
// A workgroup computes one value head. A thread has one vector of 4 columns of S, and every row_step-th row.

#import vector
#import tokens

// Vectors of `mixed` at which k and v begin; q begins at 0.
const K: u32 = 64u;
const V: u32 = 128u;
// q, k and v after convolution and silu.
var<workgroup> mixed: array<vec4<f32>, 192>;
var<workgroup> partials: array<vec4<f32>, THREADS>;
var<workgroup> outputs: array<vec4<f32>, 64>;

fn sigmoid(x: vec4<f32>) -> vec4<f32> {
    // exp overflows for arguments above 88.
    return vec4<f32>(1.0) / (vec4<f32>(1.0) + exp(min(-x, vec4<f32>(87.0))));
}

// log(1 + exp(x)) = max(x, 0) + log(1 + u) with u = exp(-|x|). The logarithm is computed as 2 atanh(u / (2 + u)),
// because log is inexact near 1 in many drivers.
fn softplus(x: f32) -> f32 {
    let u = exp(-min(abs(x), 87.0));
    let s = u / (2.0 + u);
    let t = s * s;
    var sum = fma(t, 1.0 / 13.0, 1.0 / 11.0);
    sum = fma(t, sum, 1.0 / 9.0);
    sum = fma(t, sum, 1.0 / 7.0);
    sum = fma(t, sum, 1.0 / 5.0);
    sum = fma(t, sum, 1.0 / 3.0);
    return max(x, 0.0) + 2.0 * fma(s * t, sum, s);
}

// Element i of `proj`.
fn element(i: u32) -> f32 { return proj[i >> 2u][i & 3u]; }

// Element i of `mixed`, counted from vector `first`.
fn mixed_element(first: u32, i: u32) -> f32 { return mixed[first + (i >> 2u)][i & 3u]; }

// The sum of `partials` over the `count` threads that computed this vector, in order.
fn total_of_vector(vector: u32, count: u32) -> vec4<f32> {
    var total = vec4<f32>(0.0);
    for (var i = 0u; i < count; i += 1u) {
        total += partials[i * params.value_vectors + vector];
    }
    return total;
}

// The sum of squares of `count` vectors of `mixed`.
fn squares_of(first: u32, count: u32) -> f32 {
    var sum = 0.0;
    for (var i = 0u; i < count; i += 1u) {
        sum += square_sum(mixed[first + i]);
    }
    return sum;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let head = workgroup.x;
    let key_head = head / params.heads_per_key;
    let head_in_group = head % params.heads_per_key;
    let key_heads = params.value_heads / params.heads_per_key;
    // Tiled order: the first value head of every key head, then the second of each.
    let y_head = select(head, head_in_group * key_heads + key_head, params.y_tiled != 0u);
    // 1. As a factor it makes loop bounds depend on a storage buffer, see run_groups.wgsl.
    let one = min(batch.count, 1u);
    let key_vectors = params.key_vectors * one;
    let value_vectors = params.value_vectors * one;
    let inputs = 2u * key_vectors + value_vectors;
    let vector = thread % params.value_vectors;
    let first_row = thread / params.value_vectors;
    let row_step = THREADS / params.value_vectors;
    let rows = select(4u * key_vectors, 0u, first_row >= row_step);
    let z = params.z_at + key_head * params.value_stride + head_in_group * params.value_vectors + vector;
    let gate_index = key_head * params.gate_stride + head_in_group;
    let rate = exp(min(gates[head], 80.0));
    let dt_bias = gates[params.value_heads + head];

    // How many tokens directly before token c of this run are its predecessors in the sequence.
    var before_in_run = 0u;
    for (var c = 0u; c < batch.count; c += 1u) {
        let record = batch.tokens[c];
        let pos = record.position;
        before_in_run = select(0u, before_in_run + 1u, c != 0u && follows(record, batch.tokens[max(c, 1u) - 1u]));
        let token = c * params.stride;
        let head_ring = (record.slot * params.value_heads + head) * params.ring;
        for (var i = thread; i < inputs; i += THREADS) {
            let is_value = i >= 2u * key_vectors;
            let is_key = i >= key_vectors && !is_value;
            let j = i - select(0u, key_vectors, is_key) - select(0u, 2u * key_vectors, is_value);
            var source = key_head * params.key_stride + select(0u, params.k_at, is_key) + j;
            var channel = (select(0u, key_heads, is_key) + key_head) * params.key_vectors + j;
            if (is_value) {
                source = params.v_at + key_head * params.value_stride + head_in_group * params.value_vectors + j;
                channel = 2u * key_heads * params.key_vectors + head * params.value_vectors + j;
            }
            let taps = params.taps * one;
            var sum = vec4<f32>(0.0);
            for (var lag = 0u; lag < taps; lag += 1u) {
                var x = vec4<f32>(0.0);
                if (lag <= before_in_run) {
                    x = proj[token - lag * params.stride + source];
                } else if (lag <= pos) {
                    x = ring[(head_ring + (pos - lag) % params.ring) * inputs + i];
                }
                let w = 4u * channel * params.taps + params.taps - 1u - lag;
                sum = fma(vec4<f32>(conv[w], conv[w + params.taps], conv[w + 2u * params.taps],
                    conv[w + 3u * params.taps]), x, sum);
            }
            ring[(head_ring + pos % params.ring) * inputs + i] = proj[token + source];
            mixed[select(select(0u, K, is_key), V, is_value) + j] = sum * sigmoid(sum);
        }
        workgroupBarrier();

        let q_factor = params.q_scale / sqrt(squares_of(0u, key_vectors) + params.length_eps);
        let k_factor = 1.0 / sqrt(squares_of(K, key_vectors) + params.length_eps);
        let beta = sigmoid(vec4<f32>(element(4u * token + params.b_at + gate_index))).x;
        let a = element(4u * token + params.a_at + gate_index);
        let decay = exp(-min(rate * softplus(a + dt_bias), 87.0));
        let before = state_index(record.slot, pos + params.states - 1u, params.states) * params.value_heads + head;
        let after = state_index(record.slot, pos, params.states) * params.value_heads + head;
        let read = before * 4u * params.key_vectors * params.value_vectors + vector;
        let write = after * 4u * params.key_vectors * params.value_vectors + vector;

        var prediction = vec4<f32>(0.0);
        for (var row = first_row; row < rows; row += row_step) {
            let s = select(state[read + row * params.value_vectors], vec4<f32>(0.0), pos == 0u);
            prediction = fma(vec4<f32>(mixed_element(K, row)), s, prediction);
        }
        partials[thread] = prediction;
        workgroupBarrier();
        let predicted = total_of_vector(vector, row_step * one) * (decay * k_factor);
        let delta = (mixed[V + vector] - predicted) * (beta * k_factor);
        // `partials` is written again.
        workgroupBarrier();
        var o = vec4<f32>(0.0);
        for (var row = first_row; row < rows; row += row_step) {
            let s = select(state[read + row * params.value_vectors], vec4<f32>(0.0), pos == 0u);
            let next = fma(vec4<f32>(mixed_element(K, row)), delta, s * decay);
            state[write + row * params.value_vectors] = next;
            o = fma(vec4<f32>(mixed_element(0u, row)), next, o);
        }
        partials[thread] = o;
        workgroupBarrier();
        let output = total_of_vector(vector, row_step * one) * q_factor;
        if (thread < value_vectors) { outputs[thread] = output; }
        workgroupBarrier();
        if (thread < value_vectors) {
            var sum = 0.0;
            for (var i = 0u; i < value_vectors; i += 1u) {
                sum += square_sum(outputs[i]);
            }
            let scale = 1.0 / sqrt(sum / f32(4u * params.value_vectors) + params.eps);
            let g = proj[token + z];
            y[c * params.y_stride + y_head * params.value_vectors + thread] = output * scale * norm[thread] * g * sigmoid(g);
        }
    }
}
