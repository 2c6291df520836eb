//! Cases of rotation and attention. Caches hold nothing past each sequence's last position, and their pages are in no order.

use crate::error::Result;
use crate::graph::Fill;
use crate::op::{KV_PAGE, Kernel, Kv, Token, heads_list};
use crate::parity::case::{Table, flags};
use crate::parity::judge::UNSET;
use crate::parity::maker::{Maker, op, sequences, tokens_at};
use crate::parity::random::words;
use half::f16;
use std::fmt;

/// Positions of each sequence: more than any round reaches, and not a multiple of a page.
const POSITIONS: u32 = 280;
/// Pages in the table of one slot, and the blocks of positions that attention computes.
const SLOT_PAGES: u32 = POSITIONS.div_ceil(KV_PAGE);

#[derive(Clone, Copy)]
struct Heads {
    heads: u32,
    kv_heads: u32,
    /// Elements of a head.
    dim: u32,
    /// Whether a gate follows each query head.
    gated: bool,
    kv: Kv,
    /// Sequences.
    slots: u32,
}

#[derive(Clone, Copy)]
struct Attention {
    kernel: Kernel,
    heads: Heads,
    /// 0 = none.
    window: u32,
    /// 0 = none.
    softcap: f32,
    /// Whether a mask leaves out every other head, also the first one.
    masked: bool,
}

/// Whether the made-up mask keeps a head.
fn is_kept(head: usize) -> bool {
    head % 2 == 1
}

pub fn add(table: &mut Table) {
    add_rope(table);
    add_attention(table);
}

/// The tokens of two sequences in turns, some of which do not follow each other.
fn two_slots() -> Vec<Vec<Token>> {
    vec![
        tokens_at(&[(1, 70)]),
        tokens_at(&[
            (0, 5),
            (1, 130),
            (0, 6),
            (1, 131),
            (0, 200),
            (0, 201),
            (1, 2),
            (0, 64),
            (1, 127),
        ]),
        tokens_at(&[(1, 9), (1, 250), (1, 3), (1, 77), (0, 0), (1, 128), (1, 129)]),
        tokens_at(&[(1, 0), (0, 63), (0, 64), (0, 65), (0, 66), (1, 1)]),
    ]
}

fn add_rope(table: &mut Table) {
    let shapes = [
        // Query heads, key-value heads, elements of a head, rotated ones.
        (9, 3, 64, 64),
        (7, 1, 48, 48),
        (14, 2, 64, 32),
        (4, 4, 128, 128),
        (2, 1, 256, 64),
        (1, 1, 32, 32),
        (4, 2, 256, 256),
    ];
    for (i, (heads, kv_heads, dim, rotated)) in shapes.into_iter().enumerate() {
        for kv in [Kv::F16, Kv::F32] {
            for (norm, qk_norm, v_norm) in [("", 0, 0), (" norm", 1, 0), (" late norm", 2, 1)] {
                for slots in [1, 2] {
                    let heads = Heads {
                        heads,
                        kv_heads,
                        dim,
                        gated: i % 2 == 1,
                        kv,
                        slots,
                    };
                    let runs = [(0, 1), (1, 1), (17, 1), (200, 1), (0, 17), (63, 9), (64 + i as u32, 2)];
                    let rounds = if slots == 1 { sequences(&runs) } else { two_slots() };
                    let name = format!("rope.{} {heads}, {rotated} turned{norm}{}", kv.name(), heads.flags());
                    let own = [rotated, qk_norm, v_norm];
                    table.add(name, move |maker| heads.rope(maker, own, &rounds));
                }
            }
        }
    }
}

fn add_attention(table: &mut Table) {
    let shapes = [
        (9, 3, 64),
        (7, 1, 48),
        (14, 2, 64),
        (4, 4, 128),
        (2, 1, 256),
        (3, 3, 32),
        (10, 1, 32),
    ];
    // Window, soft cap, whether gates follow, whether there are cases of two slots.
    let options = [
        (0, 0.0, false, true),
        (8, 0.0, false, false),
        (100, 0.0, false, true),
        (0, 5.0, false, false),
        (64, 5.0, false, false),
        (0, 0.0, true, false),
    ];
    for (heads, kv_heads, dim) in shapes {
        for (window, softcap, gated, has_slots) in options {
            for kv in [Kv::F16, Kv::F32] {
                for kernel in [Kernel::AttnBlock, Kernel::AttnMerge, Kernel::AttnChunk] {
                    // A merge reads no cache.
                    if kernel == Kernel::AttnMerge && kv == Kv::F16 {
                        continue;
                    }
                    for masked in [false, true] {
                        for slots in if has_slots { 1..=2 } else { 1..=1 } {
                            let spec = Attention {
                                kernel,
                                heads: Heads {
                                    heads,
                                    kv_heads,
                                    dim,
                                    gated,
                                    kv,
                                    slots,
                                },
                                window,
                                softcap,
                                masked,
                            };
                            spec.add(table);
                        }
                    }
                }
            }
        }
    }
}

