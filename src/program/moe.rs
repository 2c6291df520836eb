//! Mixtures of experts as steps. Decode: router, gate and up of the chosen experts and the shared one, their down projections
//! with the residual, the shared one's; the columns of a round each read the experts that they chose. Prefill: columns are
//! grouped by expert, so that each expert's weights are read once for 8 of its columns.

mod apart;

use super::bank::{self, Banks, Projections};
use super::build::Builder;
use super::masking::{Content, Part};
use super::place::{Masked, Place};
use super::walk::{DecodeNorm, Mode, Source, Walk};
use super::weights::may_follow;
use super::{Bind, BufferId, Fill, Matrix, MatrixId, Paged, Piece, Routed, Stacking, Table, VectorId};
use crate::error::{Result, bail};
use crate::kernel::{self, Op};
use crate::model::{Activation, FeedForward, Layer, Linear, Model, Moe};

/// Experts and experts a token takes that the kernels have room for; see `shaders/lib/route.wgsl`.
const MAX_EXPERTS: usize = 512;
const MAX_TOP_K: usize = 64;
/// Columns of a tile of prefill.
const TILE: usize = 8;

/// Buffers of mixtures, as large as the largest layer needs.
#[derive(Clone, Copy)]
pub(super) struct MoeScratch {
    /// Logits of the columns that are decoded; places and weights behind them.
    router: BufferId,
    /// The shared expert's activations of these columns, then the experts'.
    act: BufferId,
    /// Logits of a chunk.
    routers: BufferId,
    /// Experts and weights of a chunk's columns.
    routes: BufferId,
    /// Columns by expert.
    lists: BufferId,
    /// The experts' activations of a chunk.
    acts: BufferId,
    /// What experts add, before it is weighted.
    parts: BufferId,
    /// What the shared expert adds.
    shared: BufferId,
}

/// Where the numbers of one layer lie in the scratch buffers.
#[derive(Clone, Copy)]
struct Layout {
    top_k: usize,
    /// Index of the logit of the shared expert's weight.
    gate: Option<usize>,
    /// Columns that are decoded side by side.
    columns: usize,
    /// Words of a column's logits.
    logits: usize,
    /// Elements of the shared expert's activations, and of an expert's, with padding.
    shared: usize,
    width: usize,
    tiles: usize,
}

/// Whether the shared expert's weight is the last output of the router's matrix.
fn is_behind_router(b: &Builder, moe: &Moe, gate: &Linear) -> Result<bool> {
    let planes = b.planes(moe.router.weight)?;
    Ok(b.planes(gate.weight)? == planes && may_follow(planes, moe.experts.len()))
}

impl Layout {
    fn of(b: &Builder, moe: &Moe) -> Result<Layout> {
        let experts = moe.experts.len();
        if experts > MAX_EXPERTS || moe.top_k > MAX_TOP_K {
            bail!(
                UnsupportedModel,
                "{experts} experts of which a token takes {}; wanted at most {MAX_EXPERTS} and {MAX_TOP_K}",
                moe.top_k
            );
        }
        let gate = match &moe.shared_gate {
            None => None,
            // Behind the logits in one matrix, or in a vector of its own.
            Some(gate) if is_behind_router(b, moe, gate)? => Some(experts),
            Some(_) => Some(experts.next_multiple_of(4)),
        };
        let chunk = b.options.chunk as usize;
        let entries = chunk * moe.top_k;
        Ok(Layout {
            top_k: moe.top_k,
            gate,
            columns: b.columns_decoded() as usize,
            logits: (experts + 4).next_multiple_of(32),
            shared: moe.shared.as_ref().map_or(0, |ffn| ffn.down.cols.next_multiple_of(32)),
            width: moe.experts.first().map_or(0, |ffn| ffn.down.cols.next_multiple_of(32)),
            tiles: entries.div_ceil(TILE) + experts.min(entries),
        })
    }

