//! The steps that compute experts.
//!
//! If gate and up projections have different layouts, each is a product of its own. The first product stores gates,
//! and the second replaces them by gated products. So a step that runs again for other experts leaves the outputs of
//! absent experts unchanged.

use super::banks::Projections;
use super::context::{DECODE, Lowering, PREFILL, Phase, vectors_of};
use super::moe::{Mixture, PlacedBank};
use crate::op::{self, Bind, BufferId, MatrixId};

impl Lowering<'_> {
    pub fn decode_experts(&mut self, mixture: &Mixture) {
        for bank in &mixture.banks {
            self.decode_gate_up(mixture, Some(bank), bank.gate_up);
        }
        if let Some(shared) = mixture.shared.filter(|_| !mixture.shared_in_bank) {
            self.decode_gate_up(mixture, None, shared);
        }
        for bank in &mixture.banks {
            self.decode_down(mixture, bank);
        }
    }

    /// Activations for decoded tokens: of the experts of a bank, and of the shared expert if the bank holds it; without
    /// a bank, of the shared expert.
    fn decode_gate_up(&mut self, mixture: &Mixture, bank: Option<&PlacedBank>, gate_up: Projections) {
        let of = if bank.is_some() { "experts" } else { "shared" };
        let label = |role: &str| mixture.name(&format!("{of}.{role}"));
        match gate_up {
            Projections::Fused(matrix) => self.decode_glu(mixture, bank, matrix, &label("gate_up")),
            Projections::Unfused([gate, up]) => {
                self.decode_projection(mixture, bank, (gate, 0), &label("gate"));
                self.decode_projection(mixture, bank, (up, 1), &label("up"));
            }
        }
    }

    /// Gate and up projections in one matrix.
    fn decode_glu(&mut self, mixture: &Mixture, bank: Option<&PlacedBank>, matrix: MatrixId, label: &str) {
        let norm = self.decode_norm(&mixture.half.streams);
        let (layout, decode) = (&mixture.layout, self.scratch[DECODE]);
        for segment in self.segments(matrix) {
            let of_part = match bank {
                Some(bank) => op::moe_glu::Params {
                    outputs: (segment.rows - 2 * bank.shared_outputs) / (2 * bank.placed),
                    placed: bank.placed,
                    shared_outputs: bank.shared_outputs,
                    first_shared: layout.top_k as u32,
                    routes_at: bank.routes_at,
                    ..op::moe_glu::Params::default()
                },
                None => op::moe_glu::Params {
                    outputs: segment.rows / 2,
                    shared_outputs: segment.rows / 2,
                    ..op::moe_glu::Params::default()
                },
            };
            let params = op::moe_glu::Params {
                rows: segment.rows,
                groups: segment.groups,
                row0: segment.row0,
                y_at: layout.act_at() as u32,
                y_stride: layout.expert as u32,
                shared_stride: layout.shared as u32,
                stride: layout.logits as u32,
                square_vectors: norm.square_vectors,
                inv_cols: norm.inv_cols,
                eps: norm.eps,
                gelu: self.gelu(),
                ..of_part
            };
            let bindings = op::moe_glu::Bindings {
                w: segment.weight,
                x: Bind::Buffer(decode.x),
                squares: Bind::Buffer(decode.squares),
                experts: Bind::Buffer(bank.map_or(mixture.any_table(), |bank| bank.table)),
                router: Bind::Buffer(mixture.scratch.router),
                y: Bind::Buffer(mixture.scratch.act),
            };
            self.emit(Phase::Decode, label, params, bindings);
        }
    }

    /// One projection: with `gated` 0 that of gates, with 1 that of ups.
    fn decode_projection(
        &mut self,
        mixture: &Mixture,
        bank: Option<&PlacedBank>,
        (matrix, gated): (MatrixId, u32),
        label: &str,
    ) {
        let norm = self.decode_norm(&mixture.half.streams);
        let (layout, decode) = (&mixture.layout, self.scratch[DECODE]);
        let (placed, top_k, y_at, width) = match bank {
            Some(bank) => (bank.placed, layout.top_k, layout.act_at(), layout.expert),
            None => (1, 0, 0, layout.shared),
        };
        for segment in self.segments(matrix) {
            let params = op::moe_matvec::Params {
                rows: segment.rows,
                groups: segment.groups,
                outputs: segment.rows / placed,
                top_k: top_k as u32,
                row0: segment.row0,
                y_at: (y_at / 4) as u32,
                y_stride: (width / 4) as u32,
                stride: layout.logits as u32,
                routes_at: bank.map_or(layout.routes_at(0) as u32, |bank| bank.routes_at),
                square_vectors: norm.square_vectors,
                inv_cols: norm.inv_cols,
                eps: norm.eps,
                gated,
                gelu: self.gelu(),
            };
            let bindings = op::moe_matvec::Bindings {
                w: segment.weight,
                x: Bind::Buffer(decode.x),
                squares: Bind::Buffer(decode.squares),
                experts: Bind::Buffer(bank.map_or(mixture.any_table(), |bank| bank.table)),
                router: Bind::Buffer(mixture.scratch.router),
                y: Bind::Buffer(mixture.scratch.act),
            };
            self.emit(Phase::Decode, label, params, bindings);
        }
    }

    fn decode_down(&mut self, mixture: &Mixture, bank: &PlacedBank) {
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
                routes_at: bank.routes_at,
                y_stride: vectors_of(self.model.hidden),
            };
            let bindings = op::moe_down::Bindings {
                w: segment.weight,
                router: Bind::Buffer(mixture.scratch.router),
                x: Bind::Buffer(mixture.scratch.act),
                g: Bind::Vector(mixture.half.next_norm),
                h: Bind::Buffer(mixture.sums.h[DECODE]),
                x_scaled: Bind::Buffer(decode.x),
                squares: Bind::Buffer(decode.squares),
            };
            self.emit(Phase::Decode, &mixture.name("experts.down"), params, bindings);
        }
    }

    pub fn prefill_experts(&mut self, mixture: &Mixture) {
        let Mixture { layout, scratch, .. } = mixture;
        let prefill = self.scratch[PREFILL];
        let [batch, experts, routes] = [prefill.batch, mixture.any_table(), scratch.routes].map(Bind::Buffer);
        let params = op::moe_route::Params {
            stride: layout.logits as u32,
            shared_expert: u32::from(mixture.shared.is_some()),
        };
        let bindings = op::moe_route::Bindings {
            batch,
            experts,
            router: Bind::Buffer(scratch.chunk_router),
            routes,
        };
        self.emit(Phase::Prefill, &mixture.name("route"), params, bindings);
        let params = op::moe_lists::Params {
            tiles: layout.tiles as u32,
        };
        let bindings = op::moe_lists::Bindings {
            batch,
            experts,
            routes,
            lists: Bind::Buffer(scratch.lists),
        };
        self.emit(Phase::Prefill, &mixture.name("lists"), params, bindings);
        for bank in &mixture.banks {
            match bank.gate_up {
                Projections::Fused(matrix) => self.prefill_glu(mixture, bank, matrix),
                Projections::Unfused([gate, up]) => {
                    let (x, y) = ((prefill.x, layout.top_k), (scratch.chunk_act, layout.expert / 4));
                    self.prefill_projection(mixture, bank, gate, x, y, "experts.gate");
                    self.prefill_up(mixture, bank, up);
                }
            }
        }
        if let Some(shared) = mixture.shared {
            self.prefill_shared(mixture, shared);
        }
        for bank in &mixture.banks {
            let hidden = self.model.hidden.next_multiple_of(32);
            let (x, y) = ((scratch.chunk_act, 1), (scratch.expert_y, hidden / 4));
            self.prefill_projection(mixture, bank, bank.down, x, y, "experts.down");
        }
    }

    /// Gate and up of a bank's experts.
    fn prefill_glu(&mut self, mixture: &Mixture, bank: &PlacedBank, matrix: MatrixId) {
        let prefill = self.scratch[PREFILL];
        for segment in self.segments(matrix) {
            let params = op::moe_matmul_glu::Params {
                rows: segment.rows,
                groups: segment.groups,
                outputs: (segment.rows - 2 * bank.shared_outputs) / (2 * bank.placed),
                placed: bank.placed,
                shared_outputs: bank.shared_outputs,
                row0: segment.row0,
                y_stride: (mixture.layout.expert / 4) as u32,
                x_entries: mixture.layout.top_k as u32,
                tiles: mixture.layout.tiles as u32,
                gelu: self.gelu(),
            };
            let bindings = op::moe_matmul_glu::Bindings {
                w: segment.weight,
                batch: Bind::Buffer(prefill.batch),
                experts: Bind::Buffer(bank.table),
                lists: Bind::Buffer(mixture.scratch.lists),
                x: Bind::Buffer(prefill.x),
                y: Bind::Buffer(mixture.scratch.chunk_act),
            };
            self.emit(Phase::Prefill, &mixture.name("experts.gate_up"), params, bindings);
        }
    }

    /// The up projection of a bank's experts, which replaces their gates by activations.
    fn prefill_up(&mut self, mixture: &Mixture, bank: &PlacedBank, matrix: MatrixId) {
        let prefill = self.scratch[PREFILL];
        for segment in self.segments(matrix) {
            let params = op::moe_matmul_up::Params {
                rows: segment.rows,
                groups: segment.groups,
                outputs: segment.rows / bank.placed,
                row0: segment.row0,
                y_stride: (mixture.layout.expert / 4) as u32,
                x_entries: mixture.layout.top_k as u32,
                tiles: mixture.layout.tiles as u32,
                gelu: self.gelu(),
            };
            let bindings = op::moe_matmul_up::Bindings {
                w: segment.weight,
                batch: Bind::Buffer(prefill.batch),
                experts: Bind::Buffer(bank.table),
                lists: Bind::Buffer(mixture.scratch.lists),
                x: Bind::Buffer(prefill.x),
                y: Bind::Buffer(mixture.scratch.chunk_act),
            };
            self.emit(Phase::Prefill, &mixture.name("experts.up"), params, bindings);
        }
    }

    /// One projection of a bank's experts: `x` with the entries that share a row, `y` with the vectors of 4 of an
    /// entry.
    fn prefill_projection(
        &mut self,
        mixture: &Mixture,
        bank: &PlacedBank,
        matrix: MatrixId,
        (x, x_entries): (BufferId, usize),
        (y, y_stride): (BufferId, usize),
        role: &str,
    ) {
        for segment in self.segments(matrix) {
            let params = op::moe_matmul::Params {
                rows: segment.rows,
                groups: segment.groups,
                outputs: segment.rows / bank.placed,
                row0: segment.row0,
                y_stride: y_stride as u32,
                x_entries: x_entries as u32,
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
            self.emit(Phase::Prefill, &mixture.name(role), params, bindings);
        }
    }

    /// Activations of the shared expert for a chunk. Its weight is applied when all outputs are combined.
    fn prefill_shared(&mut self, mixture: &Mixture, gate_up: Projections) {
        let prefill = self.scratch[PREFILL];
        let width = mixture.shared_outputs as usize;
        match gate_up {
            Projections::Fused(matrix) => {
                for segment in self.segments(matrix) {
                    // In a bank, the rows of the experts follow.
                    let outputs = match mixture.shared_in_bank {
                        true => mixture.shared_outputs,
                        false => segment.rows / 2,
                    };
                    let label = mixture.name("shared.gate_up");
                    self.matmul_glu(&label, prefill.x, segment, (outputs, width), (None, 0));
                }
            }
            Projections::Unfused([gate, up]) => {
                for (role, matrix, y) in [("gate", gate, prefill.act), ("up", up, prefill.up)] {
                    let label = mixture.name(&format!("shared.{role}"));
                    self.matmul(&label, &self.plain(matrix), prefill.x, (y, vectors_of(width)));
                }
                self.glu(&[Phase::Prefill], &mixture.name("shared.glu"), vectors_of(width));
            }
        }
    }

    /// Adds the outputs of the experts and of the shared expert of each token of a chunk.
    pub fn combine(&mut self, mixture: &Mixture) {
        let params = op::moe_combine::Params {
            vectors: vectors_of(self.model.hidden),
            top_k: mixture.layout.top_k as u32,
        };
        let bindings = op::moe_combine::Bindings {
            batch: Bind::Buffer(self.scratch[PREFILL].batch),
            routes: Bind::Buffer(mixture.scratch.routes),
            expert_y: Bind::Buffer(mixture.scratch.expert_y),
            shared_y: Bind::Buffer(mixture.scratch.shared_y),
            h: Bind::Buffer(mixture.sums.h[PREFILL]),
        };
        self.emit(Phase::Prefill, &mixture.name("combine"), params, bindings);
    }
}
