//! Cases of mixtures of experts: counts of experts on both sides of a power of two, from one up to the most; ties, biases and
//! sigmoids; experts that a bank does not hold; banks in segments.

use super::dtypes::{has_halves, overlays, runnable, segment_bytes};
use super::experts::{Bank, Build, Moe, Part, Weights};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::op::{
    Kernel, moe_combine, moe_count, moe_down, moe_glu, moe_lists, moe_matmul, moe_matmul_glu, moe_matmul_up,
    moe_matvec, moe_route,
};
use crate::parity::case::Table;
use crate::parity::maker::Maker;
use crate::parity::random::{Random, Values, operands, padded};

const fn part(kernel: Kernel, suffix: &'static str, weights: Weights, build: Build) -> Part {
    Part {
        kernel,
        suffix,
        weights,
        build,
    }
}

const GLU: Part = part(Kernel::MoeGlu, "", Weights::Pairs, glu);
/// `moe_matvec` of gates, of products with gates, and of the shared expert's products.
const GATES: Part = part(Kernel::MoeMatvec, "", Weights::Experts, matvec);
const PRODUCTS: Part = part(Kernel::MoeMatvec, " gated", Weights::Experts, gated_matvec);
const SHARED: Part = part(Kernel::MoeMatvec, " gated, shared", Weights::Shared, gated_matvec);
const DOWN: Part = part(Kernel::MoeDown, "", Weights::Experts, down);
const MATMUL_GLU: Part = part(Kernel::MoeMatmulGlu, "", Weights::Pairs, matmul_glu);
const MATMUL_UP: Part = part(Kernel::MoeMatmulUp, "", Weights::Experts, matmul_up);
const MATMUL: Part = part(Kernel::MoeMatmul, "", Weights::Experts, matmul);
const ROUTE: Part = part(Kernel::MoeRoute, "", Weights::None, route);
const COUNT: Part = part(Kernel::MoeCount, "", Weights::None, count);
const LISTS: Part = part(Kernel::MoeLists, "", Weights::None, lists);
const COMBINE: Part = part(Kernel::MoeCombine, "", Weights::None, combine);

const WITH_WEIGHTS: [Part; 8] = [GLU, GATES, PRODUCTS, SHARED, DOWN, MATMUL_GLU, MATMUL_UP, MATMUL];

pub fn add(table: &mut Table) {
    for dtype in runnable() {
        for part in WITH_WEIGHTS {
            add_types(table, part, dtype);
        }
    }
    for (experts, top_k) in [(1, 1), (5, 2), (7, 7), (60, 4), (127, 8), (256, 8), (512, 64)] {
        add_counts(table, experts, top_k);
    }
    for part in [GLU, SHARED] {
        add_case(table, " ungated", part, Dtype::F16, |moe| moe.gated = false);
    }
    for shared in [0, 1, 48, 49] {
        let what = format!(" shared of {shared}");
        for part in [GLU, MATMUL_GLU, ROUTE, COMBINE] {
            add_case(table, &what, part, Dtype::F16, |moe| moe.shared = shared);
        }
    }
}

/// The cases of a weight type.
fn add_types(table: &mut Table, part: Part, dtype: Dtype) {
    let mut add = |what, change: &dyn Fn(&mut Moe)| add_case(table, what, part, dtype, change);
    add("", &|_| {});
    add("", &|moe| {
        (moe.outputs, moe.cols, moe.shared) = (33, 1056, 70);
        moe.gelu = true;
    });
    add(" segments", &cut);
    add(" partial", &|moe| moe.partial = true);
    for (what, overlay) in overlays(dtype) {
        add(what, &|moe| moe.values = Values::with_overlay(overlay));
    }
    if has_halves(dtype) {
        add(" subnormal", &|moe| moe.values = Values::SUBNORMAL);
    }
    if dtype.row_multiple() == 1 {
        add("", &|moe| (moe.outputs, moe.cols) = (7, 36));
    }
}