    /// Where a bank's places and weights begin.
    fn routes_at(&self, bank: usize) -> usize {
        self.columns * (self.logits + bank * 2 * self.top_k)
    }

    /// Where the experts' activations begin.
    fn act_at(&self) -> usize {
        self.columns * self.shared
    }
}

/// The buffers, or `None` for a network without mixtures.
pub(super) fn scratch(b: &mut Builder, model: &Model) -> Result<Option<MoeScratch>> {
    let mut layouts = Vec::new();
    let drafting = model.mtp.iter().filter(|_| b.options.drafts != 0);
    for layer in model.layers.iter().chain(drafting.flat_map(|mtp| &mtp.layers)) {
        if let FeedForward::Moe(moe) = &layer.ffn {
            layouts.push((Layout::of(b, moe)?, bank::count(b, moe)?));
        }
    }
    if layouts.is_empty() {
        return Ok(None);
    }
    let widest = |f: &dyn Fn(&(Layout, usize)) -> usize| layouts.iter().map(f).max().unwrap_or(0);
    let chunk = b.options.chunk as usize;
    let hidden = model.hidden.next_multiple_of(32);
    let mut buffer = |label: &str, words: usize| b.buffer(label.into(), words as u64 * 4, Fill::Zero);
    Ok(Some(MoeScratch {
        router: buffer("decode.router", widest(&|(l, banks)| l.routes_at(*banks)))?,
        act: buffer(
            "decode.experts.act",
            widest(&|(l, _)| l.act_at() + l.columns * l.top_k * l.width),
        )?,
        routers: buffer("prefill.router", widest(&|(l, _)| l.logits * chunk))?,
        routes: buffer("prefill.routes", widest(&|(l, _)| 2 * (l.top_k + 1) * chunk))?,
        lists: buffer("prefill.lists", widest(&|(l, _)| 3 * l.tiles + l.top_k * chunk))?,
        acts: buffer("prefill.experts.act", widest(&|(l, _)| l.top_k * l.width * chunk))?,
        parts: buffer("prefill.experts.y", widest(&|(l, _)| l.top_k * hidden * chunk))?,
        shared: buffer("prefill.shared.y", hidden * chunk)?,
    }))
}

/// One layer on its way into steps.
struct Mixture<'m> {
    moe: &'m Moe,
    layout: Layout,
    scratch: MoeScratch,
    /// The banks with their matrices' numbers and their tables of experts.
    banks: Vec<Placed>,
    /// Gate and up projections of the shared expert: the bank's or its own.
    shared: Option<Projections<MatrixId>>,
    /// Whether they are the bank's.
    shared_in_bank: bool,
    gelu: u32,
}

struct Placed {
    placed: u32,
    gate_up: Projections<MatrixId>,
    has_shared: bool,
    down: MatrixId,
    table: BufferId,
}

