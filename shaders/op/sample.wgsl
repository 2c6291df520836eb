// Chooses the tokens that follow the tokens of this run, and prepares the next run. The token after each token of the
// run is chosen as if the run had that token alone. The next token of the run is used only if its id is the one that
// was chosen. So the result does not depend on drafts.
// A choice is the lowest index of the largest logit, or a draw from softmax(logits / temperature) that is cut by
// top-k, top-p and min-p. Penalties of seen tokens are applied first.
// The draw does not sort. The probability of a token is an integer mass
// 2^31 * 2^((logit - max) * log2(e) / temperature), computed from tables by integer arithmetic. Thresholds come from
// radix histograms of counts and masses, and the draw walks the vocabulary in order. So equal logits give equal tokens
// on every device.
// logits [tokens, stride]; seen [vocab]: how often a token was sampled, and bit 31 for tokens of the prompt;
// settings as in `Settings`, whose tables are 1024 entries 2^31 * 2^(-i/1024) and 1024 entries 2^31 * 2^(-i/2^20).
// One workgroup, for the tokens of one slot.

#import tokens

struct Settings {
    greedy: u32,
    top_k: u32,        // 0 = all
    top_p: u32,        // in units of 2^-32; 0 = 1.0
    min_mass: u32,     // min-p in units of 2^-31 of the largest probability
    log2_scale: f32,   // log2(e) / temperature
    seed_low: u32,
    seed_high: u32,
    stops: u32,        // how many stop tokens follow
    penalised: u32,    // 1 = the penalties apply
    repeat: f32,       // the repeat penalty: factor of a seen token's negative logit
    repeat_inverse: f32,  // its inverse: factor of a positive one
    presence: f32,     // subtracted from the logit of a sampled token
    frequency: f32,    // subtracted as often as the token was sampled
    stop_tokens: array<vec4<u32>, 4>,
    tables: array<u32>,
}

var<workgroup> best_values: array<f32, THREADS>;
var<workgroup> best_tokens: array<u32, THREADS>;
var<workgroup> not_finite: atomic<u32>;
var<workgroup> bin_low: array<atomic<u32>, 256>;
var<workgroup> bin_high: array<atomic<u32>, 256>;
var<workgroup> low: array<u32, THREADS>;
var<workgroup> high: array<u32, THREADS>;
var<workgroup> ties: array<u32, THREADS>;
var<workgroup> shared_words: array<u32, 4>;
// Whether another token of the run is to be sampled after.
var<workgroup> running: u32;
// Index of the first logit of the current token.
var<private> base: u32;
// The slot of the run's tokens.
var<private> slot: u32;

// A logit after penalties.
fn logit(i: u32) -> f32 {
    let raw = logits[base + i];
    if (settings.penalised == 0u) { return raw; }
    let marks = seen[i];
    if (marks == 0u) { return raw; }
    let count = marks & 0x7fffffffu;
    let cost = fma(settings.frequency, f32(count), select(0.0, settings.presence, count != 0u));
    return fma(raw, select(settings.repeat, settings.repeat_inverse, raw > 0.0), -cost);
}

// An integer that orders like the logit.
fn key_of(value: f32) -> u32 {
    let raw = bitcast<u32>(value);
    // Both zeros have the same key.
    let bits = select(raw, 0u, raw == 0x80000000u);
    return select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u);
}

// The upper 32 bits of a * b.
fn mul_high(a: u32, b: u32) -> u32 {
    let al = a & 0xffffu;
    let ah = a >> 16u;
    let bl = b & 0xffffu;
    let bh = b >> 16u;
    let ll = al * bl;
    let m1 = ah * bl + (ll >> 16u);
    let m2 = al * bh + (m1 & 0xffffu);
    return ah * bh + (m1 >> 16u) + (m2 >> 16u);
}

// 64-bit sums as (low, high).
fn add64(a: vec2<u32>, b: u32) -> vec2<u32> {
    let sum = a.x + b;
    return vec2<u32>(sum, a.y + u32(sum < a.x));
}