/// The cases of a number of experts.
fn add_counts(table: &mut Table, experts: usize, top_k: usize) {
    for part in WITH_WEIGHTS {
        add_case(table, "", part, Dtype::Q82f, |moe| {
            (moe.experts, moe.top_k) = (experts, top_k);
            (moe.outputs, moe.cols, moe.shared) = (6, 32, 12);
        });
    }
    for part in [ROUTE, COUNT, LISTS, COMBINE] {
        add_case(table, "", part, Dtype::F32, |moe| {
            (moe.experts, moe.top_k) = (experts, top_k);
            moe.tokens = vec![1, 2, 17, 64];
        });
    }
    for part in [GLU, GATES, ROUTE, COUNT] {
        for flags in 1..16 {
            add_case(table, "", part, Dtype::F32, |moe| {
                (moe.experts, moe.top_k) = (experts, top_k);
                (moe.outputs, moe.cols) = (2, 32);
                (moe.sigmoid, moe.renormalise) = (flags & 1 != 0, flags & 2 != 0);
                (moe.biased, moe.ties) = (flags & 4 != 0, flags & 8 != 0);
                moe.tokens = vec![if part.weights == Weights::None { 9 } else { 2 }];
            });
        }
    }
}

/// Cuts the weights into at least two segments: room for 8 rows of all parts, and half as much again for types whose rows vary.
fn cut(moe: &mut Moe) {
    let parts = match moe.part.weights {
        Weights::Shared => 1,
        Weights::Pairs => 2 * moe.experts,
        _ => moe.experts,
    };
    moe.limit = segment_bytes(moe.dtype, moe.cols) * parts as u64 / 4;
    if moe.dtype == Dtype::Q82f {
        // `segment_bytes` counts the column scales of three parts only.
        moe.limit += (parts * moe.cols * 2) as u64;
    }
    // A bank with a shared expert has one segment only.
    (moe.outputs, moe.shared) = (40, 0);
}

fn add_case(table: &mut Table, what: &str, part: Part, dtype: Dtype, change: impl FnOnce(&mut Moe)) {
    let mut moe = Moe::plain(part, dtype);
    change(&mut moe);
    let mut name = part.kernel.spec().name.to_string();
    if part.weights != Weights::None {
        name += &format!(".{} {}x{}", dtype.name(), moe.outputs, moe.cols);
    }
    name += &format!(" {} of {}", moe.top_k, moe.experts);
    for (is_set, flag) in [
        (moe.sigmoid, " sigmoid"),
        (moe.renormalise, " renormalised"),
        (moe.biased, " biased"),
        (moe.ties, " ties"),
        (moe.gelu, " gelu"),
    ] {
        name += if is_set { flag } else { "" };
    }
    name = name + part.suffix + what;
    table.add(name, move |maker| {
        let bank = Bank::new(&moe, maker)?;
        (part.build)(&bank, maker)
    });
}

fn glu(bank: &Bank, maker: &mut Maker) -> Result<()> {
    let (spec, most, width) = (bank.spec, bank.most(), bank.width());
    let routes_at = bank.choosing(maker);
    let shared_stride = bank.shared.next_multiple_of(32);
    let y_at = shared_stride * most;
    let y = maker.rows_after("y", y_at, spec.top_k * width, most);
    maker.more_rows(y, 0, shared_stride);
    let (shared, placed) = (bank.shared as u32, bank.placed as u32);
    bank.steps(maker, |rows, row0| moe_glu::Params {
        rows,
        groups: bank.groups() as u32,
        outputs: (rows - 2 * shared) / (2 * placed),
        placed,
        shared_outputs: shared,
        first_shared: spec.top_k as u32,
        row0,
        y_at: y_at as u32,
        y_stride: width as u32,
        shared_stride: shared_stride as u32,
        stride: bank.logits_len() as u32,
        routes_at,
        square_vectors: spec.cols.div_ceil(16) as u32,
        inv_cols: 1.0 / spec.cols as f32,
        eps: 1e-2,
        gelu: u32::from(spec.gelu),
    })?;
    bank.rounds(maker, |random, tokens| bank.choosing_inputs(random, tokens))
}

fn matvec(bank: &Bank, maker: &mut Maker) -> Result<()> {
    matvec_case(bank, maker, false)
}

fn gated_matvec(bank: &Bank, maker: &mut Maker) -> Result<()> {
    matvec_case(bank, maker, true)
}

