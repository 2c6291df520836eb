//! Cases of mixtures of experts: counts of experts on both sides of a power of two, from one up to the most; ties, biases and
//! sigmoids; experts that a bank does not hold; banks in segments.

use super::dtypes::{runnable, segment_bytes, special};
use super::experts::{Bank, Moe, Part, Weights};
use crate::dtype::Dtype;
use crate::error::{Result, bail};
use crate::op::Kernel;
use crate::parity::case::{Table, flags};
use crate::parity::maker::Maker;
use crate::parity::random::{Random, operands, padded};

const GLU: Part = (Kernel::MoeGlu, Weights::Pairs);
const GATES: Part = (Kernel::MoeMatvec, Weights::Experts);
const PRODUCTS: Part = (Kernel::MoeMatvec, Weights::Gated);
const SHARED: Part = (Kernel::MoeMatvec, Weights::Shared);
const DOWN: Part = (Kernel::MoeDown, Weights::Experts);
const MATMUL_GLU: Part = (Kernel::MoeMatmulGlu, Weights::Pairs);
const MATMUL_UP: Part = (Kernel::MoeMatmulUp, Weights::Experts);
const MATMUL: Part = (Kernel::MoeMatmul, Weights::Experts);
const ROUTE: Part = (Kernel::MoeRoute, Weights::None);
const COUNT: Part = (Kernel::MoeCount, Weights::None);
const LISTS: Part = (Kernel::MoeLists, Weights::None);
const COMBINE: Part = (Kernel::MoeCombine, Weights::None);

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
    for (what, values) in special(dtype) {
        add(what, &|moe| moe.values = values);
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
                moe.tokens = vec![if part.1 == Weights::None { 9 } else { 2 }];
            });
        }
    }
}