fn add64x2(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let sum = a.x + b.x;
    return vec2<u32>(sum, a.y + b.y + u32(sum < a.x));
}

fn sub64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(a.x - b.x, a.y - b.y - u32(a.x < b.x));
}

fn less64(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.y < b.y || (a.y == b.y && a.x < b.x);
}

// floor(a * fraction / 2^32)
fn scale64(a: vec2<u32>, fraction: u32) -> vec2<u32> {
    return add64(vec2<u32>(a.y * fraction, mul_high(a.y, fraction)), mul_high(a.x, fraction));
}

// The mass of a token by its logit; 2^31 for the largest logit.
fn mass_of(value: f32, largest: f32) -> u32 {
    let fixed = u32(min((largest - value) * settings.log2_scale, 40.0) * 1048576.0);
    let a = settings.tables[(fixed >> 10u) & 1023u];
    let b = settings.tables[1024u + (fixed & 1023u)];
    // Both factors are scaled by 2^31; so is the product.
    let product = (mul_high(a, b) << 1u) | ((a * b) >> 31u);
    return select(product >> (fixed >> 20u), 0u, (fixed >> 20u) > 31u);
}

// Philox 2x32-10: 32 random bits from a counter (position, seed_high) and a key (seed_low).
fn random_bits(position: u32) -> u32 {
    var counter = vec2<u32>(position, settings.seed_high);
    var key = settings.seed_low;
    for (var round = 0u; round < 10u; round += 1u) {
        let h = mul_high(0xD256D193u, counter.x);
        let l = 0xD256D193u * counter.x;
        counter = vec2<u32>(h ^ key ^ counter.y, l);
        key += 0x9E3779B9u;
    }
    return counter.x;
}

// Sets all bins to 0. Ends with a barrier.
fn clear_bins(thread: u32) {
    for (var b = thread; b < 256u; b += THREADS) {
        atomicStore(&bin_low[b], 0u);
        atomicStore(&bin_high[b], 0u);
    }
    workgroupBarrier();
}

// Adds to a bin of 64 bits.
fn add_to_bin(b: u32, amount: u32) {
    let old = atomicAdd(&bin_low[b], amount);
    if (old + amount < old) { atomicAdd(&bin_high[b], 1u); }
}

// Walks the bins from the top until their sum reaches `wanted`. Stores the last bin in shared_words[0], and the share
// of `wanted` that falls into it in shared_words[1] and [2]. Thread 0 does the work. Begins and ends with a barrier.
fn find_bin(thread: u32, wanted: vec2<u32>) {
    workgroupBarrier();
    if (thread == 0u) {
        var rest = wanted;
        var b = 255u;
        for (; b > 0u; b -= 1u) {
            let here = vec2<u32>(atomicLoad(&bin_low[b]), atomicLoad(&bin_high[b]));
            if (!less64(here, rest)) { break; }
            rest = sub64(rest, here);
        }
        shared_words[0] = b;
        shared_words[1] = rest.x;
        shared_words[2] = rest.y;
    }
    workgroupBarrier();
}

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    slot = batch.tokens[0].slot;
    let first = batch.tokens[0].position;
    if (thread == 0u) {
        running = u32(slots[slot].stop == 0u && batch.count != 0u);
        if (slots[slot].stop == 0u) {
            slots[slot].count = 0u;
            slots[slot].drafted = max(batch.count, 1u) - 1u;
        }
    }
    var t = 0u;
    while (workgroupUniformLoad(&running) != 0u) {
        base = t * params.stride;
        if (thread == 0u) { atomicStore(&not_finite, 0u); }
        workgroupBarrier();
        let token = choose(thread, t);
        if (thread == 0u) { running = u32(record_token(t, token)); }
        // Makes the change of `seen` visible to all threads.
        storageBarrier();
        t += 1u;
    }
    let count = slots[slot].count;
    if (thread == 0u && t != 0u && count != 0u) {
        batch.tokens[0] = Token(slots[slot].sampled[count - 1u], slot, first + count, 0u);
        batch.count = 1u;
    }
}

