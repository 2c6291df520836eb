//! Mixtures of experts as steps.
//!
//! Decode: router; gate and up of the chosen experts and of the shared expert; down of the chosen experts, with the
//! residual; down of the shared expert. Each token of a speculative step reads its own experts. Prefill: tokens are
//! grouped by expert, so that the weights of an expert are read once for 8 of its tokens.

use super::banks::{self, Banks, Projections};
use super::builder::Builder;
use super::context::{
    DECODE, DecodeNorm, LayerPath, Lowering, MoeScratch, PREFILL, Phase, Product, Streams, vectors_of,
};
use super::masking::MaskedUnits;
use crate::error::{Result, bail};
use crate::graph::{Fill, Paged, Piece, Routed, Stacking, may_follow};
use crate::lm::masks::{Content, MaskAxis};
use crate::model::{FeedForward, Layer, Linear, Model, Moe};
use crate::op::{self, ABSENT, Bind, BufferId, EXPERT_TILE, MAX_EXPERTS, MAX_TOP_K, MatrixId, TABLE_HEADER, VectorId};

/// Sizes and offsets of the values of one layer in the scratch buffers.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    pub top_k: usize,
    /// Index of the logit of the shared expert's weight.
    gate: Option<usize>,
    /// Tokens that are decoded side by side.
    width: usize,
    /// Words of one token's logits.
    pub logits: usize,
    /// Elements of the activations of the shared expert and of an expert, with padding.
    pub shared: usize,
    pub expert: usize,
    pub tiles: usize,
}

/// Whether the logit of the shared expert's weight is the last output of the router's matrix.
fn is_in_router(b: &Builder, moe: &Moe, gate: &Linear) -> Result<bool> {
    let planes = b.planes(moe.router.weight)?;
    Ok(b.planes(gate.weight)? == planes && may_follow(planes, moe.experts.len()))
}

impl Layout {
    fn of(b: &Builder, moe: &Moe) -> Result<Layout> {
        let experts = moe.experts.len();
        if experts > MAX_EXPERTS as usize || moe.top_k > MAX_TOP_K as usize {
            bail!(
                UnsupportedModel,
                "{experts} experts of which a token takes {}, expected at most {MAX_EXPERTS} and {MAX_TOP_K}",
                moe.top_k
            );
        }
        let gate = match &moe.shared_gate {
            None => None,
            // It follows the logits of the experts, or begins a vector if it is a product of its own.
            Some(gate) if is_in_router(b, moe, gate)? => Some(experts),
            Some(_) => Some(experts.next_multiple_of(4)),
        };
        let entries = b.options.chunk as usize * moe.top_k;
        let padded = |width: usize| width.next_multiple_of(32);
        Ok(Layout {
            top_k: moe.top_k,
            gate,
            width: b.width(),
            logits: padded(experts + 4),
            shared: moe.shared.as_ref().map_or(0, |ffn| padded(ffn.down.cols)),
            expert: moe.experts.first().map_or(0, |ffn| padded(ffn.down.cols)),
            tiles: entries.div_ceil(EXPERT_TILE as usize) + experts.min(entries),
        })
    }

    /// The word of `router` at which the places and weights of a bank begin.
    pub fn routes_at(&self, bank: usize) -> usize {
        self.width * (self.logits + bank * 2 * self.top_k)
    }

    /// The element at which the activations of the experts begin.
    pub fn act_at(&self) -> usize {
        self.width * self.shared
    }
}

