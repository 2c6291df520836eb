//! Mixtures of experts as steps.
//!
//! Decode: router; gate and up of the chosen experts and of the shared expert; down of the chosen experts, with the
//! residual; down of the shared expert. Each token of a speculative step reads its own experts. Prefill: tokens are
//! grouped by expert, so that the weights of an expert are read once for 8 of its tokens.

use super::banks::{self, Banks, Projections};
use super::builder::Builder;
use super::context::{Half, Lowering, MoeScratch, PREFILL, Phase, Streams, vectors_of};
use super::masking::MaskedUnits;
use crate::error::{Result, bail};
use crate::graph::{Fill, Paged, Routed, Stacking, may_follow};
use crate::lm::masks::{Content, MaskAxis};
use crate::model::{FeedForward, Linear, Model, Moe};
use crate::op::{self, ABSENT, Bind, BufferId, EXPERT_TILE, MAX_EXPERTS, MAX_TOP_K, MatrixId, TABLE_HEADER};

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
    for layer in b.layers(model) {
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
    /// Experts that it holds at a time.
    pub placed: u32,
    /// The word of `router` at which the places and weights of its experts begin.
    pub routes_at: u32,
    pub gate_up: Projections,
    /// Outputs of the shared expert, whose rows come first; 0 if the bank does not hold it.
    pub shared_outputs: u32,
    pub down: MatrixId,
    pub table: BufferId,
}

/// A mixture of experts while it is lowered.
pub(super) struct Mixture {
    pub half: Half,
    pub layout: Layout,
    pub scratch: MoeScratch,
    /// The streams to which experts are added.
    pub sums: Streams,
    pub banks: Vec<PlacedBank>,
    /// Outputs of the shared expert; 0 if there is none.
    pub shared_outputs: u32,
    /// Gate and up projections of the shared expert, in matrices of a bank or of its own.
    pub shared: Option<Projections>,
    /// Whether these are matrices of a bank.
    pub shared_in_bank: bool,
    /// The buffer that counts the router's choices, if they are counted.
    counts: Option<BufferId>,
}

impl Mixture {
    pub fn name(&self, role: &str) -> String {
        format!("{}.ffn.{role}", self.half.path)
    }

    /// The first bank's table. All tables describe the same experts, and every mixture has a bank.
    pub fn any_table(&self) -> BufferId {
        self.banks.first().map_or(0, |bank| bank.table)
    }
}