// Chooses the token after token t of the run. All threads take part; only thread 0 has the result.
fn choose(thread: u32, t: u32) -> u32 {
    var value = -3.4e38;
    var token = 0u;
    for (var i = thread; i < params.vocab; i += THREADS) {
        let v = logit(i);
        if ((bitcast<u32>(v) & 0x7f800000u) == 0x7f800000u) { atomicStore(&not_finite, 1u); }
        if (v > value) { value = v; token = i; }
    }
    best_values[thread] = value;
    best_tokens[thread] = token;
    workgroupBarrier();
    // Every thread finds the same token: the largest logit, and among equals the lowest index.
    value = best_values[0];
    token = best_tokens[0];
    for (var other = 1u; other < THREADS; other += 1u) {
        let v = best_values[other];
        if (v > value || (v == value && best_tokens[other] < token)) { value = v; token = best_tokens[other]; }
    }
    if (settings.greedy == 0u) {
        token = draw(thread, value, t);
    }
    return token;
}

// Records the token that was chosen after token t of the run. Returns whether it is the run's next token. For one
// thread.
fn record_token(t: u32, token: u32) -> bool {
    if (atomicLoad(&not_finite) != 0u) {
        slots[slot].stop = 2u;
        return false;
    }
    slots[slot].sampled[t] = token;
    slots[slot].count = t + 1u;
    slots[slot].step += 1u;
    if (settings.penalised != 0u) { seen[token] += 1u; }
    for (var s = 0u; s < settings.stops; s += 1u) {
        if (settings.stop_tokens[s >> 2u][s & 3u] == token) { slots[slot].stop = 1u; }
    }
    return slots[slot].stop == 0u && t + 1u < batch.count && batch.tokens[t + 1u].id == token;
}

// Draws a token. All threads take part; only thread 0 needs the result.
fn draw(thread: u32, largest: f32, t: u32) -> u32 {
    // Tokens with keys above `edge` are kept, and the `edge_count` tokens with key `edge` that have the lowest indices.
    var edge = 0u;
    var edge_count = params.vocab;
    if (settings.top_k != 0u && settings.top_k < params.vocab) {
        edge = 0u;
        var wanted = vec2<u32>(settings.top_k, 0u);
        for (var shift = 24u; ; shift -= 8u) {
            clear_bins(thread);
            for (var i = thread; i < params.vocab; i += THREADS) {
                let key = key_of(logit(i));
                if (shift == 24u || (key >> (shift + 8u)) == (edge >> (shift + 8u))) {
                    add_to_bin((key >> shift) & 255u, 1u);
                }
            }
            find_bin(thread, wanted);
            edge |= shared_words[0] << shift;
            wanted = vec2<u32>(shared_words[1], shared_words[2]);
            workgroupBarrier();
            if (shift == 0u) { break; }
        }
        edge_count = wanted.x;
    }
    if (settings.top_p != 0u) {
        let total = kept_mass(thread, largest, edge, edge_count);
        // The smallest set whose mass reaches top_p of the total. The mass must be at least 1.
        var wanted = scale64(total, settings.top_p);
        if (wanted.x == 0u && wanted.y == 0u) { wanted.x = 1u; }
        let floor_edge = edge;
        var prefix = 0u;
        for (var shift = 24u; ; shift -= 8u) {
            clear_bins(thread);
            for (var i = thread; i < params.vocab; i += THREADS) {
                let v = logit(i);
                let key = key_of(v);
                if (key >= floor_edge && (shift == 24u || (key >> (shift + 8u)) == (prefix >> (shift + 8u)))) {
                    add_to_bin((key >> shift) & 255u, mass_of(v, largest));
                }
            }
            find_bin(thread, wanted);
            prefix |= shared_words[0] << shift;
            wanted = vec2<u32>(shared_words[1], shared_words[2]);
            workgroupBarrier();
            if (shift == 0u) { break; }
        }
        // All tokens at the edge have the same mass. As many are kept as are needed to reach `wanted`.
        let edge_mass = max(mass_of(value_of(prefix), largest), 1u);
        var needed = 0u;
        var reached = vec2<u32>(0u);
        for (; less64(reached, wanted) && needed < params.vocab; needed += 1u) {
            reached = add64(reached, edge_mass);
        }
        edge_count = select(needed, min(needed, edge_count), prefix == floor_edge);
        edge = prefix;
    }
    let total = kept_mass(thread, largest, edge, edge_count);
    if (thread == 0u) {
        var target_mass = scale64(total, random_bits(batch.tokens[t].position + 1u));
        var owner = 0u;
        for (; owner + 1u < THREADS; owner += 1u) {
            let here = vec2<u32>(low[owner], high[owner]);
            if (less64(target_mass, here)) { break; }
            target_mass = sub64(target_mass, here);
        }
        shared_words[0] = owner;
        shared_words[1] = target_mass.x;
        shared_words[2] = target_mass.y;
        shared_words[3] = best_tokens[0];
    }
    workgroupBarrier();
    if (thread == shared_words[0]) {
        let target_mass = vec2<u32>(shared_words[1], shared_words[2]);
        var sum = vec2<u32>(0u);
        var rank = ties[thread];
        let slice = (params.vocab + THREADS - 1u) / THREADS;
        for (var i = thread * slice; i < min((thread + 1u) * slice, params.vocab); i += 1u) {
            let v = logit(i);
            let mass = kept(key_of(v), mass_of(v, largest), edge, edge_count, rank);
            if (key_of(v) == edge) { rank += 1u; }
            sum = add64(sum, mass);
            if (mass != 0u && less64(target_mass, sum)) {
                shared_words[3] = i;
                break;
            }
        }
    }
    workgroupBarrier();
    return shared_words[3];
}