/// The buffers; `None` for a network without mixtures.
pub(super) fn scratch(b: &mut Builder, model: &Model) -> Result<Option<MoeScratch>> {
    let mut layouts = Vec::new();
    let drafting = model.mtp.iter().filter(|_| b.options.drafts != 0);
    for layer in model.layers.iter().chain(drafting.flat_map(|mtp| &mtp.layers)) {
        if let FeedForward::Moe(moe) = &layer.ffn {
            layouts.push((Layout::of(b, moe)?, banks::count(b, moe)?));
        }
    }
    if layouts.is_empty() {
        return Ok(None);
    }
    let widest = |f: &dyn Fn(&(Layout, usize)) -> usize| layouts.iter().map(f).max().unwrap_or(0);
    let chunk = b.options.chunk as usize;
    let hidden = model.hidden.next_multiple_of(32);
    Ok(Some(MoeScratch {
        router: b.words("decode.router", widest(&|(l, banks)| l.routes_at(*banks)))?,
        act: b.words(
            "decode.experts.act",
            widest(&|(l, _)| l.act_at() + l.width * l.top_k * l.expert),
        )?,
        chunk_router: b.words("prefill.router", widest(&|(l, _)| l.logits * chunk))?,
        routes: b.words("prefill.routes", widest(&|(l, _)| 2 * (l.top_k + 1) * chunk))?,
        lists: b.words("prefill.lists", widest(&|(l, _)| 3 * l.tiles + l.top_k * chunk))?,
        chunk_act: b.words("prefill.experts.act", widest(&|(l, _)| l.top_k * l.expert * chunk))?,
        expert_y: b.words("prefill.experts.y", widest(&|(l, _)| l.top_k * hidden * chunk))?,
        shared_y: b.words("prefill.shared.y", hidden * chunk)?,
    }))
}

/// One bank in the graph.
pub(super) struct PlacedBank {
    pub placed: u32,
    pub gate_up: Projections<MatrixId>,
    pub has_shared: bool,
    pub down: MatrixId,
    pub table: BufferId,
}

/// A mixture of experts while it is lowered.
pub(super) struct Mixture<'m> {
    pub moe: &'m Moe,
    pub layout: Layout,
    pub scratch: MoeScratch,
    pub banks: Vec<PlacedBank>,
    /// Gate and up projections of the shared expert, in matrices of a bank or of its own.
    pub shared: Option<Projections<MatrixId>>,
    /// Whether these are matrices of a bank.
    pub shared_in_bank: bool,
    pub gelu: u32,
}

impl Mixture<'_> {
    /// Outputs of the shared expert; 0 if there is none.
    pub fn shared_outputs(&self) -> u32 {
        self.moe.shared.as_ref().map_or(0, |ffn| ffn.down.cols as u32)
    }

    /// The first bank's table. All tables describe the same experts, and every mixture has a bank.
    pub fn any_table(&self) -> BufferId {
        self.banks.first().map_or(0, |bank| bank.table)
    }
}