impl fmt::Display for Heads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} heads of {}", self.heads, self.kv_heads, self.dim)
    }
}

impl Heads {
    fn flags(&self) -> String {
        flags([(self.gated, " gate"), (self.slots != 1, " two slots")])
    }

    /// The parameters that rotation and attention share.
    fn params(&self) -> [(&'static str, u32); 5] {
        [
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_vectors", self.dim / 4),
            ("query_vectors", self.query() / 4),
            ("slot_pages", SLOT_PAGES),
        ]
    }

    /// Elements from one query head to the next.
    fn query(&self) -> u32 {
        if self.gated { 2 * self.dim } else { self.dim }
    }

    /// Elements of a token in `qkv`.
    fn stride(&self) -> u32 {
        self.heads * self.query() + 2 * self.kv_heads * self.dim
    }

    /// Pages of the caches: one more than the slots use.
    fn pages(&self) -> u32 {
        self.slots * SLOT_PAGES + 1
    }

    /// The page of a block of positions. Factor and count have no common divisor, so no two blocks share a page.
    fn page(&self, slot: u32, block: u32) -> u32 {
        ((slot * SLOT_PAGES + block) * 5 + 2) % self.pages()
    }

    /// Makes caches and page tables. Returns the contents of the page tables.
    fn cache_buffers(&self, maker: &mut Maker) -> Vec<u32> {
        let blocks = |slot| (0..SLOT_PAGES).map(move |block| self.page(slot, block));
        let tables: Vec<u32> = (0..self.slots).flat_map(blocks).collect();
        maker.buffer("k_cache", self.cache_words());
        maker.buffer("v_cache", self.cache_words());
        maker.buffer("pages", tables.len());
        tables
    }

    fn cache_words(&self) -> usize {
        let elements = u64::from(self.pages() * self.kv_heads * KV_PAGE * self.dim);
        (elements * self.kv.bytes() / 4) as usize
    }

    /// A random cache with the positions of each slot up to the last one of `tokens`, for the key-value heads that are read.
    fn cache(&self, maker: &mut Maker, tokens: &[Token], is_read: &dyn Fn(usize) -> bool) -> Vec<u32> {
        let dim = self.dim as usize;
        let mut cache = vec![UNSET; self.cache_words()];
        for slot in 0..self.slots {
            let positions = tokens.iter().filter(|token| token.slot == slot);
            let end = positions.map(|token| token.position + 1).max().unwrap_or(0);
            for kv_head in 0..self.kv_heads {
                let values = maker.random.floats(POSITIONS as usize * dim, 1.0);
                let rows = (0..end).zip(values.chunks_exact(dim));
                for (position, row) in rows.filter(|_| is_read(kv_head as usize)) {
                    let page = self.page(slot, position / KV_PAGE);
                    let at = ((page * self.kv_heads + kv_head) * KV_PAGE + position % KV_PAGE) as usize * dim;
                    let half = |value: f32| u32::from(f16::from_f32(value).to_bits());
                    let pairs = row.chunks_exact(2).map(|pair| half(pair[0]) | half(pair[1]) << 16);
                    match self.kv {
                        Kv::F32 => cache[at..at + dim].copy_from_slice(&words(row)),
                        Kv::F16 => cache[at / 2..(at + dim) / 2].copy_from_slice(&pairs.collect::<Vec<_>>()),
                    }
                }
            }
        }
        cache
    }

    /// A rotation of some elements of each head. `qk_norm` and `v_norm` are as in the operator's parameters.
    fn rope(&self, maker: &mut Maker, [rotated, qk_norm, v_norm]: [u32; 3], rounds: &[Vec<Token>]) -> Result<()> {
        maker.graph.kv = self.kv;
        let most = rounds.iter().map(Vec::len).max().unwrap_or(1);
        maker.vector("q_norm", self.dim as usize)?;
        maker.vector("k_norm", self.dim as usize)?;
        let stride = self.stride() as usize;
        maker.buffer("table", (POSITIONS * rotated) as usize);
        maker.rows("qkv", stride, most);
        let page_tables = self.cache_buffers(maker);
        let own = [
            ("rot_vectors", rotated / 8),
            ("positions", POSITIONS),
            ("eps", 1e-2f32.to_bits()),
            ("qk_norm", qk_norm),
            ("v_norm", v_norm),
        ];
        maker.step(op(Kernel::Rope, &[own, self.params()].concat())?)?;
        let inv_freq = |i| 0.7 * 100f32.powf(-2.0 * i as f32 / rotated as f32);
        let fill = Fill::Rope {
            inv_freq: (0..rotated / 2).map(inv_freq).collect(),
            factor: 1.1,
            positions: POSITIONS,
        };
        let rows: Vec<f32> = (0..POSITIONS).flat_map(|position| fill.rope_row(position)).collect();
        for tokens in rounds {
            let values = maker.random.words(stride * tokens.len(), 1.0);
            let tables = ("pages", page_tables.clone());
            maker.round(tokens.clone(), vec![("table", words(&rows)), ("qkv", values), tables])?;
        }
        Ok(())
    }
}

impl Attention {
    fn add(self, table: &mut Table) {
        let (spec, heads) = (self.kernel.spec(), self.heads);
        let mut name = spec.name.to_string() + &flags([(self.masked, ".masked")]);
        if spec.has_kv() {
            name += &format!(".{}", heads.kv.name());
        }
        name += &format!(" {heads}");
        if self.window != 0 {
            name += &format!(" window {}", self.window);
        }
        name += &flags([(self.softcap != 0.0, " softcap")]);
        table.add(name + &heads.flags(), move |maker| self.build(maker));
    }