/// Cuts the weights into at least two segments: room for 8 rows of all parts, and half as much again for types whose rows vary.
fn cut(moe: &mut Moe) {
    let parts = match moe.part.1 {
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
    moe.cols = moe.cols.next_multiple_of(dtype.row_multiple());
    let (kernel, weights) = part;
    let mut name = kernel.spec().name.to_string();
    if weights != Weights::None {
        name += &format!(".{} {}x{}", dtype.name(), moe.outputs, moe.cols);
    }
    name += &format!(" {} of {}", moe.top_k, moe.experts);
    name += &flags([
        (moe.sigmoid, " sigmoid"),
        (moe.renormalise, " renormalised"),
        (moe.biased, " biased"),
        (moe.ties, " ties"),
        (moe.gelu, " gelu"),
        (is_gated(weights), " gated"),
        (weights == Weights::Shared, ", shared"),
    ]);
    table.add(name + what, move |maker| build(&Bank::new(&moe, maker)?, maker));
}

/// Whether products are multiplied with gates.
fn is_gated(weights: Weights) -> bool {
    matches!(weights, Weights::Gated | Weights::Shared)
}

fn build(bank: &Bank, maker: &mut Maker) -> Result<()> {
    match bank.spec.part.0 {
        Kernel::MoeGlu => glu(bank, maker),
        Kernel::MoeMatvec => matvec(bank, maker),
        Kernel::MoeDown => down(bank, maker),
        Kernel::MoeMatmulGlu | Kernel::MoeMatmulUp | Kernel::MoeMatmul => matmul(bank, maker),
        Kernel::MoeRoute => route(bank, maker),
        Kernel::MoeCount => count(bank, maker),
        Kernel::MoeLists => lists(bank, maker),
        Kernel::MoeCombine => combine(bank, maker),
        other => bail!(Internal, "{} is not of a mixture of experts", other.spec().name),
    }
}

fn glu(bank: &Bank, maker: &mut Maker) -> Result<()> {
    let (most, width) = (bank.most(), bank.width());
    bank.choosing(maker);
    let y_at = bank.shared_stride() * most;
    let y = maker.rows_after("y", y_at, bank.spec.top_k * width, most);
    maker.more_rows(y, 0, bank.shared_stride());
    bank.steps(maker, &[("y_at", y_at), ("y_stride", width)])?;
    bank.rounds(maker, |random, tokens| bank.choosing_inputs(random, tokens))
}

fn matvec(bank: &Bank, maker: &mut Maker) -> Result<()> {
    let (spec, width, weights) = (bank.spec, bank.width(), bank.spec.part.1);
    bank.choosing(maker);
    let top_k = if weights == Weights::Shared { 0 } else { spec.top_k };
    let y_at = 64;
    maker.rows_after("y", y_at, top_k.max(1) * width, bank.most());
    let gated = usize::from(is_gated(weights));
    bank.steps(maker, &[("y_at", y_at / 4), ("top_k", top_k), ("gated", gated)])?;
    bank.rounds(maker, |random, tokens| {
        let mut inputs = bank.choosing_inputs(random, tokens);
        let mut gates = vec![0; y_at];
        gates.extend(padded(random, tokens as usize * top_k.max(1), spec.outputs, width, 4.0));
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
    bank.steps(maker, &[("x_at", x_at), ("routes_at", routes_at)])?;
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

/// The products with tiles of tokens.
fn matmul(bank: &Bank, maker: &mut Maker) -> Result<()> {
    let (spec, width, row) = (bank.spec, bank.width(), bank.groups() * 32);
    let kernel = spec.part.0;
    let entries = bank.most() * spec.top_k;
    // The entries of a token share its activations, except those of down projections.
    let x_entries = if kernel == Kernel::MoeMatmul { 1 } else { spec.top_k };
    maker.buffer("lists", bank.lists_len());
    maker.buffer("x", row * entries / x_entries);
    maker.buffer("y", width * entries);
    bank.steps(maker, &[("x_entries", x_entries)])?;
    bank.rounds(maker, |random, tokens| {
        let entries = tokens as usize * spec.top_k;
        let mut inputs = vec![
            ("experts", bank.table(random)),
            ("lists", bank.lists(random, tokens)),
            ("x", operands(random, entries / x_entries, spec.cols, row)),
        ];
        if kernel == Kernel::MoeMatmulUp {
            inputs.push(("y", padded(random, entries, spec.outputs, width, 4.0)));
        }
        inputs
    })
}

fn route(bank: &Bank, maker: &mut Maker) -> Result<()> {
    let most = bank.most();
    maker.rows("router", bank.logits_len(), most);
    maker.rows("routes", 2 * (bank.spec.top_k + 1), most);
    bank.steps(maker, &[])?;
    bank.rounds(maker, |random, tokens| {
        vec![("experts", bank.table(random)), ("router", bank.logits(random, tokens))]
    })
}

fn count(bank: &Bank, maker: &mut Maker) -> Result<()> {
    let experts = bank.spec.experts;
    maker.rows("router", bank.logits_len(), bank.most());
    maker.buffer("counts", experts);
    bank.steps(maker, &[])?;
    bank.rounds(maker, |random, tokens| {
        // Counts of earlier runs.
        let counts = (0..experts as u32).map(|expert| expert % 5).collect();
        vec![
            ("experts", bank.table(random)),
            ("router", bank.logits(random, tokens)),
            ("counts", counts),
        ]
    })
}

fn lists(bank: &Bank, maker: &mut Maker) -> Result<()> {
    maker.buffer("routes", 2 * (bank.spec.top_k + 1) * bank.most());
    maker.buffer("lists", bank.lists_len());
    bank.steps(maker, &[])?;
    bank.rounds(maker, |random, tokens| {
        vec![("experts", bank.table(random)), ("routes", bank.routes(random, tokens))]
    })
}

fn combine(bank: &Bank, maker: &mut Maker) -> Result<()> {
    let (spec, most, len) = (bank.spec, bank.most(), bank.spec.cols);
    maker.rows("routes", 2 * (spec.top_k + 1), most);
    maker.rows("expert_y", len * spec.top_k, most);
    maker.rows("shared_y", len, most);
    maker.rows("h", len, most);
    bank.steps(maker, &[])?;
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