impl Lowering<'_> {
    /// h += mixture(norm(h)).
    pub fn mixture(
        &mut self,
        path: LayerPath,
        layer: &Layer,
        moe: &Moe,
        [norm, next_norm]: [VectorId; 2],
        streams: Streams,
    ) -> Result<Streams> {
        let name = |role: &str| format!("{path}.ffn.{role}");
        let routable = self.masked_units(path, MaskAxis::Experts, moe.experts.len(), 1);
        let (mixture, counts) = self.place_banks(path, moe, routable, &name)?;
        self.prefill_norm(&streams, norm, &name("norm"));
        self.router(&mixture, &name, routable, &streams)?;
        if let Some(counts) = counts {
            self.count(&mixture, counts, &name("count"));
        }
        // Experts are added one by one. A norm after them applies to their sum, so they add to zeros in the other
        // buffer.
        let sums = match layer.ffn_post_norm {
            None => streams,
            Some(_) => self.zeroed(&name("zero"), &streams),
        };
        let decode_norm = self.decode_norm(&streams);
        self.decode_experts(&mixture, &name, decode_norm, next_norm, &sums);
        self.prefill_experts(&mixture, &name);
        if let Some(shared) = &moe.shared {
            let label = name("shared.down");
            let matrix = self.b.matrix(&label, &[shared.down.weight], Stacking::Rows)?;
            let lists = self.lists(&label, matrix, 0, None)?;
            let from = Product::plain(matrix);
            self.matvec_add(&label, from, mixture.scratch.act, next_norm, &sums, &lists);
            let y = (mixture.scratch.shared_y, vectors_of(self.model.hidden));
            self.matmul(&label, from, self.scratch[PREFILL].act, y, &lists);
        }
        self.combine(&mixture, &name("combine"), &sums);
        let Some(tensor) = layer.ffn_post_norm else {
            return Ok(streams.map(|stream| stream.with_normed(false)));
        };
        let label = name("norm_after");
        let post_norm = self.norm_weight(label.clone(), tensor);
        Ok(self.add_norm(&label, post_norm, next_norm, streams))
    }

    /// Sets the other buffers of the streams to zero, and swaps the buffers.
    fn zeroed(&mut self, label: &str, streams: &Streams) -> Streams {
        let len = self.model.hidden;
        let zeros = self.b.vector("zeros".into(), vec![Piece { tensor: None, len }], 0.0);
        for phase in Phase::BOTH {
            let stream = streams[phase as usize];
            let to = (stream.other, vectors_of(len), 0);
            self.norm_into(phase, stream.h, zeros, to, label);
        }
        streams.map(|stream| stream.swapped())
    }

    /// Adds the banks of a layer to the graph. Returns the buffer that counts the router's choices, if they are
    /// counted.
    fn place_banks<'m>(
        &mut self,
        path: LayerPath,
        moe: &'m Moe,
        routable: Option<MaskedUnits>,
        name: &dyn Fn(&str) -> String,
    ) -> Result<(Mixture<'m>, Option<BufferId>)> {
        let scratch = self.moe_scratch(moe)?;
        let layout = Layout::of(&self.b, moe)?;
        let Banks { banks, shared } = banks::banks(&self.b, moe, name)?;
        let is_counted = self.b.options.experts.counted || banks.iter().any(|bank| !bank.members.is_empty());
        let counts = match is_counted {
            true => Some(self.counts(path.layer, moe, name("counts"))?),
            false => None,
        };
        let mut placed = Vec::new();
        let mut shared_matrix = None;
        for (i, bank) in banks.into_iter().enumerate() {
            let table = self.table(moe, &layout, bank.places, routable, name(&format!("experts.{i}.table")))?;
            let gate_up = bank.gate_up.add_to(&mut self.b);
            if bank.has_shared {
                shared_matrix = Some(gate_up);
            }
            let down = self.b.add_matrix(bank.down);
            if !bank.members.is_empty() {
                let known = self.b.paged.iter_mut();
                let matrices = (gate_up.each(), down);
                // A layer that is applied again uses the bank of its first application.
                match { known }.find(|known| (known.gate_up, known.down) == matrices) {
                    Some(known) => known.tables.push(table),
                    None => self.b.paged.push(Paged {
                        tables: vec![table],
                        gate_up: matrices.0,
                        down,
                        slots: bank.placed,
                        members: bank.members,
                    }),
                }
            }
            placed.push(PlacedBank {
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
            gelu: self.gelu(),
        };
        Ok((mixture, counts))
    }

    /// The table of experts of one bank.
    fn table(
        &mut self,
        moe: &Moe,
        layout: &Layout,
        places: Vec<u32>,
        routable: Option<MaskedUnits>,
        label: String,
    ) -> Result<BufferId> {
        let bytes = 4 * (TABLE_HEADER + 2 * places.len()) as u64;
        let fill = Fill::Experts {
            header: [
                moe.experts.len() as u32,
                moe.top_k as u32,
                u32::from(moe.sigmoid),
                u32::from(moe.renormalise),
                u32::from(moe.expert_bias.is_some()),
                layout.gate.map_or(ABSENT, |at| at as u32),
                moe.scale.to_bits(),
                0,
            ],
            places,
            bias: moe.expert_bias,
        };
        let whole = match routable {
            Some(_) => fill.words(self.b.tensors)?,
            None => Vec::new(),
        };
        let table = self.b.buffer(label, bytes, fill)?;
        if let Some(units) = routable {
            self.fill_by_mask(&units, table, Content::Table(whole));
        }
        Ok(table)
    }

    /// The buffer that counts how often each expert is chosen.
    fn counts(&mut self, layer: usize, moe: &Moe, label: String) -> Result<BufferId> {
        let experts = moe.experts.len();
        let counts = self.b.words(label, experts)?;
        self.b.routed.push(Routed { layer, experts, counts });
        Ok(counts)
    }

    fn count(&mut self, mixture: &Mixture, counts: BufferId, label: &str) {
        let params = op::moe_count::Params {
            stride: mixture.layout.logits as u32,
        };
        let routers = [mixture.scratch.router, mixture.scratch.chunk_router];
        for phase in Phase::BOTH {
            let bindings = op::moe_count::Bindings {
                batch: Bind::Buffer(self.scratch[phase as usize].batch),
                experts: Bind::Buffer(mixture.any_table()),
                router: Bind::Buffer(routers[phase as usize]),
                counts: Bind::Buffer(counts),
            };
            self.emit(phase, label, params, bindings);
        }
    }

    /// The logits of the experts and of the shared expert's weight. A mask adds biases to the logits of experts that
    /// it leaves out, so that they are not chosen.
    fn router(
        &mut self,
        mixture: &Mixture,
        name: &dyn Fn(&str) -> String,
        routable: Option<MaskedUnits>,
        streams: &Streams,
    ) -> Result<()> {
        let Mixture {
            moe, layout, scratch, ..
        } = mixture;
        let label = name("router");
        let bias = match routable {
            Some(units) => {
                let content = Content::Logits(units.limit);
                Some(Bind::Buffer(self.mask_buffer(
                    format!("{label}.bias"),
                    &units,
                    content,
                )?))
            }
            None => None,
        };
        let mut tensors = vec![moe.router.weight];
        let mut alone = None;
        match (&moe.shared_gate, layout.gate) {
            (Some(gate), _) if is_in_router(&self.b, moe, gate)? => tensors.push(gate.weight),
            (Some(gate), Some(at)) => alone = Some((gate.weight, at as u32)),
            _ => {}
        }
        let mut products = vec![(label, tensors, 0, bias)];
        products.extend(alone.map(|(gate, at)| (name("shared.weight"), vec![gate], at, None)));
        let norm = self.decode_norm(streams);
        let x = self.scratch.map(|scratch| scratch.x);
        let y = ([scratch.router, scratch.chunk_router], (layout.logits / 4) as u32);
        for (label, tensors, row0, bias) in products {
            let matrix = self.b.matrix(&label, &tensors, Stacking::Rows)?;
            self.product(&label, Product { matrix, bias, row0 }, x, norm, y, None)?;
        }
        Ok(())
    }

    fn decode_experts(
        &mut self,
        mixture: &Mixture,
        name: &dyn Fn(&str) -> String,
        norm: DecodeNorm,
        next_norm: VectorId,
        sums: &Streams,
    ) {
        for (i, bank) in mixture.banks.iter().enumerate() {
            match bank.gate_up {
                Projections::Fused(matrix) => self.decode_bank(mixture, (i, bank), matrix, name, norm),
                Projections::Unfused(both) => self.decode_unfused(mixture, both, Some((i, bank)), name, norm),
            }
        }
        match mixture.shared {
            Some(Projections::Unfused(both)) => self.decode_unfused(mixture, both, None, name, norm),
            Some(Projections::Fused(matrix)) if !mixture.shared_in_bank => {
                self.decode_shared(mixture, matrix, name, norm);
            }
            _ => {}
        }
        for (i, bank) in mixture.banks.iter().enumerate() {
            self.decode_down(mixture, (i, bank), name, next_norm, sums);
        }
    }

    /// Common parameters of the decoding steps of gate and up.
    fn moe_glu(&self, mixture: &Mixture, norm: DecodeNorm) -> op::moe_glu::Params {
        let layout = &mixture.layout;
        op::moe_glu::Params {
            y_at: layout.act_at() as u32,
            y_stride: layout.expert as u32,
            shared_stride: layout.shared as u32,
            stride: layout.logits as u32,
            square_vectors: norm.square_vectors,
            inv_cols: norm.inv_cols,
            eps: norm.eps,
            gelu: mixture.gelu,
            ..op::moe_glu::Params::default()
        }
    }

    fn moe_glu_bindings(&self, mixture: &Mixture, w: Bind, table: BufferId) -> op::moe_glu::Bindings {
        let decode = self.scratch[DECODE];
        op::moe_glu::Bindings {
            w,
            x: Bind::Buffer(decode.x),
            squares: Bind::Buffer(decode.squares),
            experts: Bind::Buffer(table),
            router: Bind::Buffer(mixture.scratch.router),
            y: Bind::Buffer(mixture.scratch.act),
        }
    }

    /// Gate and up of a bank's experts, and of the shared one if the bank holds it.
    fn decode_bank(
        &mut self,
        mixture: &Mixture,
        (i, bank): (usize, &PlacedBank),
        matrix: MatrixId,
        name: &dyn Fn(&str) -> String,
        norm: DecodeNorm,
    ) {
        let shared_outputs = if bank.has_shared { mixture.shared_outputs() } else { 0 };
        for segment in self.segments(matrix) {
            let params = op::moe_glu::Params {
                rows: segment.rows,
                groups: segment.groups,
                outputs: (segment.rows - 2 * shared_outputs) / (2 * bank.placed),
                placed: bank.placed,
                shared_outputs,
                first_shared: mixture.layout.top_k as u32,
                row0: segment.row0,
                routes_at: mixture.layout.routes_at(i) as u32,
                ..self.moe_glu(mixture, norm)
            };
            let bindings = self.moe_glu_bindings(mixture, segment.weight, bank.table);
            self.emit(Phase::Decode, &name("experts.gate_up"), params, bindings);
        }
    }

    /// Gate and up of a shared expert with a matrix of its own.
    fn decode_shared(&mut self, mixture: &Mixture, matrix: MatrixId, name: &dyn Fn(&str) -> String, norm: DecodeNorm) {
        for segment in self.segments(matrix) {
            let params = op::moe_glu::Params {
                rows: segment.rows,
                groups: segment.groups,
                outputs: segment.rows / 2,
                shared_outputs: segment.rows / 2,
                row0: segment.row0,
                ..self.moe_glu(mixture, norm)
            };
            let bindings = self.moe_glu_bindings(mixture, segment.weight, mixture.any_table());
            self.emit(Phase::Decode, &name("shared.gate_up"), params, bindings);
        }
    }

    fn decode_down(
        &mut self,
        mixture: &Mixture,
        (i, bank): (usize, &PlacedBank),
        name: &dyn Fn(&str) -> String,
        next_norm: VectorId,
        sums: &Streams,
    ) {
        let decode = self.scratch[DECODE];
        for segment in self.segments(bank.down) {
            let params = op::moe_down::Params {
                rows: segment.rows,
                groups: segment.groups,
                inv_groups: 1.0 / segment.groups as f32,
                outputs: segment.rows / bank.placed,
                row0: segment.row0,
                top_k: mixture.layout.top_k as u32,
                x_at: (mixture.layout.act_at() / 32) as u32,
                routes_at: mixture.layout.routes_at(i) as u32,
                y_stride: vectors_of(self.model.hidden),
            };
            let bindings = op::moe_down::Bindings {
                w: segment.weight,
                router: Bind::Buffer(mixture.scratch.router),
                x: Bind::Buffer(mixture.scratch.act),
                g: Bind::Vector(next_norm),
                h: Bind::Buffer(sums[DECODE].h),
                x_scaled: Bind::Buffer(decode.x),
                squares: Bind::Buffer(decode.squares),
            };
            self.emit(Phase::Decode, &name("experts.down"), params, bindings);
        }
    }

    fn prefill_experts(&mut self, mixture: &Mixture, name: &dyn Fn(&str) -> String) {
        let Mixture { layout, scratch, .. } = mixture;
        let (batch, experts) = (
            Bind::Buffer(self.scratch[PREFILL].batch),
            Bind::Buffer(mixture.any_table()),
        );
        let routes = Bind::Buffer(scratch.routes);
        let params = op::moe_route::Params {
            stride: layout.logits as u32,
            shared_expert: u32::from(mixture.moe.shared.is_some()),
        };
        let bindings = op::moe_route::Bindings {
            batch,
            experts,
            router: Bind::Buffer(scratch.chunk_router),
            routes,
        };
        self.emit(Phase::Prefill, &name("route"), params, bindings);
        let params = op::moe_lists::Params {
            tiles: layout.tiles as u32,
        };
        let bindings = op::moe_lists::Bindings {
            batch,
            experts,
            routes,
            lists: Bind::Buffer(scratch.lists),
        };
        self.emit(Phase::Prefill, &name("lists"), params, bindings);
        for bank in &mixture.banks {
            match bank.gate_up {
                Projections::Fused(matrix) => self.prefill_bank(mixture, bank, matrix, name),
                Projections::Unfused(both) => self.prefill_unfused(mixture, both, bank, name),
            }
        }
        match mixture.shared {
            Some(Projections::Unfused(both)) => self.prefill_shared_unfused(mixture, both, name),
            Some(Projections::Fused(matrix)) => self.prefill_shared(mixture, matrix, name),
            None => {}
        }
        for bank in &mixture.banks {
            let (x, y) = (scratch.chunk_act, scratch.expert_y);
            let label = name("experts.down");
            self.prefill_experts_product(
                mixture,
                bank,
                bank.down,
                (x, 1),
                (y, vectors_of(self.model.hidden)),
                &label,
            );
        }
    }

    /// Gate and up of a bank's experts.
    fn prefill_bank(&mut self, mixture: &Mixture, bank: &PlacedBank, matrix: MatrixId, name: &dyn Fn(&str) -> String) {
        let prefill = self.scratch[PREFILL];
        let shared_outputs = if bank.has_shared { mixture.shared_outputs() } else { 0 };
        for segment in self.segments(matrix) {
            let params = op::moe_matmul_glu::Params {
                rows: segment.rows,
                groups: segment.groups,
                outputs: (segment.rows - 2 * shared_outputs) / (2 * bank.placed),
                placed: bank.placed,
                shared_outputs,
                row0: segment.row0,
                y_stride: (mixture.layout.expert / 4) as u32,
                x_entries: mixture.layout.top_k as u32,
                tiles: mixture.layout.tiles as u32,
                gelu: mixture.gelu,
            };
            let bindings = op::moe_matmul_glu::Bindings {
                w: segment.weight,
                batch: Bind::Buffer(prefill.batch),
                experts: Bind::Buffer(bank.table),
                lists: Bind::Buffer(mixture.scratch.lists),
                x: Bind::Buffer(prefill.x),
                y: Bind::Buffer(mixture.scratch.chunk_act),
            };
            self.emit(Phase::Prefill, &name("experts.gate_up"), params, bindings);
        }
    }

    /// Gate and up of the shared expert.
    fn prefill_shared(&mut self, mixture: &Mixture, matrix: MatrixId, name: &dyn Fn(&str) -> String) {
        let prefill = self.scratch[PREFILL];
        for segment in self.segments(matrix) {
            let params = op::matmul_glu::Params {
                rows: segment.rows,
                groups: segment.groups,
                row0: segment.row0,
                // In a bank, the rows of the experts follow.
                outputs: match mixture.shared_in_bank {
                    true => mixture.shared_outputs(),
                    false => segment.rows / 2,
                },
                y_stride: vectors_of(mixture.shared_outputs() as usize),
                has_bias: 0,
                bias_up: 0,
                gelu: mixture.gelu,
            };
            let bindings = op::matmul_glu::Bindings {
                w: segment.weight,
                batch: Bind::Buffer(prefill.batch),
                x: Bind::Buffer(prefill.x),
                list: self.list(None),
                bias: self.bias(None),
                y: Bind::Buffer(prefill.act),
            };
            self.emit(Phase::Prefill, &name("shared.gate_up"), params, bindings);
        }
    }

    /// One projection of a bank's experts: `x` with the entries that share a row, `y` with the vectors of 4 of an
    /// entry.
    pub fn prefill_experts_product(
        &mut self,
        mixture: &Mixture,
        bank: &PlacedBank,
        matrix: MatrixId,
        (x, x_entries): (BufferId, u32),
        (y, y_stride): (BufferId, u32),
        label: &str,
    ) {
        for segment in self.segments(matrix) {
            let params = op::moe_matmul::Params {
                rows: segment.rows,
                groups: segment.groups,
                outputs: segment.rows / bank.placed,
                row0: segment.row0,
                y_stride,
                x_entries,
                top_k: mixture.layout.top_k as u32,
                tiles: mixture.layout.tiles as u32,
            };
            let bindings = op::moe_matmul::Bindings {
                w: segment.weight,
                batch: Bind::Buffer(self.scratch[PREFILL].batch),
                experts: Bind::Buffer(bank.table),
                lists: Bind::Buffer(mixture.scratch.lists),
                x: Bind::Buffer(x),
                y: Bind::Buffer(y),
            };
            self.emit(Phase::Prefill, label, params, bindings);
        }
    }

    fn combine(&mut self, mixture: &Mixture, label: &str, sums: &Streams) {
        let params = op::moe_combine::Params {
            vectors: vectors_of(self.model.hidden),
            top_k: mixture.layout.top_k as u32,
        };
        let bindings = op::moe_combine::Bindings {
            batch: Bind::Buffer(self.scratch[PREFILL].batch),
            routes: Bind::Buffer(mixture.scratch.routes),
            expert_y: Bind::Buffer(mixture.scratch.expert_y),
            shared_y: Bind::Buffer(mixture.scratch.shared_y),
            h: Bind::Buffer(sums[PREFILL].h),
        };
        self.emit(Phase::Prefill, label, params, bindings);
    }
}
