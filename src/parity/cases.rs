//! The table: which operators are judged with which types, dimensions and tolerances.
//!
//! Dimensions are chosen for what goes wrong: single rows, tails of a vector of 4, of a team and of a tile, positions on both
//! sides of an attention block's end, folded grids.

mod moe;
mod straddling;

pub(super) use moe::{Moe, MoePart};

use super::{Case, Tolerance};
use crate::dtype::Dtype;
use crate::dtype::planes::{Amount, Geometry, Planes};
use crate::kernel::Kv;

/// What a case runs.
#[derive(Clone, Debug)]
pub(super) enum Spec {
    Embed(Embed),
    /// An operator over whole columns: its kernel, columns' length, counts of columns.
    Norm(Norm),
    Linear(Linear),
    Rope(Rope),
    Attention(Attention),
    DeltaNet(DeltaNet),
    Moe(Moe),
    Sample(Sample),
    Draft(Sample),
    /// With so many drafts at most.
    RoundBegin(u32),
}

#[derive(Clone, Debug)]
pub(super) struct Embed {
    pub dtype: Dtype,
    pub rows: usize,
    pub cols: usize,
    pub columns: u32,
    /// Largest magnitude of a weight.
    pub amplitude: f32,
    pub overlay: Overlay,
    /// Bytes of a segment.
    pub max_binding: u64,
}

/// How many weights are replaced, for types with an overlay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overlay {
    Empty,
    Sparse,
    Dense,
}

/// An operator over whole columns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Over {
    Prep,
    Norm,
    AddNorm,
    LastColumn,
    /// With this cap.
    Cap(f32),
    /// With gelu_tanh, or silu.
    Glu(bool),
    /// With bits of which some are off.
    Silence,
}

#[derive(Clone, Debug)]
pub(super) struct Norm {
    pub over: Over,
    pub cols: usize,
    /// One round each.
    pub columns: Vec<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Product {
    Matvec,
    MatvecAdd,
    MatvecGlu,
    MatvecSome,
    MatvecAddSome,
    MatvecGluSome,
    Matmul,
    MatmulAdd,
    MatmulGlu,
    MatmulSome,
    MatmulAddSome,
    MatmulGluSome,
}

impl Product {
    /// Those of which a list names what is computed.
    const LISTED: [Product; 6] = [
        Product::MatvecSome,
        Product::MatvecAddSome,
        Product::MatvecGluSome,
        Product::MatmulSome,
        Product::MatmulAddSome,
        Product::MatmulGluSome,
    ];
    /// The others.
    const ALL: [Product; 6] = [
        Product::Matvec,
        Product::MatvecAdd,
        Product::MatvecGlu,
        Product::Matmul,
        Product::MatmulAdd,
        Product::MatmulGlu,
    ];

    pub fn stem(self) -> &'static str {
        match self {
            Product::Matvec => "matvec",
            Product::MatvecAdd => "matvec_add",
            Product::MatvecGlu => "matvec_glu",
            Product::MatvecSome => "matvec_some",
            Product::MatvecAddSome => "matvec_add_some",
            Product::MatvecGluSome => "matvec_glu_some",
            Product::Matmul => "matmul",
            Product::MatmulAdd => "matmul_add",
            Product::MatmulGlu => "matmul_glu",
            Product::MatmulSome => "matmul_some",
            Product::MatmulAddSome => "matmul_add_some",
            Product::MatmulGluSome => "matmul_glu_some",
        }
    }

    /// Whether gate and up projections are a pair.
    pub fn is_pair(self) -> bool {
        matches!(
            self,
            Product::MatvecGlu | Product::MatvecGluSome | Product::MatmulGlu | Product::MatmulGluSome
        )
    }

    /// Whether it takes many columns.
    pub fn is_matmul(self) -> bool {
        matches!(
            self,
            Product::Matmul
                | Product::MatmulAdd
                | Product::MatmulGlu
                | Product::MatmulSome
                | Product::MatmulAddSome
                | Product::MatmulGluSome
        )
    }
}