// The logit of a key, the inverse of key_of.
fn value_of(key: u32) -> f32 {
    return bitcast<f32>(select(~key, key & 0x7fffffffu, (key & 0x80000000u) != 0u));
}

// The mass of a token if it is kept, else 0. rank: the number of tokens at the edge with lower indices.
fn kept(key: u32, mass: u32, edge: u32, edge_count: u32, rank: u32) -> u32 {
    let keep = mass >= settings.min_mass && (key > edge || (key == edge && rank < edge_count));
    return select(0u, mass, keep);
}

// The mass of all kept tokens. Stores the mass of each thread's slice of the vocabulary in `low` and `high`, and the
// number of edge tokens before the slice in `ties`. All threads take part.
fn kept_mass(thread: u32, largest: f32, edge: u32, edge_count: u32) -> vec2<u32> {
    let slice = (params.vocab + THREADS - 1u) / THREADS;
    let begin = min(thread * slice, params.vocab);
    let end = min(begin + slice, params.vocab);
    var count = 0u;
    for (var i = begin; i < end; i += 1u) {
        if (key_of(logit(i)) == edge) { count += 1u; }
    }
    ties[thread] = count;
    workgroupBarrier();
    var before = 0u;
    for (var t = 0u; t < thread; t += 1u) {
        before += ties[t];
    }
    workgroupBarrier();
    ties[thread] = before;
    var sum = vec2<u32>(0u);
    var rank = before;
    for (var i = begin; i < end; i += 1u) {
        let v = logit(i);
        let key = key_of(v);
        sum = add64(sum, kept(key, mass_of(v, largest), edge, edge_count, rank));
        if (key == edge) { rank += 1u; }
    }
    low[thread] = sum.x;
    high[thread] = sum.y;
    workgroupBarrier();
    var total = vec2<u32>(0u);
    for (var t = 0u; t < THREADS; t += 1u) {
        total = add64x2(total, vec2<u32>(low[t], high[t]));
    }
    return total;
}