fn matvec_case(bank: &Bank, maker: &mut Maker, gated: bool) -> Result<()> {
    let (spec, width) = (bank.spec, bank.width());
    let routes_at = bank.choosing(maker);
    // The experts in the weights, and the slots of a token.
    let (placed, slots) = match spec.part.weights {
        Weights::Shared => (1, 0),
        _ => (bank.placed, spec.top_k),
    };
    let y_at = 64;
    maker.rows_after("y", y_at, slots.max(1) * width, bank.most());
    bank.steps(maker, |rows, row0| moe_matvec::Params {
        rows,
        groups: bank.groups() as u32,
        outputs: rows / placed as u32,
        top_k: slots as u32,
        row0,
        y_at: (y_at / 4) as u32,
        y_stride: (width / 4) as u32,
        stride: bank.logits_len() as u32,
        routes_at,
        square_vectors: spec.cols.div_ceil(16) as u32,
        inv_cols: 1.0 / spec.cols as f32,
        eps: 1e-2,
        gated: u32::from(gated),
        gelu: u32::from(spec.gelu),
    })?;
    bank.rounds(maker, |random, tokens| {
        let mut inputs = bank.choosing_inputs(random, tokens);
        let mut gates = vec![0; y_at];
        gates.extend(padded(random, tokens as usize * slots.max(1), spec.outputs, width, 4.0));
        inputs.push(("y", gates));
        inputs
    })
}

fn down(bank: &Bank, maker: &mut Maker) -> Result<()> {
    let (spec, most, groups, len) = (bank.spec, bank.most(), bank.groups(), bank.width());
    let (x_at, routes_at) = (2, 6);
    maker.width = most;
    maker.rows_after("router", routes_at, 2 * spec.top_k, most);
    maker.rows_after("x", x_at * 32, spec.top_k * groups * 32, most);
    maker.rows("h", len, most);
    maker.rows("x_scaled", len, most);
    maker.rows("squares", (len / 4).next_multiple_of(32), most);
    bank.steps(maker, |rows, row0| moe_down::Params {
        rows,
        groups: groups as u32,
        inv_groups: 1.0 / groups as f32,
        outputs: rows / bank.placed as u32,
        row0,
        top_k: spec.top_k as u32,
        x_at: x_at as u32,
        routes_at: routes_at as u32,
        y_stride: (len / 4) as u32,
    })?;
    bank.rounds(maker, |random, tokens| {
        let n = tokens as usize;
        let mut routes = vec![0; routes_at];
        for _ in 0..n {
            for expert in bank.chosen(random) {
                let weight = Random::unit(random.bits());
                routes.extend([bank.places[expert as usize], weight.to_bits()]);
            }
        }
        let mut activations = vec![0; x_at * 32];
        activations.extend(operands(random, n * spec.top_k, spec.cols, groups * 32));
        let stream = padded(random, n, spec.outputs, len, 1.0);
        vec![("router", routes), ("x", activations), ("h", stream)]
    })
}

fn route(bank: &Bank, maker: &mut Maker) -> Result<()> {
    let (spec, most, stride) = (bank.spec, bank.most(), bank.logits_len());
    maker.rows("router", stride, most);
    maker.rows("routes", 2 * (spec.top_k + 1), most);
    maker.step(moe_route::Params {
        stride: stride as u32,
        shared_expert: u32::from(spec.shared != 0),
    })?;
    bank.rounds(maker, |random, tokens| {
        vec![("experts", bank.table(random)), ("router", bank.logits(random, tokens))]
    })
}

fn count(bank: &Bank, maker: &mut Maker) -> Result<()> {
    let (spec, stride) = (bank.spec, bank.logits_len());
    maker.rows("router", stride, bank.most());
    maker.buffer("counts", spec.experts);
    maker.step(moe_count::Params { stride: stride as u32 })?;
    bank.rounds(maker, |random, tokens| {
        let mut inputs = vec![("experts", bank.table(random)), ("router", bank.logits(random, tokens))];
        // Counts of earlier runs.
        inputs.push(("counts", (0..spec.experts as u32).map(|expert| expert % 5).collect()));
        inputs
    })
}

fn lists(bank: &Bank, maker: &mut Maker) -> Result<()> {
    maker.buffer("routes", 2 * (bank.spec.top_k + 1) * bank.most());
    maker.buffer("lists", bank.lists_len());
    let tiles = bank.tiles() as u32;
    maker.step(moe_lists::Params { tiles })?;
    bank.rounds(maker, |random, tokens| {
        vec![("experts", bank.table(random)), ("routes", bank.routes(random, tokens))]
    })
}