#[derive(Clone, Debug)]
pub(super) struct Linear {
    pub product: Product,
    /// Types and rows of the stacked tensors; of a pair both have the same rows.
    pub parts: Vec<(Dtype, usize)>,
    pub cols: usize,
    /// One round each; a matvec is as wide as the largest, and computes all of its columns.
    pub columns: Vec<u32>,
    /// Whether the input is yet to be normalised (matvec, matvec_glu).
    pub norm: bool,
    pub bias: bool,
    pub gelu: bool,
    /// Largest magnitude of a weight.
    pub amplitude: f32,
    pub overlay: Overlay,
    /// Bytes of a segment.
    pub max_binding: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Rope {
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    /// Rotated elements of a head.
    pub rot: u32,
    /// As in the kernel's parameters.
    pub qk_norm: u32,
    pub v_norm: bool,
    /// Whether a gate follows each query head.
    pub gated: bool,
    pub kv: Kv,
    /// Position and columns, one round each.
    pub runs: Vec<(u32, u32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Block,
    Merge,
    Chunk,
}

#[derive(Clone, Debug)]
pub(super) struct Attention {
    pub part: Part,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    /// 0 = none.
    pub window: u32,
    /// 0 = none.
    pub softcap: f32,
    /// Whether a gate follows each query head.
    pub gated: bool,
    /// Whether a list leaves out every other head, the first one too.
    pub some: bool,
    pub kv: Kv,
    /// Position and columns, one round each.
    pub runs: Vec<(u32, u32)>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct DeltaNet {
    pub key_heads: u32,
    pub value_heads: u32,
    pub key_dim: u32,
    pub value_dim: u32,
    pub taps: u32,
    /// States that are kept.
    pub slots: u32,
    /// Whether q, k, v, z of a key head lie together.
    pub fused: bool,
}

/// What the sampler's logits look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Logits {
    /// All different.
    Spread,
    /// Few values, so that many tokens are equal; the largest are zeros of both signs.
    Ties,
    /// One value.
    Flat,
    /// One of them is not a finite number.
    Broken,
}

#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub vocab: u32,
    pub logits: Logits,
    /// Draws per setting.
    pub draws: u32,
}

/// No limit but the device's.
const WHOLE: u64 = u64::MAX;
const ONE: &[u32] = &[1];

/// Every case, in a fixed order. Names are unique.
pub fn cases() -> Vec<Case> {
    let mut table = Table { cases: Vec::new() };
    table.embed();
    table.norm();
    for dtype in runnable() {
        Product::ALL.iter().for_each(|&product| table.products(product, dtype));
        Product::LISTED.iter().for_each(|&product| table.listed(product, dtype));
    }
    table.stacks();
    table.straddling();
    table.large();
    table.rope();
    table.attention();
    table.delta_net();
    table.moe();
    table.sample();
    table.cases
}

/// The types that some kernel serves.
fn runnable() -> impl Iterator<Item = Dtype> {
    Dtype::all().filter(|&dtype| Planes::of(dtype, 32).is_ok())
}

struct Table {
    cases: Vec<Case>,
}

impl Table {
    fn add(&mut self, name: String, tolerance: Tolerance, spec: Spec) {
        // Each case has numbers of its own, which stay when others come or go (FNV-1a of the name, 32 bits).
        let hash = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
        let seed = u64::from(name.bytes().fold(0x811c_9dc5, hash));
        self.cases.push(Case {
            name,
            tolerance,
            spec,
            seed,
        });
    }

    fn embed(&mut self) {
        for dtype in runnable() {
            let ragged = (!dtype.needs_group_rows()).then_some((9, 36));
            for (rows, cols) in [(33, 32), (7, 576), (70, 1056)].into_iter().chain(ragged) {
                self.add_embed("", dtype, rows, cols, 1.0, WHOLE);
            }
            self.add_embed(" segments", dtype, 100, 96, 1.0, segment_bytes(dtype, 96));
            if has_halves(dtype) {
                self.add_embed(" subnormal", dtype, 33, 96, SUBNORMAL, WHOLE);
            }
            for (what, overlay) in overlays(dtype) {
                self.add_embed_with(what, overlay, (dtype, 33, 96), 1.0, WHOLE);
            }
        }
    }