    fn rounds(&self) -> Vec<Vec<Token>> {
        if self.heads.slots == 2 {
            return two_slots();
        }
        let runs = match self.kernel {
            Kernel::AttnBlock => &[(3, 2)][..],
            Kernel::AttnMerge => &[(62, 3)],
            _ => &[(0, 5), (60, 9), (121, 64), (199, 3)],
        };
        // The last one sees whole blocks only: its window begins at the beginning of a block.
        let single = [0, 1, 17, 63, 64, 65, 200, 63 + self.window].map(|position| (position, 1));
        sequences(&[&single[..], runs].concat())
    }

    fn build(&self, maker: &mut Maker) -> Result<()> {
        let Heads {
            heads, kv_heads, dim, ..
        } = self.heads;
        maker.graph.kv = self.heads.kv;
        let rounds = self.rounds();
        let most = rounds.iter().map(Vec::len).max().unwrap_or(1);
        // One vector more than a token needs.
        let y_stride = heads * dim / 4 + 1;
        let page_tables = self.heads.cache_buffers(maker);
        maker.rows("qkv", self.heads.stride() as usize, most);
        maker.rows("partial", (heads * SLOT_PAGES * (4 + dim)) as usize, most);
        maker.rows("y", y_stride as usize * 4, most);
        match self.masked {
            true => maker.list(heads_list(heads as usize, kv_heads as usize, &is_kept)),
            false => maker.zeros("list"),
        }
        let own = [
            ("blocks", SLOT_PAGES),
            ("scale", (1.0 / (dim as f32).sqrt()).to_bits()),
            ("softcap", self.softcap.to_bits()),
            ("window", self.window),
            ("y_stride", y_stride),
        ];
        maker.step(op(self.kernel, &[own, self.heads.params()].concat())?)?;
        for tokens in rounds {
            let count = self.heads.stride() as usize * tokens.len();
            let inputs = match self.kernel {
                Kernel::AttnMerge => {
                    let queries = maker.random.words(count, 3.0);
                    vec![("partial", self.partial(maker, &tokens)), ("qkv", queries)]
                }
                _ => {
                    // Large queries, so that some keys stand out.
                    let queries = maker.random.words(count, 8.0);
                    let shared_by = (heads / kv_heads) as usize;
                    let is_read =
                        |kv_head: usize| !self.masked || (kv_head * shared_by..(kv_head + 1) * shared_by).any(is_kept);
                    let [k, v] = [(); 2].map(|()| self.heads.cache(maker, &tokens, &is_read));
                    let tables = ("pages", page_tables.clone());
                    vec![("qkv", queries), ("k_cache", k), ("v_cache", v), tables]
                }
            };
            maker.round(tokens, inputs)?;
        }
        Ok(())
    }

    /// The records that attn_block leaves for attn_merge: visible blocks of the kept heads, the others unset.
    fn partial(&self, maker: &mut Maker, tokens: &[Token]) -> Vec<u32> {
        let Heads { heads, dim, .. } = self.heads;
        let mut all = Vec::new();
        for token in tokens {
            let first = match self.window {
                0 => 0,
                window => (token.position + 1).saturating_sub(window),
            };
            let visible = first / KV_PAGE..=token.position / KV_PAGE;
            for head in 0..heads as usize {
                for number in 0..SLOT_PAGES {
                    if !visible.contains(&number) || self.masked && !is_kept(head) {
                        all.resize(all.len() + 4 + dim as usize, UNSET);
                        continue;
                    }
                    let largest = maker.random.floats(1, 9.0)[0];
                    let total = 1.0 + maker.random.floats(1, 1.0)[0].abs() * 30.0;
                    all.extend(words(&[largest, total, 0.0, 0.0]));
                    all.extend(maker.random.words(dim as usize, total));
                }
            }
        }
        all
    }
}
