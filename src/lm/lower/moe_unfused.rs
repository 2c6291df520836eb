//! Experts whose gate and up projections have different layouts: one product each. The first product stores gates,
//! and the second replaces them by gated products. So a step that runs again for other experts leaves the outputs of
//! absent experts unchanged.

use super::context::{DECODE, DecodeNorm, Lowering, PREFILL, Phase, Product};
use super::moe::{Mixture, PlacedBank};
use crate::op::{self, Bind, MatrixId};

impl Lowering<'_> {
    /// Activations for decoded tokens: of the experts of a bank, given with its index, or of the shared expert.
    pub fn decode_unfused(
        &mut self,
        mixture: &Mixture,
        both: [MatrixId; 2],
        bank: Option<(usize, &PlacedBank)>,
        name: &dyn Fn(&str) -> String,
        norm: DecodeNorm,
    ) {
        let Mixture { layout, scratch, .. } = mixture;
        let decode = self.scratch[DECODE];
        let table = bank.map_or(mixture.any_table(), |(_, bank)| bank.table);
        let (of, placed, top_k, y_at, width) = match bank {
            Some((_, bank)) => ("experts", bank.placed, layout.top_k, layout.act_at(), layout.expert),
            None => ("shared", 1, 0, 0, layout.shared),
        };
        for (gated, (role, matrix)) in ["gate", "up"].into_iter().zip(both).enumerate() {
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
                    routes_at: layout.routes_at(bank.map_or(0, |(i, _)| i)) as u32,
                    square_vectors: norm.square_vectors,
                    inv_cols: norm.inv_cols,
                    eps: norm.eps,
                    gated: gated as u32,
                    gelu: mixture.gelu,
                };
                let bindings = op::moe_matvec::Bindings {
                    w: segment.weight,
                    x: Bind::Buffer(decode.x),
                    squares: Bind::Buffer(decode.squares),
                    experts: Bind::Buffer(table),
                    router: Bind::Buffer(scratch.router),
                    y: Bind::Buffer(scratch.act),
                };
                self.emit(Phase::Decode, &name(&format!("{of}.{role}")), params, bindings);
            }
        }
    }

    /// Activations of a bank's experts for a chunk.
    pub fn prefill_unfused(
        &mut self,
        mixture: &Mixture,
        [gate, up]: [MatrixId; 2],
        bank: &PlacedBank,
        name: &dyn Fn(&str) -> String,
    ) {
        let prefill = self.scratch[PREFILL];
        let top_k = mixture.layout.top_k as u32;
        let y = (mixture.scratch.chunk_act, (mixture.layout.expert / 4) as u32);
        self.prefill_experts_product(mixture, bank, gate, (prefill.x, top_k), y, &name("experts.gate"));
        for segment in self.segments(up) {
            let params = op::moe_matmul_up::Params {
                rows: segment.rows,
                groups: segment.groups,
                outputs: segment.rows / bank.placed,
                row0: segment.row0,
                y_stride: y.1,
                x_entries: top_k,
                tiles: mixture.layout.tiles as u32,
                gelu: mixture.gelu,
            };
            let bindings = op::moe_matmul_up::Bindings {
                w: segment.weight,
                batch: Bind::Buffer(prefill.batch),
                experts: Bind::Buffer(bank.table),
                lists: Bind::Buffer(mixture.scratch.lists),
                x: Bind::Buffer(prefill.x),
                y: Bind::Buffer(y.0),
            };
            self.emit(Phase::Prefill, &name("experts.up"), params, bindings);
        }
    }

    /// Activations of the shared expert for a chunk. Its weight is applied when all outputs are combined.
    pub fn prefill_shared_unfused(
        &mut self,
        mixture: &Mixture,
        [gate, up]: [MatrixId; 2],
        name: &dyn Fn(&str) -> String,
    ) {
        let vectors = (mixture.layout.shared / 4) as u32;
        let prefill = self.scratch[PREFILL];
        for (role, matrix, y) in [("gate", gate, prefill.act), ("up", up, prefill.up)] {
            let lists = vec![None; self.b.matrices[matrix].segments.len()];
            let label = name(&format!("shared.{role}"));
            self.matmul(&label, Product::plain(matrix), prefill.x, (y, vectors), &lists);
        }
        self.glu(&[Phase::Prefill], &name("shared.glu"), vectors);
    }
}