    fn add_embed(&mut self, what: &str, dtype: Dtype, rows: usize, cols: usize, amplitude: f32, max_binding: u64) {
        self.add_embed_with(what, Overlay::Sparse, (dtype, rows, cols), amplitude, max_binding);
    }

    fn add_embed_with(
        &mut self,
        what: &str,
        overlay: Overlay,
        (dtype, rows, cols): (Dtype, usize, usize),
        amplitude: f32,
        max_binding: u64,
    ) {
        let spec = Embed {
            dtype,
            rows,
            cols,
            columns: 9,
            amplitude,
            overlay,
            max_binding,
        };
        let name = format!("embed.{} {rows}x{cols}{what}", dtype.name());
        self.add(name, Tolerance::Rounded, Spec::Embed(spec));
    }

    fn norm(&mut self) {
        for cols in [32, 36, 96, 576, 1056] {
            let columns = vec![1, 2, 17];
            let spec = |over| {
                Spec::Norm(Norm {
                    over,
                    cols,
                    columns: columns.clone(),
                })
            };
            self.add(format!("prep {cols}"), Tolerance::Rounded, spec(Over::Prep));
            self.add(format!("norm {cols}"), Tolerance::Summed, spec(Over::Norm));
            self.add(format!("add_norm {cols}"), Tolerance::Summed, spec(Over::AddNorm));
            self.add(format!("silence {cols}"), Tolerance::Exact, spec(Over::Silence));
            for (what, gelu) in [("", false), (" gelu", true)] {
                self.add(
                    format!("glu {cols}{what}"),
                    Tolerance::Exponential,
                    spec(Over::Glu(gelu)),
                );
            }
            self.add(format!("last_column {cols}"), Tolerance::Exact, spec(Over::LastColumn));
            let caps = [("", 0.0), (" soft", 0.2), (" hard", 1e-3)];
            for (what, cap) in caps {
                self.add(
                    format!("cap {cols}{what}"),
                    Tolerance::Exponential,
                    spec(Over::Cap(cap)),
                );
            }
        }
    }

    fn products(&mut self, product: Product, dtype: Dtype) {
        let dims = [(1, 32), (5, 96), (6, 576), (7, 1056), (33, 96), (130, 576)];
        let ragged = match dtype.needs_group_rows() {
            true => None,
            false => Some((7, 36)),
        };
        for (i, (rows, cols)) in dims.into_iter().chain(ragged).enumerate() {
            let columns: &[u32] = match (product.is_matmul(), rows) {
                (false, 5) => &[8],
                (false, 6) => &[2],
                (false, 33) => &[4],
                (false, _) => ONE,
                (true, 5) => &[1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 31, 33, 64],
                (true, _) => &[1, 9],
            };
            self.add_linear(
                "",
                Linear {
                    product,
                    parts: vec![(dtype, rows); if product.is_pair() { 2 } else { 1 }],
                    cols,
                    columns: columns.to_vec(),
                    norm: i % 2 == 0,
                    bias: i % 3 != 0,
                    gelu: i % 4 == 1,
                    amplitude: 1.0,
                    overlay: Overlay::Sparse,
                    max_binding: WHOLE,
                },
            );
        }
        for (what, overlay) in overlays(dtype) {
            let linear = Linear {
                overlay,
                ..self.plain(product, dtype, 12, 96)
            };
            self.add_linear(what, linear);
        }
        if has_halves(dtype) {
            self.add_linear(
                " subnormal",
                Linear {
                    amplitude: SUBNORMAL,
                    ..self.plain(product, dtype, 12, 96)
                },
            );
        }
        self.add_linear(
            " segments",
            Linear {
                bias: true,
                max_binding: segment_bytes(dtype, 96) * if product.is_pair() { 2 } else { 1 },
                ..self.plain(product, dtype, 101, 96)
            },
        );
    }