impl Lowering<'_> {
    /// h += mixture(norm(h)).
    pub fn mixture(&mut self, half: &Half, moe: &Moe) -> Result<Streams> {
        let streams = half.streams;
        let routable = self.masked_units(half.path, MaskAxis::Experts, moe.experts.len(), 1);
        let mut mixture = self.place_banks(half, moe, routable)?;
        self.prefill_norm(&streams, half.norm, &mixture.name("norm"));
        self.router(&mixture, moe, routable)?;
        self.count(&mixture);
        // Experts are added one by one. A norm after them applies to their sum, so they add to zeros in the other
        // buffer.
        if half.post_norm.is_some() {
            let zeros = self.b.vector("zeros", &[(None, self.model.hidden)], 0.0);
            mixture.sums = self.norm_swapped(&streams, zeros, &mixture.name("zero"));
        }
        self.decode_experts(&mixture);
        self.prefill_experts(&mixture);
        if let Some(shared) = &moe.shared {
            let label = mixture.name("shared.down");
            let from = self.linear(&label, &shared.down, None)?;
            self.matvec_add(&label, &from, mixture.scratch.act, half.next_norm, &mixture.sums);
            let y = (mixture.scratch.shared_y, vectors_of(self.model.hidden));
            self.matmul(&label, &from, self.scratch[PREFILL].act, y);
        }
        self.combine(&mixture);
        let normed = false;
        Ok(match half.post_norm {
            Some(post_norm) => self.add_norm(&mixture.name("norm_after"), post_norm, half),
            None => Streams { normed, ..streams },
        })
    }

    /// Adds the banks of a layer to the graph.
    fn place_banks(&mut self, half: &Half, moe: &Moe, routable: Option<MaskedUnits>) -> Result<Mixture> {
        let name = |role: &str| half.name(&format!("ffn.{role}"));
        let Some(scratch) = self.moe else {
            bail!(Internal, "a mixture of experts without buffers");
        };
        let layout = Layout::of(&self.b, moe)?;
        let Banks { banks, shared } = banks::banks(&mut self.b, moe, &name)?;
        let mut counts = None;
        if self.b.options.experts.counted || banks.iter().any(|bank| !bank.members.is_empty()) {
            let experts = moe.experts.len();
            let buffer = self.b.words(name("counts"), experts)?;
            self.b.routed.push(Routed {
                layer: half.path.layer,
                experts,
                counts: buffer,
            });
            counts = Some(buffer);
        }
        let shared_outputs = moe.shared.as_ref().map_or(0, |ffn| ffn.down.cols as u32);
        let mut placed = Vec::new();
        let mut shared_matrix = None;
        for (i, bank) in banks.into_iter().enumerate() {
            let table = self.table(moe, &layout, bank.places, routable, name(&format!("experts.{i}.table")))?;
            if bank.has_shared {
                shared_matrix = Some(bank.gate_up);
            }
            if !bank.members.is_empty() {
                let (gate_up, down) = match bank.gate_up {
                    Projections::Fused(matrix) => ([matrix; 2], bank.down),
                    Projections::Unfused(both) => (both, bank.down),
                };
                let mut known = self.b.paged.iter_mut();
                // A layer that is applied again uses the bank of its first application.
                match known.find(|known| (known.gate_up, known.down) == (gate_up, down)) {
                    Some(known) => known.tables.push(table),
                    None => self.b.paged.push(Paged {
                        tables: vec![table],
                        gate_up,
                        down,
                        slots: bank.placed,
                        members: bank.members,
                    }),
                }
            }
            placed.push(PlacedBank {
                placed: bank.placed as u32,
                routes_at: layout.routes_at(i) as u32,
                gate_up: bank.gate_up,
                shared_outputs: if bank.has_shared { shared_outputs } else { 0 },
                down: bank.down,
                table,
            });
        }
        Ok(Mixture {
            half: *half,
            layout,
            scratch,
            sums: half.streams,
            banks: placed,
            shared_outputs,
            shared_in_bank: shared_matrix.is_some(),
            shared: shared_matrix.or(shared),
            counts,
        })
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
        let whole = routable.map(|_| fill.words(self.b.tensors)).transpose()?;
        let table = self.b.buffer(label, bytes, fill)?;
        if let (Some(units), Some(whole)) = (routable, whole) {
            self.fill_by_mask(&units, table, Content::Table(whole));
        }
        Ok(table)
    }

    fn count(&mut self, mixture: &Mixture) {
        let Some(counts) = mixture.counts else { return };
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
            self.emit(phase, &mixture.name("count"), params, bindings);
        }
    }

    /// The logits of the experts and of the shared expert's weight. A mask adds biases to the logits of experts that
    /// it leaves out, so that they are not chosen.
    fn router(&mut self, mixture: &Mixture, moe: &Moe, routable: Option<MaskedUnits>) -> Result<()> {
        let Mixture { layout, scratch, .. } = mixture;
        let label = mixture.name("router");
        let content = Content::Logits(moe.experts.len());
        let bias = routable.map(|units| self.mask_buffer(format!("{label}.bias"), &units, content));
        let bias = bias.transpose()?.map(Bind::Buffer);
        let mut products = vec![(label, vec![moe.router.weight], 0, bias)];
        if let (Some(gate), Some(at)) = (&moe.shared_gate, layout.gate) {
            match is_in_router(&self.b, moe, gate)? {
                true => products[0].1.push(gate.weight),
                false => products.push((mixture.name("shared.weight"), vec![gate.weight], at as u32, None)),
            }
        }
        let norm = self.decode_norm(&mixture.half.streams);
        let x = self.scratch.map(|scratch| scratch.x);
        let y = ([scratch.router, scratch.chunk_router], (layout.logits / 4) as u32);
        for (label, tensors, row0, bias) in products {
            let matrix = self.b.matrix(&label, &tensors, Stacking::Rows)?;
            let from = self.operand(&label, (matrix, row0), bias, None)?;
            self.product(&label, &from, x, norm, y);
        }
        Ok(())
    }
}