impl Walk<'_> {
    /// Both modes of h += mixture(norm(h)).
    pub(super) fn moe(
        &mut self,
        place: Place,
        layer: &Layer,
        moe: &Moe,
        norm: VectorId,
        next_norm: VectorId,
    ) -> Result<()> {
        let name = |part: &str| format!("{place}.ffn.{part}");
        let Some(scratch) = self.moe else {
            bail!(UnsupportedModel, "{place} has no buffers for its experts")
        };
        let layout = Layout::of(&self.b, moe)?;
        let Banks { banks, shared } = bank::banks(&self.b, moe, &name)?;
        let routable = self.masked(place, Part::Experts, moe.experts.len(), 1);
        let mut placed = Vec::new();
        let mut shared_matrix = None;
        let counts = match self.b.options.experts.counted || banks.iter().any(|bank| !bank.members.is_empty()) {
            true => Some(self.counts(place.layer, moe, name("counts"))?),
            false => None,
        };
        for (i, bank) in banks.into_iter().enumerate() {
            let bytes = 4 * (8 + 2 * bank.places.len() as u64);
            let fill = Fill::Experts {
                header: [
                    moe.experts.len() as u32,
                    moe.top_k as u32,
                    u32::from(moe.sigmoid),
                    u32::from(moe.renormalise),
                    u32::from(moe.expert_bias.is_some()),
                    layout.gate.map_or(bank::ABSENT, |at| at as u32),
                    moe.scale.to_bits(),
                    0,
                ],
                places: bank.places,
                bias: moe.expert_bias,
            };
            let whole = match routable {
                Some(_) => fill.expert_words(self.b.tensors)?,
                None => Vec::new(),
            };
            let table = self.b.buffer(name(&format!("experts.{i}.table")), bytes, fill)?;
            if let Some(masked) = routable {
                self.fill_by_mask(masked.visit, masked.part, table, Content::Table(whole));
            }
            let gate_up = bank.gate_up.add_to(&mut self.b);
            if bank.has_shared {
                shared_matrix = Some(gate_up);
            }
            let down = self.b.add_matrix(bank.down);
            if !bank.members.is_empty() {
                let table = Table {
                    buffer: table,
                    allowed: Vec::new(),
                };
                // The one there is, where a layer is applied again.
                let mut known = self.b.paged.iter_mut();
                let numbers = (gate_up.each(), down);
                match known.find(|known| (known.gate_up, known.down) == numbers) {
                    Some(known) => known.tables.push(table),
                    None => self.b.paged.push(Paged {
                        tables: vec![table],
                        gate_up: numbers.0,
                        down,
                        slots: bank.placed,
                        members: bank.members,
                    }),
                }
            }
            placed.push(Placed {
                placed: bank.placed as u32,
                gate_up,
                has_shared: bank.has_shared,
                down,
                table,
            });
        }
        let mixture = Mixture {
            moe,
            layout,
            scratch,
            banks: placed,
            shared_in_bank: shared_matrix.is_some(),
            shared: shared_matrix.or(shared.map(|own| own.add_to(&mut self.b))),
            gelu: u32::from(self.model.activation == Activation::GeluTanh),
        };
        self.norm(norm, &name("norm"));
        self.router(&mixture, &name, routable)?;
        if let Some(counts) = counts {
            self.count(&mixture, counts, &name("count"));
        }
        if layer.ffn_post_norm.is_some() {
            self.sum_apart(&name("zero"));
        }
        self.decode_experts(&mixture, &name, next_norm);
        self.prefill_experts(&mixture, &name);
        if let Some(shared) = &moe.shared {
            let label = name("shared.down");
            let matrix = self.b.matrix(label.clone(), &[shared.down.weight], Stacking::Rows)?;
            self.matvec_add(&label, matrix, None, scratch.act, next_norm);
            let from = Source {
                matrix,
                bias: None,
                row0: 0,
            };
            let y_stride = Self::vectors_of(self.model.hidden);
            self.matmul(from, self.prefill.act, scratch.shared, y_stride, &label);
        }
        self.combine(&mixture, &name("combine"));
        match layer.ffn_post_norm {
            None => {
                self.decode_normed = false;
                self.prefill_normed = false;
            }
            Some(tensor) => {
                self.swap_stream();
                let label = name("norm_after");
                let post_norm = self.vector(label.clone(), tensor);
                self.add_norm(&label, post_norm, next_norm);
            }
        }
        Ok(())
    }

    /// Has what follows add to zeros in place of the stream, until the stream is swapped back: experts add one by one, and the
    /// norm behind them is that of their sum.
    fn sum_apart(&mut self, label: &str) {
        let len = self.model.hidden;
        let zeros = self.b.vector("zeros".into(), vec![Piece { tensor: None, len }], 0.0);
        for mode in [Mode::Decode, Mode::Prefill] {
            let scratch = self.scratch(mode);
            let to = (scratch.y, Self::vectors_of(len), 0);
            self.norm_into(mode, scratch.h, zeros, to, label);
        }
        self.swap_stream();
    }

    /// The buffer that counts how often each expert is chosen.
    fn counts(&mut self, layer: usize, moe: &Moe, label: String) -> Result<BufferId> {
        let experts = moe.experts.len();
        let counts = self.b.words(&label, experts)?;
        self.b.routed.push(Routed { layer, experts, counts });
        Ok(counts)
    }

    fn count(&mut self, mixture: &Mixture, counts: BufferId, label: &str) {
        let Mixture { layout, scratch, .. } = mixture;
        let Some(first) = mixture.banks.first() else { return };
        let op = Op::MoeCount(kernel::MoeCount {
            stride: layout.logits as u32,
        });
        for (mode, router) in [(Mode::Decode, scratch.router), (Mode::Prefill, scratch.routers)] {
            let bindings = [self.scratch(mode).ctl, first.table, router, counts]
                .map(Bind::Buffer)
                .to_vec();
            self.push(mode, label, op, None, bindings);
        }
    }

    /// Logits of the experts and of the shared expert's weight.
    fn router(&mut self, mixture: &Mixture, name: &dyn Fn(&str) -> String, routable: Option<Masked>) -> Result<()> {
        let Mixture {
            moe, layout, scratch, ..
        } = mixture;
        let mut parts = vec![moe.router.weight];
        let mut alone = None;
        match (&moe.shared_gate, layout.gate) {
            (Some(gate), _) if is_behind_router(&self.b, moe, gate)? => parts.push(gate.weight),
            (Some(gate), Some(at)) => alone = Some((gate.weight, at as u32)),
            _ => {}
        }
        let mut maps = vec![(name("router"), parts, 0)];
        maps.extend(alone.map(|(gate, at)| (name("shared.weight"), vec![gate], at)));
        for (label, parts, row0) in maps {
            let matrix = self.b.matrix(label.clone(), &parts, Stacking::Rows)?;
            let from = Source {
                matrix,
                bias: None,
                row0,
            };
            let norm = self.decode_norm();
            let stride = (layout.logits / 4) as u32;
            let begin = [Mode::Decode, Mode::Prefill].map(|mode| self.at(mode));
            self.matvec(from, self.decode.x, norm, (scratch.router, stride), &label);
            self.matmul(from, self.prefill.x, scratch.routers, stride, &label);
            if row0 == 0 {
                self.narrow_router(begin, routable, &label)?;
            }
        }
        Ok(())
    }

    fn decode_experts(&mut self, mixture: &Mixture, name: &dyn Fn(&str) -> String, next_norm: VectorId) {
        let Mixture { layout, scratch, .. } = mixture;
        let shared_outputs = mixture.moe.shared.as_ref().map_or(0, |ffn| ffn.down.cols as u32);
        let DecodeNorm {
            square_vectors,
            inv_cols,
            eps,
        } = self.decode_norm();
        let glu = kernel::MoeGlu {
            y_at: layout.act_at() as u32,
            y_stride: layout.width as u32,
            shared_stride: layout.shared as u32,
            stride: layout.logits as u32,
            square_vectors,
            inv_cols,
            eps,
            gelu: mixture.gelu,
            ..kernel::MoeGlu::default()
        };
        let bindings = |weight, table, walk: &Walk| {
            let buffers = [walk.decode.x, walk.decode.squares, table, scratch.router, scratch.act];
            [weight]
                .into_iter()
                .chain(buffers.map(Bind::Buffer))
                .collect::<Vec<_>>()
        };
        for (b, bank) in mixture.banks.iter().enumerate() {
            let gate_up = match bank.gate_up {
                Projections::Both(matrix) => matrix,
                Projections::Apart(both) => {
                    self.decode_apart(mixture, both, Some((b, bank)), name);
                    continue;
                }
            };
            let Matrix { planes, segments, .. } = self.b.matrices[gate_up].clone();
            for (i, segment) in segments.iter().enumerate() {
                let shared_outputs = if bank.has_shared { shared_outputs } else { 0 };
                let rows = segment.geometry.rows as u32;
                let op = Op::MoeGlu(kernel::MoeGlu {
                    rows,
                    units: segment.geometry.units() as u32,
                    outputs: (rows - 2 * shared_outputs) / (2 * bank.placed),
                    placed: bank.placed,
                    shared_outputs,
                    first_shared: layout.top_k as u32,
                    row0: segment.row0,
                    routes_at: layout.routes_at(b) as u32,
                    ..glu
                });
                let bindings = bindings(Bind::Weight(gate_up, i), bank.table, self);
                self.push(Mode::Decode, &name("experts.gate_up"), op, Some(planes), bindings);
            }
        }
        if let Some(Projections::Apart(both)) = mixture.shared {
            self.decode_apart(mixture, both, None, name);
        }
        if let (Some(Projections::Both(shared)), false, Some(bank)) =
            (mixture.shared, mixture.shared_in_bank, mixture.banks.first())
        {
            let Matrix { planes, segments, .. } = self.b.matrices[shared].clone();
            for (i, segment) in segments.iter().enumerate() {
                let rows = segment.geometry.rows as u32;
                let op = Op::MoeGlu(kernel::MoeGlu {
                    rows,
                    units: segment.geometry.units() as u32,
                    outputs: rows / 2,
                    shared_outputs: rows / 2,
                    row0: segment.row0,
                    ..glu
                });
                let bindings = bindings(Bind::Weight(shared, i), bank.table, self);
                self.push(Mode::Decode, &name("shared.gate_up"), op, Some(planes), bindings);
            }
        }
        for (b, bank) in mixture.banks.iter().enumerate() {
            let Matrix { planes, segments, .. } = self.b.matrices[bank.down].clone();
            for (i, segment) in segments.iter().enumerate() {
                let (rows, units) = (segment.geometry.rows as u32, segment.geometry.units() as u32);
                let op = Op::MoeDown(kernel::MoeDown {
                    rows,
                    units,
                    inv_units: 1.0 / units as f32,
                    outputs: rows / bank.placed,
                    row0: segment.row0,
                    slots: layout.top_k as u32,
                    x_at: (layout.act_at() / 32) as u32,
                    routes_at: layout.routes_at(b) as u32,
                    y_stride: Self::vectors_of(self.model.hidden),
                });
                let bindings = vec![
                    Bind::Weight(bank.down, i),
                    Bind::Buffer(scratch.router),
                    Bind::Buffer(scratch.act),
                    Bind::Vector(next_norm),
                    Bind::Buffer(self.decode.h),
                    Bind::Buffer(self.decode.x),
                    Bind::Buffer(self.decode.squares),
                ];
                self.push(Mode::Decode, &name("experts.down"), op, Some(planes), bindings);
            }
        }
    }

    fn prefill_experts(&mut self, mixture: &Mixture, name: &dyn Fn(&str) -> String) {
        let Mixture {
            layout, scratch, gelu, ..
        } = mixture;
        let ctl = self.prefill.ctl;
        let Some(first) = mixture.banks.first() else { return };
        let bind = |buffers: &[usize]| buffers.iter().copied().map(Bind::Buffer).collect::<Vec<_>>();
        let op = Op::MoeRoute(kernel::MoeRoute {
            stride: layout.logits as u32,
            shared_expert: u32::from(mixture.moe.shared.is_some()),
        });
        let bindings = bind(&[ctl, first.table, scratch.routers, scratch.routes]);
        self.push(Mode::Prefill, &name("route"), op, None, bindings);
        let tiles = layout.tiles as u32;
        let op = Op::MoeLists(kernel::MoeLists { tiles });
        let bindings = bind(&[ctl, first.table, scratch.routes, scratch.lists]);
        self.push(Mode::Prefill, &name("lists"), op, None, bindings);

        let shared_outputs = mixture.moe.shared.as_ref().map_or(0, |ffn| ffn.down.cols as u32);
        let y_stride = (layout.width / 4) as u32;
        for bank in &mixture.banks {
            let gate_up = match bank.gate_up {
                Projections::Both(matrix) => matrix,
                Projections::Apart(both) => {
                    self.prefill_apart(mixture, both, bank, name);
                    continue;
                }
            };
            let Matrix { planes, segments, .. } = self.b.matrices[gate_up].clone();
            for (i, segment) in segments.iter().enumerate() {
                let shared_outputs = if bank.has_shared { shared_outputs } else { 0 };
                let rows = segment.geometry.rows as u32;
                let op = Op::MoeMatmulGlu(kernel::MoeMatmulGlu {
                    rows,
                    units: segment.geometry.units() as u32,
                    outputs: (rows - 2 * shared_outputs) / (2 * bank.placed),
                    placed: bank.placed,
                    shared_outputs,
                    row0: segment.row0,
                    y_stride,
                    x_entries: layout.top_k as u32,
                    tiles,
                    gelu: *gelu,
                });
                let mut bindings = vec![Bind::Weight(gate_up, i)];
                bindings.extend(bind(&[ctl, bank.table, scratch.lists, self.prefill.x, scratch.acts]));
                self.push(Mode::Prefill, &name("experts.gate_up"), op, Some(planes), bindings);
            }
        }
        if let Some(Projections::Apart(both)) = mixture.shared {
            self.prefill_shared_apart(mixture, both, name);
        }
        if let (Some(Projections::Both(shared)), Some(ffn)) = (mixture.shared, &mixture.moe.shared) {
            let Matrix { planes, segments, .. } = self.b.matrices[shared].clone();
            for (i, segment) in segments.iter().enumerate() {
                let rows = segment.geometry.rows as u32;
                let op = Op::MatmulGlu(kernel::MatmulGlu {
                    rows,
                    units: segment.geometry.units() as u32,
                    row0: segment.row0,
                    // In a bank the experts' rows follow.
                    part1: if mixture.shared_in_bank {
                        shared_outputs
                    } else {
                        rows / 2
                    },
                    part2: u32::MAX,
                    y_stride: Self::vectors_of(ffn.down.cols),
                    has_bias: 0,
                    bias_up: 0,
                    gelu: *gelu,
                });
                let bindings = vec![
                    Bind::Weight(shared, i),
                    Bind::Buffer(ctl),
                    Bind::Buffer(self.prefill.x),
                    Bind::Vector(self.none),
                    Bind::Buffer(self.prefill.act),
                ];
                self.push(Mode::Prefill, &name("shared.gate_up"), op, Some(planes), bindings);
            }
        }
        for bank in &mixture.banks {
            let Matrix { planes, segments, .. } = self.b.matrices[bank.down].clone();
            for (i, segment) in segments.iter().enumerate() {
                let rows = segment.geometry.rows as u32;
                let op = Op::MoeMatmul(kernel::MoeMatmul {
                    rows,
                    units: segment.geometry.units() as u32,
                    outputs: rows / bank.placed,
                    row0: segment.row0,
                    y_stride: Self::vectors_of(self.model.hidden),
                    x_entries: 1,
                    top_k: layout.top_k as u32,
                    tiles,
                });
                let mut bindings = vec![Bind::Weight(bank.down, i)];
                bindings.extend(bind(&[ctl, bank.table, scratch.lists, scratch.acts, scratch.parts]));
                self.push(Mode::Prefill, &name("experts.down"), op, Some(planes), bindings);
            }
        }
    }

    fn combine(&mut self, mixture: &Mixture, label: &str) {
        let scratch = mixture.scratch;
        let op = Op::MoeCombine(kernel::MoeCombine {
            vectors: Self::vectors_of(self.model.hidden),
            top_k: mixture.layout.top_k as u32,
        });
        let buffers = [
            self.prefill.ctl,
            scratch.routes,
            scratch.parts,
            scratch.shared,
            self.prefill.h,
        ];
        self.push(Mode::Prefill, label, op, None, buffers.map(Bind::Buffer).to_vec());
    }
}