    /// A part of the rows, of the columns, or of the outputs of a pair.
    fn listed(&mut self, product: Product, dtype: Dtype) {
        let dims = [(5, 96), (6, 576), (33, 96), (130, 576)];
        let ragged = match dtype.needs_group_rows() {
            true => None,
            false => Some((7, 36)),
        };
        for (i, (rows, cols)) in dims.into_iter().chain(ragged).enumerate() {
            let columns: &[u32] = match rows {
                _ if product.is_matmul() => &[1, 9],
                5 => &[8],
                6 => &[2],
                33 => &[4],
                _ => ONE,
            };
            let linear = Linear {
                columns: columns.to_vec(),
                norm: i % 2 == 0,
                // The sum with a residual has none.
                bias: i % 3 != 0 && product != Product::MatvecAddSome,
                gelu: i % 4 == 1,
                ..self.plain(product, dtype, rows, cols)
            };
            self.add_linear("", linear);
        }
        let linear = Linear {
            max_binding: segment_bytes(dtype, 96) * if product.is_pair() { 2 } else { 1 },
            ..self.plain(product, dtype, 101, 96)
        };
        self.add_linear(" segments", linear);
    }

    fn plain(&self, product: Product, dtype: Dtype, rows: usize, cols: usize) -> Linear {
        Linear {
            product,
            parts: vec![(dtype, rows); if product.is_pair() { 2 } else { 1 }],
            cols,
            columns: if product.is_matmul() { vec![3] } else { vec![1] },
            norm: true,
            bias: false,
            gelu: false,
            amplitude: 1.0,
            overlay: Overlay::Sparse,
            max_binding: WHOLE,
        }
    }

    fn add_linear(&mut self, what: &str, linear: Linear) {
        let mut dtypes: Vec<_> = linear.parts.iter().map(|part| part.0.name()).collect();
        dtypes.dedup();
        let rows: Vec<_> = linear.parts.iter().map(|part| part.1.to_string()).collect();
        let mut name = format!(
            "{}.{} {}x{}",
            linear.product.stem(),
            dtypes.join("+"),
            rows.join("+"),
            linear.cols
        );
        let takes_norm =
            !matches!(linear.product, Product::MatvecAdd | Product::MatvecAddSome) && !linear.product.is_matmul();
        for (asked, flag) in [
            (linear.norm && takes_norm, " norm"),
            (linear.bias, " bias"),
            (linear.gelu && linear.product.is_pair(), " gelu"),
        ] {
            name += if asked { flag } else { "" };
        }
        let tolerance = match linear.product.is_pair() {
            true => Tolerance::Exponential,
            false => Tolerance::Summed,
        };
        self.add(name + what, tolerance, Spec::Linear(linear));
    }

    /// Stacked tensors: one type, types that share a layout, cut into segments.
    fn stacks(&mut self) {
        let mixes = [
            [Dtype::Q4Block, Dtype::Q4Tiled, Dtype::Q4Block],
            [Dtype::Q4Tiled, Dtype::Q4Block, Dtype::Q4Tiled],
            [Dtype::Vbit, Dtype::VbitRo, Dtype::Vbit],
        ];
        let mixes: Vec<_> = runnable().map(|dtype| [dtype; 3]).chain(mixes).collect();
        let products = [Product::Matvec, Product::Matmul];
        for (product, &[a, b, c]) in products.iter().flat_map(|p| mixes.iter().map(move |mix| (*p, mix))) {
            let linear = Linear {
                parts: vec![(a, 72), (b, 24), (c, 24)],
                bias: true,
                ..self.plain(product, a, 72, 96)
            };
            // The first cut falls into the first tensor, the last segment begins in the third.
            let max_binding = segment_bytes(a, 96);
            self.add_linear(
                " segments",
                Linear {
                    max_binding,
                    ..linear.clone()
                },
            );
            self.add_linear("", linear);
        }
        for product in [Product::MatvecGlu, Product::MatmulGlu] {
            for [a, b] in [[Dtype::Q4Tiled, Dtype::Q4Block], [Dtype::VbitRo, Dtype::Vbit]] {
                let linear = Linear {
                    parts: vec![(a, 37), (b, 37)],
                    bias: true,
                    gelu: true,
                    ..self.plain(product, a, 37, 96)
                };
                self.add_linear("", linear);
            }
        }
    }