/// Makes the operands of a product with tiles of tokens, of which `x_entries` entries share a token's activations.
fn tiled_operands(bank: &Bank, maker: &mut Maker, x_entries: usize) {
    let entries = bank.most() * bank.spec.top_k;
    maker.buffer("lists", bank.lists_len());
    maker.buffer("x", bank.groups() * 32 * entries / x_entries);
    maker.buffer("y", bank.width() * entries);
}

fn tiled_inputs(bank: &Bank, random: &mut Random, tokens: u32, x_entries: usize) -> Vec<(&'static str, Vec<u32>)> {
    let (spec, row) = (bank.spec, bank.groups() * 32);
    vec![
        ("experts", bank.table(random)),
        ("lists", bank.lists(random, tokens)),
        (
            "x",
            operands(random, tokens as usize * spec.top_k / x_entries, spec.cols, row),
        ),
    ]
}

fn matmul_glu(bank: &Bank, maker: &mut Maker) -> Result<()> {
    let top_k = bank.spec.top_k;
    tiled_operands(bank, maker, top_k);
    let (shared, placed) = (bank.shared as u32, bank.placed as u32);
    bank.steps(maker, |rows, row0| moe_matmul_glu::Params {
        rows,
        groups: bank.groups() as u32,
        outputs: (rows - 2 * shared) / (2 * placed),
        placed,
        shared_outputs: shared,
        row0,
        y_stride: (bank.width() / 4) as u32,
        x_entries: top_k as u32,
        tiles: bank.tiles() as u32,
        gelu: u32::from(bank.spec.gelu),
    })?;
    bank.rounds(maker, |random, tokens| tiled_inputs(bank, random, tokens, top_k))
}

fn matmul_up(bank: &Bank, maker: &mut Maker) -> Result<()> {
    let (spec, top_k) = (bank.spec, bank.spec.top_k);
    tiled_operands(bank, maker, top_k);
    bank.steps(maker, |rows, row0| moe_matmul_up::Params {
        rows,
        groups: bank.groups() as u32,
        outputs: rows / bank.placed as u32,
        row0,
        y_stride: (bank.width() / 4) as u32,
        x_entries: top_k as u32,
        tiles: bank.tiles() as u32,
        gelu: u32::from(spec.gelu),
    })?;
    bank.rounds(maker, |random, tokens| {
        let mut inputs = tiled_inputs(bank, random, tokens, top_k);
        let gates = padded(random, tokens as usize * top_k, spec.outputs, bank.width(), 4.0);
        inputs.push(("y", gates));
        inputs
    })
}

fn matmul(bank: &Bank, maker: &mut Maker) -> Result<()> {
    tiled_operands(bank, maker, 1);
    bank.steps(maker, |rows, row0| moe_matmul::Params {
        rows,
        groups: bank.groups() as u32,
        outputs: rows / bank.placed as u32,
        row0,
        y_stride: (bank.width() / 4) as u32,
        x_entries: 1,
        top_k: bank.spec.top_k as u32,
        tiles: bank.tiles() as u32,
    })?;
    bank.rounds(maker, |random, tokens| tiled_inputs(bank, random, tokens, 1))
}

fn combine(bank: &Bank, maker: &mut Maker) -> Result<()> {
    let (spec, most, len) = (bank.spec, bank.most(), bank.spec.cols);
    maker.rows("routes", 2 * (spec.top_k + 1), most);
    maker.rows("expert_y", len * spec.top_k, most);
    maker.rows("shared_y", len, most);
    maker.rows("h", len, most);
    maker.step(moe_combine::Params {
        vectors: (len / 4) as u32,
        top_k: spec.top_k as u32,
    })?;
    bank.rounds(maker, |random, tokens| {
        let count = tokens as usize * len;
        let mut inputs = vec![
            ("routes", bank.routes(random, tokens)),
            ("expert_y", random.words(count * spec.top_k, 1.0)),
        ];
        // Without a shared expert nothing may be read here.
        if spec.shared != 0 {
            inputs.push(("shared_y", random.words(count, 1.0)));
        }
        inputs.push(("h", random.words(count, 1.0)));
        inputs
    })
}
