// Groups the columns of this run by expert. An entry is column * top_k + rank; entries are listed by expert, then in order.
// lists: `tiles` times expert, first entry, number of entries, at most 8, 0 for a tile that is not needed; then the entries.
// routes as moe_route.wgsl leaves them. One workgroup does it all.
struct Params {
    tiles: u32,  // tiles there is room for
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ctl: Ctl;
@group(0) @binding(2) var<storage, read> experts: Experts;
@group(0) @binding(3) var<storage, read> routes: array<u32>;
@group(0) @binding(4) var<storage, read_write> lists: array<u32>;

const TILE: u32 = 8u;
const BLOCK: u32 = 1024u;
const MOST: u32 = 512u;
var<workgroup> ids: array<u32, BLOCK>;
var<workgroup> counts: array<u32, MOST>;

fn tiles_of(count: u32) -> u32 { return (count + TILE - 1u) / TILE; }

// Brings the experts of the entries from `block` on into workgroup memory.
fn load_ids(thread: u32, block: u32, entries: u32) {
    workgroupBarrier();
    for (var i = thread; i < BLOCK; i += THREADS) {
        let entry = min(block + i, entries - 1u);
        let column = entry / experts.top_k;
        ids[i] = routes[(column * (experts.top_k + 1u) + entry % experts.top_k) * 2u];
    }
    workgroupBarrier();
}

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    let entries = ctl.columns * experts.top_k;
    // A thread has two experts at most.
    let mine = vec2<u32>(thread, thread + THREADS);
    var count = vec2<u32>(0u);
    for (var block = 0u; block < entries; block += BLOCK) {
        load_ids(thread, block, entries);
        for (var i = 0u; i < min(BLOCK, entries - block); i += 1u) {
            count += select(vec2<u32>(0u), vec2<u32>(1u), vec2<u32>(ids[i]) == mine);
        }
    }
    counts[mine.x] = count.x;
    counts[mine.y] = count.y;
    workgroupBarrier();
    var entry = vec2<u32>(0u);
    var tile = vec2<u32>(0u);
    var used = 0u;
    for (var e = 0u; e < experts.count; e += 1u) {
        let before = vec2<u32>(e) < mine;
        entry += select(vec2<u32>(0u), vec2<u32>(counts[e]), before);
        tile += select(vec2<u32>(0u), vec2<u32>(tiles_of(counts[e])), before);
        used += tiles_of(counts[e]);
    }
    for (var done = 0u; done < count.x; done += TILE) {
        let at = 3u * (tile.x + done / TILE);
        lists[at] = mine.x;
        lists[at + 1u] = entry.x + done;
        lists[at + 2u] = min(TILE, count.x - done);
    }
    for (var done = 0u; done < count.y; done += TILE) {
        let at = 3u * (tile.y + done / TILE);
        lists[at] = mine.y;
        lists[at + 1u] = entry.y + done;
        lists[at + 2u] = min(TILE, count.y - done);
    }
    for (var t = used + thread; t < params.tiles; t += THREADS) {
        lists[3u * t + 2u] = 0u;
    }
    for (var block = 0u; block < entries; block += BLOCK) {
        load_ids(thread, block, entries);
        for (var i = 0u; i < min(BLOCK, entries - block); i += 1u) {
            let found = vec2<u32>(ids[i]) == mine;
            if (any(found)) {
                let at = select(entry.y, entry.x, found.x);
                lists[3u * params.tiles + at] = block + i;
                entry += select(vec2<u32>(0u), vec2<u32>(1u), found);
            }
        }
    }
}