    /// Sizes of vocabularies, up to grids that no longer fit one side.
    fn large(&mut self) {
        for dtype in [Dtype::F16, Dtype::Q8Row, Dtype::Q1t, Dtype::VbitRo] {
            self.add_linear("", self.plain(Product::Matvec, dtype, 65_539, 32));
        }
        for dtype in [Dtype::Q1, Dtype::Q1s] {
            self.add_linear("", self.plain(Product::Matvec, dtype, 65_539, 160));
        }
        self.add_linear("", self.plain(Product::Matmul, Dtype::Q8Row, 65_539, 32));
        self.add_linear("", self.plain(Product::Matvec, Dtype::Q8Row, 262_181, 32));
        self.add_embed("", Dtype::Q8Row, 65_539, 32, 1.0, WHOLE);
    }

    fn rope(&mut self) {
        let shapes = [
            // heads, kv heads, head, rotated
            (9, 3, 64, 64),
            (7, 1, 48, 48),
            (14, 2, 64, 32),
            (4, 4, 128, 128),
            (2, 1, 256, 64),
            (1, 1, 32, 32),
            (4, 2, 256, 256),
        ];
        for (i, (heads, kv_heads, head_dim, rot)) in shapes.into_iter().enumerate() {
            for kv in [Kv::F16, Kv::F32] {
                for (norm, qk_norm, v_norm) in [("", 0, false), (" norm", 1, false), (" late norm", 2, true)] {
                    let runs = vec![(0, 1), (1, 1), (17, 1), (200, 1), (0, 17), (63, 9), (64 + i as u32, 2)];
                    let gated = i % 2 == 1;
                    let gate = if gated { " gate" } else { "" };
                    let name = format!(
                        "rope.{} {heads}/{kv_heads} heads of {head_dim}, {rot} turned{norm}{gate}",
                        kv.name()
                    );
                    let spec = Rope {
                        heads,
                        kv_heads,
                        head_dim,
                        rot,
                        qk_norm,
                        v_norm,
                        gated,
                        kv,
                        runs,
                    };
                    self.add(name, Tolerance::Summed, Spec::Rope(spec));
                }
            }
        }
    }

    fn attention(&mut self) {
        let shapes = [
            (9, 3, 64),
            (7, 1, 48),
            (14, 2, 64),
            (4, 4, 128),
            (2, 1, 256),
            (3, 3, 32),
            (10, 1, 32),
        ];
        // (window, soft cap)
        let masks = [(0, 0.0), (8, 0.0), (100, 0.0), (0, 5.0), (64, 5.0)];
        let masks = masks.map(|(window, softcap)| (window, softcap, false));
        let masks: Vec<_> = masks.into_iter().chain([(0, 0.0, true)]).collect();
        for (heads, kv_heads, head_dim) in shapes {
            for &(window, softcap, gated) in &masks {
                for kv in [Kv::F16, Kv::F32] {
                    for part in [Part::Block, Part::Merge, Part::Chunk] {
                        // A merge reads no cache.
                        if part == Part::Merge && kv == Kv::F16 {
                            continue;
                        }
                        for some in [false, true] {
                            self.attention_case(Attention {
                                part,
                                heads,
                                kv_heads,
                                head_dim,
                                window,
                                softcap,
                                gated,
                                some,
                                kv,
                                runs: Vec::new(),
                            });
                        }
                    }
                }
            }
        }
    }

    fn attention_case(&mut self, mut spec: Attention) {
        let (stem, runs) = match spec.part {
            Part::Block => ("attn_block", vec![(3, 2)]),
            Part::Merge => ("attn_merge", vec![(62, 3)]),
            Part::Chunk => ("attn_chunk", vec![(0, 5), (60, 9), (121, 64), (199, 3)]),
        };
        // The last one sees whole blocks only: its window begins where a block does.
        let single = [0, 1, 17, 63, 64, 65, 200, 63 + spec.window].map(|pos| (pos, 1));
        spec.runs = single.into_iter().chain(runs).collect();
        let mut name = stem.to_owned();
        if spec.some {
            name += "_some";
        }
        if spec.part != Part::Merge {
            name += &format!(".{}", spec.kv.name());
        }
        name += &format!(" {}/{} heads of {}", spec.heads, spec.kv_heads, spec.head_dim);
        if spec.window != 0 {
            name += &format!(" window {}", spec.window);
        }
        if spec.softcap != 0.0 {
            name += " softcap";
        }
        if spec.gated {
            name += " gate";
        }
        self.add(name, Tolerance::Exponential, Spec::Attention(spec));
    }

