// Gated DeltaNet, one value head h a workgroup, the columns c of this run one after another, at positions p = pos + c:
//   q, k, v = silu(sum_j conv[j] * input at p - j);  q *= q_scale / |q|;  k /= |k|
//   beta = 1 / (1 + exp(-b));  decay = exp(-exp(a_log[h]) * softplus(a + dt_bias[h]))
//   S' = decay * S;  S = S' + k (beta * (v - S'^T k))^T;  o = S^T q;  y = o / sqrt(mean(o^2) + eps) * norm * silu(z)
// proj [columns, stride] has q, k, v, z, b, a where the parameters say; conv [channels q, k, v; taps, the newest last];
// gates [a_log, then dt_bias; value heads]; norm [value vectors]; y [columns, y_stride].
// state [slots, value heads, 4*key vectors, value vectors]: S after position p is in slot p % slots. ring [value heads,
// ring, 2*key + value vectors]: the inputs of q, k, v at position p are at p % ring; each value head has its own copy of
// its key head's, so that no workgroup overwrites what another still reads. So going back to a position is a matter of its
// number, for as many positions as there are slots and a ring of taps - 2 + slots or more; a run at position 0 reads neither.
struct Params {
    value_heads: u32,
    group: u32,          // neighbouring value heads that share a key head
    key_vectors: u32,    // vectors of 4 in a key head, at most 64
    value_vectors: u32,  // vectors of 4 in a value head, at most 64
    taps: u32,
    ring: u32,           // positions whose inputs are kept, at least taps
    slots: u32,          // states that are kept
    stride: u32,         // vectors from one column of proj to the next
    key_stride: u32,     // vectors from one key head's q to the next one's, and likewise of k
    k_at: u32,           // where the first k begins, in vectors
    v_at: u32,           // where the first v begins
    z_at: u32,           // where the first z begins
    value_stride: u32,   // vectors from the v of one key head's value heads to that of the next one's, and likewise of z
    b_at: u32,           // where the first b is, in elements
    a_at: u32,           // where the first a is
    gate_stride: u32,    // elements from the b of one key head's value heads to that of the next one's, and likewise of a
    q_scale: f32,
    length_eps: f32,     // added to the squares of q and k
    eps: f32,            // added to the mean of squares of o
    y_stride: u32,       // vectors of 4 from one column of y to the next
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ctl: Ctl;
@group(0) @binding(2) var<storage, read> proj: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> conv: array<f32>;
@group(0) @binding(4) var<storage, read> gates: array<f32>;
@group(0) @binding(5) var<storage, read> norm: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> ring: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> state: array<vec4<f32>>;
@group(0) @binding(8) var<storage, read_write> y: array<vec4<f32>>;
// q and k from vector 64 on, v from vector 128 on.
const K: u32 = 64u;
const V: u32 = 128u;
var<workgroup> mixed: array<vec4<f32>, 192>;
var<workgroup> parts: array<vec4<f32>, THREADS>;
var<workgroup> outputs: array<vec4<f32>, 64>;

fn sigmoid(x: vec4<f32>) -> vec4<f32> {
    // Past 87 exp overflows.
    return vec4<f32>(1.0) / (vec4<f32>(1.0) + exp(min(-x, vec4<f32>(87.0))));
}

// max(x, 0) + log(1 + exp(-|x|)); the logarithm as 2 atanh(u / (2 + u)), since drivers' log is coarse near 1.
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

fn element(i: u32) -> f32 { return proj[i >> 2u][i & 3u]; }

// Element i of the mixed vectors from `first` on.
fn mixed_element(first: u32, i: u32) -> f32 { return mixed[first + (i >> 2u)][i & 3u]; }

// The sum over all threads of one lane, in order.
fn lane_total(lane: u32, count: u32) -> vec4<f32> {
    var total = vec4<f32>(0.0);
    for (var i = 0u; i < count; i += 1u) {
        total += parts[i * params.value_vectors + lane];
    }
    return total;
}

fn squares_of(first: u32, count: u32) -> f32 {
    var sum = 0.0;
    for (var i = 0u; i < count; i += 1u) {
        sum += square_sum(mixed[first + i]);
    }
    return sum;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let head = group.x;
    let key_head = head / params.group;
    let within = head % params.group;
    let key_heads = params.value_heads / params.group;
    // 1, but not by uniforms alone.
    let one = min(ctl.columns, 1u);
    let key_vectors = params.key_vectors * one;
    let value_vectors = params.value_vectors * one;
    let inputs = 2u * key_vectors + value_vectors;
    let lane = thread % params.value_vectors;
    let first_row = thread / params.value_vectors;
    let row_step = THREADS / params.value_vectors;
    let rows = select(4u * key_vectors, 0u, first_row >= row_step);
    let z = params.z_at + key_head * params.value_stride + within * params.value_vectors + lane;
    let gate_index = key_head * params.gate_stride + within;
    let rate = exp(min(gates[head], 80.0));
    let dt_bias = gates[params.value_heads + head];

    for (var c = 0u; c < ctl.columns; c += 1u) {
        let pos = ctl.pos + c;
        let column = c * params.stride;
        for (var i = thread; i < inputs; i += THREADS) {
            let is_value = i >= 2u * key_vectors;
            let is_key = i >= key_vectors && !is_value;
            let j = i - select(0u, key_vectors, is_key) - select(0u, 2u * key_vectors, is_value);
            var source = key_head * params.key_stride + select(0u, params.k_at, is_key) + j;
            var channel = (select(0u, key_heads, is_key) + key_head) * params.key_vectors + j;
            if (is_value) {
                source = params.v_at + key_head * params.value_stride + within * params.value_vectors + j;
                channel = 2u * key_heads * params.key_vectors + head * params.value_vectors + j;
            }
            let taps = params.taps * one;
            var sum = vec4<f32>(0.0);
            for (var lag = 0u; lag < taps; lag += 1u) {
                var x = vec4<f32>(0.0);
                if (lag <= c) {
                    x = proj[column - lag * params.stride + source];
                } else if (lag <= pos) {
                    x = ring[(head * params.ring + (pos - lag) % params.ring) * inputs + i];
                }
                let w = 4u * channel * params.taps + params.taps - 1u - lag;
                sum = fma(vec4<f32>(conv[w], conv[w + params.taps], conv[w + 2u * params.taps],
                    conv[w + 3u * params.taps]), x, sum);
            }
            ring[(head * params.ring + pos % params.ring) * inputs + i] = proj[column + source];
            mixed[select(select(0u, K, is_key), V, is_value) + j] = sum * sigmoid(sum);
        }
        workgroupBarrier();

        let q_factor = params.q_scale / sqrt(squares_of(0u, key_vectors) + params.length_eps);
        let k_factor = 1.0 / sqrt(squares_of(K, key_vectors) + params.length_eps);
        let beta = sigmoid(vec4<f32>(element(4u * column + params.b_at + gate_index))).x;
        let a = element(4u * column + params.a_at + gate_index);
        let decay = exp(-min(rate * softplus(a + dt_bias), 87.0));
        let before = ((pos + params.slots - 1u) % params.slots) * params.value_heads + head;
        let after = (pos % params.slots) * params.value_heads + head;
        let read = before * 4u * params.key_vectors * params.value_vectors + lane;
        let write = after * 4u * params.key_vectors * params.value_vectors + lane;

        var seen = vec4<f32>(0.0);
        for (var row = first_row; row < rows; row += row_step) {
            let s = select(state[read + row * params.value_vectors], vec4<f32>(0.0), pos == 0u);
            seen = fma(vec4<f32>(mixed_element(K, row)), s, seen);
        }
        parts[thread] = seen;
        workgroupBarrier();
        let known = lane_total(lane, row_step * one) * (decay * k_factor);
        let delta = (mixed[V + lane] - known) * (beta * k_factor);
        // The parts are used again.
        workgroupBarrier();
        var o = vec4<f32>(0.0);
        for (var row = first_row; row < rows; row += row_step) {
            let s = select(state[read + row * params.value_vectors], vec4<f32>(0.0), pos == 0u);
            let next = fma(vec4<f32>(mixed_element(K, row)), delta, s * decay);
            state[write + row * params.value_vectors] = next;
            o = fma(vec4<f32>(mixed_element(0u, row)), next, o);
        }
        parts[thread] = o;
        workgroupBarrier();
        let output = lane_total(lane, row_step * one) * q_factor;
        if (thread < value_vectors) { outputs[thread] = output; }
        workgroupBarrier();
        if (thread < value_vectors) {
            var sum = 0.0;
            for (var i = 0u; i < value_vectors; i += 1u) {
                sum += square_sum(outputs[i]);
            }
            let scale = 1.0 / sqrt(sum / f32(4u * params.value_vectors) + params.eps);
            let g = proj[column + z];
            y[c * params.y_stride + head * params.value_vectors + thread] = output * scale * norm[thread] * g * sigmoid(g);
        }
    }
}
