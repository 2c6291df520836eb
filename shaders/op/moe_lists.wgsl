// Groups the tokens of this run by expert. An entry is token * top_k + rank. Entries are listed by expert, then in
// order.
// routes as moe_route.wgsl writes them; lists: for each of `tiles` tiles the expert, the first entry, and the number
// of entries, which is 0 for an unused tile and at most EXPERT_TILE; then the entries.
// One workgroup.

#import tokens
#import experts

const ENTRIES_AT_ONCE: u32 = 1024u;
var<workgroup> ids: array<u32, ENTRIES_AT_ONCE>;
var<workgroup> counts: array<u32, MAX_EXPERTS>;

fn tiles_of(count: u32) -> u32 { return (count + EXPERT_TILE - 1u) / EXPERT_TILE; }

// Loads the experts of the entries from `block` into workgroup memory.
fn load_ids(thread: u32, block: u32, entries: u32) {
    workgroupBarrier();
    for (var i = thread; i < ENTRIES_AT_ONCE; i += THREADS) {
        let entry = min(block + i, entries - 1u);
        let token = entry / experts.top_k;
        ids[i] = routes[(token * (experts.top_k + 1u) + entry % experts.top_k) * 2u];
    }
    workgroupBarrier();
}

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    let entries = batch.count * experts.top_k;
    // A thread lists the entries of two experts: MAX_EXPERTS is twice THREADS.
    let own_experts = vec2<u32>(thread, thread + THREADS);
    var count = vec2<u32>(0u);
    for (var block = 0u; block < entries; block += ENTRIES_AT_ONCE) {
        load_ids(thread, block, entries);
        for (var i = 0u; i < min(ENTRIES_AT_ONCE, entries - block); i += 1u) {
            count += select(vec2<u32>(0u), vec2<u32>(1u), vec2<u32>(ids[i]) == own_experts);
        }
    }
    counts[own_experts.x] = count.x;
    counts[own_experts.y] = count.y;
    workgroupBarrier();
    var entry = vec2<u32>(0u);
    var tile = vec2<u32>(0u);
    var used = 0u;
    for (var e = 0u; e < experts.count; e += 1u) {
        let before = vec2<u32>(e) < own_experts;
        entry += select(vec2<u32>(0u), vec2<u32>(counts[e]), before);
        tile += select(vec2<u32>(0u), vec2<u32>(tiles_of(counts[e])), before);
        used += tiles_of(counts[e]);
    }
    for (var listed = 0u; listed < count.x; listed += EXPERT_TILE) {
        let at = 3u * (tile.x + listed / EXPERT_TILE);
        lists[at] = own_experts.x;
        lists[at + 1u] = entry.x + listed;
        lists[at + 2u] = min(EXPERT_TILE, count.x - listed);
    }
    for (var listed = 0u; listed < count.y; listed += EXPERT_TILE) {
        let at = 3u * (tile.y + listed / EXPERT_TILE);
        lists[at] = own_experts.y;
        lists[at + 1u] = entry.y + listed;
        lists[at + 2u] = min(EXPERT_TILE, count.y - listed);
    }
    for (var t = used + thread; t < params.tiles; t += THREADS) {
        lists[3u * t + 2u] = 0u;
    }
    for (var block = 0u; block < entries; block += ENTRIES_AT_ONCE) {
        load_ids(thread, block, entries);
        for (var i = 0u; i < min(ENTRIES_AT_ONCE, entries - block); i += 1u) {
            let is_own = vec2<u32>(ids[i]) == own_experts;
            if (any(is_own)) {
                let at = select(entry.y, entry.x, is_own.x);
                lists[3u * params.tiles + at] = block + i;
                entry += select(vec2<u32>(0u), vec2<u32>(1u), is_own);
            }
        }
    }
}