    fn delta_net(&mut self) {
        // key heads, value heads, key dim, value dim, taps, states
        let shapes = [
            (2, 4, 32, 32, 4, 1),
            (1, 1, 4, 4, 2, 1),
            (2, 6, 20, 12, 4, 2),
            (1, 3, 256, 64, 3, 4),
            (1, 2, 8, 256, 1, 3),
            (2, 2, 128, 128, 4, 1),
            (1, 1, 12, 36, 16, 5),
        ];
        for (key_heads, value_heads, key_dim, value_dim, taps, slots) in shapes {
            for (layout, fused) in [("", false), (" fused", true)] {
                let spec = DeltaNet {
                    key_heads,
                    value_heads,
                    key_dim,
                    value_dim,
                    taps,
                    slots,
                    fused,
                };
                let name = format!(
                    "delta_net {key_heads}/{value_heads} heads of {key_dim}x{value_dim} taps {taps} states {slots}{layout}"
                );
                self.add(name, Tolerance::Exponential, Spec::DeltaNet(spec));
            }
        }
    }

    fn sample(&mut self) {
        for (vocab, draws) in [(1, 1), (5, 3), (255, 3), (257, 3), (1000, 10), (49_155, 1)] {
            for (logits, what) in [
                (Logits::Spread, "spread"),
                (Logits::Ties, "ties"),
                (Logits::Flat, "flat"),
                (Logits::Broken, "not finite"),
            ] {
                let spec = Sample { vocab, logits, draws };
                if logits != Logits::Broken {
                    let spec = Spec::Draft(spec.clone());
                    self.add(format!("draft {vocab} {what}"), Tolerance::Exact, spec);
                }
                self.add(format!("sample {vocab} {what}"), Tolerance::Exact, Spec::Sample(spec));
            }
        }
        for depth in [1, 3, 7] {
            let name = format!("round_begin {depth} drafts");
            self.add(name, Tolerance::Exact, Spec::RoundBegin(depth));
        }
    }
}

/// Weights so small that every f16 scale is subnormal, and many f16 weights are.
const SUBNORMAL: f32 = 1e-4;

/// Overlays that are judged besides a sparse one.
fn overlays(dtype: Dtype) -> impl Iterator<Item = (&'static str, Overlay)> {
    let all = [(" empty overlay", Overlay::Empty), (" dense overlay", Overlay::Dense)];
    let has = Planes::of(dtype, 32).is_ok_and(Planes::has_overlay);
    all.into_iter().filter(move |_| has)
}

fn has_halves(dtype: Dtype) -> bool {
    Planes::of(dtype, 32).is_ok_and(Planes::has_halves)
}

/// As much as 32 rows of `cols` columns take in their larger plane.
fn segment_bytes(dtype: Dtype, cols: usize) -> u64 {
    match Planes::of(dtype, cols) {
        Ok(planes) => {
            let geometry = Geometry {
                planes,
                rows: 32,
                cols,
                parts: 3,
                // The widest rows, or an entry for every fourth weight.
                amount: match planes {
                    Planes::BitsN => Amount {
                        vectors: 32 * cols / 16,
                        words: 0,
                    },
                    // Each part may begin within a pair of groups, and end in one.
                    Planes::Nib4Flat => Amount {
                        vectors: cols + 12,
                        words: 0,
                    },
                    _ => Amount {
                        vectors: 0,
                        words: 32 * cols / 4,
                    },
                },
            };
            geometry.code_bytes().max(geometry.scale_bytes()) as u64
        }
        Err(_) => WHOLE,
    }
}
