// Chooses tokens from the logits of this run's columns and advances ctl. A column's token is chosen exactly as if the run had
// that column alone; the next column follows if the token is the one that was drafted for it, so that what comes out does not
// depend on the drafts. A choice is the lowest index of the largest logit, or a draw from
// softmax(logits / temperature) cut by top-k, top-p and min-p. Nothing is sorted: a token's probability is an integer mass
// 2^31 * 2^((logit - max) * log2(e) / temperature), made from tables by integer arithmetic, thresholds come from radix
// histograms of counts and masses, and the draw walks the vocabulary in order. Equal logits therefore give equal tokens
// on every device. Penalties of tokens that were seen come first. logits [columns, stride]; settings: see `Settings`; tables: 1024
// entries 2^31 * 2^(-i/1024), 1024 of 2^(-i/2^20); seen [vocab]: how often a token was sampled, and bit 31 for prompt tokens.
struct Params {
    vocab: u32,
    stride: u32,   // elements from one column of the logits to the next
}
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
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> settings: Settings;
@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read_write> ctl: Ctl;
@group(0) @binding(4) var<storage, read_write> seen: array<u32>;

var<workgroup> best_values: array<f32, THREADS>;
var<workgroup> best_tokens: array<u32, THREADS>;
var<workgroup> bad: atomic<u32>;
var<workgroup> bin_low: array<atomic<u32>, 256>;
var<workgroup> bin_high: array<atomic<u32>, 256>;
var<workgroup> low: array<u32, THREADS>;
var<workgroup> high: array<u32, THREADS>;
var<workgroup> ties: array<u32, THREADS>;
var<workgroup> shared_words: array<u32, 4>;
// Whether there is a column to sample.
var<workgroup> running: u32;
// The first logit of the column at hand.
var<private> base: u32;

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

// A key that orders like the logit.
fn key_of(value: f32) -> u32 {
    let raw = bitcast<u32>(value);
    // Both zeros are one value.
    let bits = select(raw, 0u, raw == 0x80000000u);
    return select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u);
}

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

fn mass_of(value: f32, largest: f32) -> u32 {
    let fixed = u32(min((largest - value) * settings.log2_scale, 40.0) * 1048576.0);
    let a = settings.tables[(fixed >> 10u) & 1023u];
    let b = settings.tables[1024u + (fixed & 1023u)];
    // The product of two 2^31-scaled factors, scaled back.
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

// Empties the bins; ends behind a barrier.
fn clear_bins(thread: u32) {
    for (var b = thread; b < 256u; b += THREADS) {
        atomicStore(&bin_low[b], 0u);
        atomicStore(&bin_high[b], 0u);
    }
    workgroupBarrier();
}

fn add_to_bin(b: u32, amount: u32) {
    let old = atomicAdd(&bin_low[b], amount);
    if (old + amount < old) { atomicAdd(&bin_high[b], 1u); }
}

// Thread 0 walks the bins from the top until `wanted` is reached: leaves the bin in shared_words[0] and what is still
// wanted within it in shared_words[1..3]. Ends behind a barrier.
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
    if (thread == 0u) {
        running = u32(ctl.stop == 0u && ctl.columns != 0u);
        if (ctl.stop == 0u) {
            ctl.count = 0u;
            ctl.drafted = max(ctl.columns, 1u) - 1u;
        }
    }
    var column = 0u;
    while (workgroupUniformLoad(&running) != 0u) {
        base = column * params.stride;
        if (thread == 0u) { atomicStore(&bad, 0u); }
        workgroupBarrier();
        let token = choose(thread, column);
        if (thread == 0u) { running = u32(take(column, token)); }
        // A token that was counted as seen is seen by all.
        storageBarrier();
        column += 1u;
    }
    if (thread == 0u && column != 0u && ctl.count != 0u) {
        ctl.tokens[0] = ctl.tokens[ctl.count];
        ctl.pos += ctl.count;
        ctl.columns = 1u;
    }
}

// The token of a column by all threads; right on thread 0.
fn choose(thread: u32, column: u32) -> u32 {
    var value = -3.4e38;
    var token = 0u;
    for (var i = thread; i < params.vocab; i += THREADS) {
        let v = logit(i);
        if ((bitcast<u32>(v) & 0x7f800000u) == 0x7f800000u) { atomicStore(&bad, 1u); }
        if (v > value) { value = v; token = i; }
    }
    best_values[thread] = value;
    best_tokens[thread] = token;
    workgroupBarrier();
    // Every thread finds the same best: strictly larger wins, and of equal ones the lower index.
    value = best_values[0];
    token = best_tokens[0];
    for (var t = 1u; t < THREADS; t += 1u) {
        let v = best_values[t];
        if (v > value || (v == value && best_tokens[t] < token)) { value = v; token = best_tokens[t]; }
    }
    if (settings.greedy == 0u) {
        token = draw(thread, value, column);
    }
    return token;
}

// Records a column's token, by one thread; whether the next column holds the token that follows it.
fn take(column: u32, token: u32) -> bool {
    if (atomicLoad(&bad) != 0u) {
        ctl.stop = 2u;
        return false;
    }
    let drafted = ctl.tokens[column + 1u];
    ctl.tokens[column + 1u] = token;
    ctl.count = column + 1u;
    ctl.step += 1u;
    if (settings.penalised != 0u) { seen[token] += 1u; }
    for (var s = 0u; s < settings.stops; s += 1u) {
        if (settings.stop_tokens[s >> 2u][s & 3u] == token) { ctl.stop = 1u; }
    }
    return ctl.stop == 0u && column + 1u < ctl.columns && drafted == token;
}

// A draw by all threads; the token is right on thread 0.
fn draw(thread: u32, largest: f32, column: u32) -> u32 {
    // Of the tokens whose key equals `edge`, the `edge_count` with the lowest indices are kept, and all above.
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
        // The smallest set whose mass reaches top_p of the total: at least one unit is wanted.
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
        // All tokens at the edge have one mass; as many are kept as still reach what is wanted.
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
        var target_mass = scale64(total, random_bits(ctl.pos + column + 1u));
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

fn value_of(key: u32) -> f32 {
    return bitcast<f32>(select(~key, key & 0x7fffffffu, (key & 0x80000000u) != 0u));
}

// The mass of a token if it is kept, else 0; `rank` counts the tokens at the edge before it.
fn kept(key: u32, mass: u32, edge: u32, edge_count: u32, rank: u32) -> u32 {
    let keep = mass >= settings.min_mass && (key > edge || (key == edge && rank < edge_count));
    return select(0u, mass, keep);
}

// The mass of all kept tokens. Leaves each thread's part in low and high, and in ties the number of edge tokens before its
// slice of the vocabulary. Ends behind a barrier.
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
