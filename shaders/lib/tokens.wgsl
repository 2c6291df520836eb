// The records of a run's tokens, the state of a sequence, and the addresses of caches. No other shader file depends
// on these layouts. src/op/tokens.rs has the same structures.

// One token of a run.
struct Token {
    id: u32,        // index in the vocabulary
    slot: u32,      // the slot of its sequence: page table, recurrent states, sampler state
    position: u32,  // position in the sequence
    spare: u32,
}

// The tokens of a run.
struct Batch {
    count: u32,     // number of tokens; 0 = the run does nothing
    spare0: u32,
    spare1: u32,
    spare2: u32,
    tokens: array<Token>,
}

// The sampler state of one sequence.
struct Slot {
    sampled: array<u32, MAX_WIDTH>,  // the tokens that the last run sampled
    count: u32,                      // their number
    drafted: u32,                    // drafts that the last run verified, accepted or not
    step: u32,                       // tokens sampled since the host wrote this state
    stop: u32,                       // 0 = running, 1 = a stop token was sampled, 2 = the logits were not finite
    last: u32,                       // position of the last token that a speculative step may sample
    spare0: u32,
    spare1: u32,
    spare2: u32,
}

// Whether one token directly follows the other in a sequence.
fn follows(token: Token, before: Token) -> bool {
    return token.slot == before.slot && token.position == before.position + 1u;
}

// Caches are [pages, kv_heads, KV_PAGE, head vectors]. The table `pages` [slots, slot_pages] has the page of each
// block of KV_PAGE positions. This is the index of a block in the table.
fn page_entry(slot: u32, block: u32, slot_pages: u32) -> u32 { return slot * slot_pages + block; }

// The row of a cache at which one head of a page begins.
fn page_row(page: u32, kv_head: u32, kv_heads: u32) -> u32 { return (page * kv_heads + kv_head) * KV_PAGE; }

// Recurrent layers keep the last `states` states of each slot. This is the index of the state after a position.
fn state_index(slot: u32, position: u32, states: u32) -> u32 { return slot * states + position % states; }
