//! Experts whose gate and up projections have different device layouts: a product each. The gates wait where the products
//! with the up projections go, so that steps that run again for other experts leave alone what they do not compute.

use super::{Mixture, Placed};
use crate::kernel::{self, Op};
use crate::program::walk::{DecodeNorm, Mode, Source, Walk};
use crate::program::{Bind, Matrix, MatrixId};

const PARTS: [&str; 2] = ["gate", "up"];

impl Walk<'_> {
    /// Activations of the experts of a bank, given with its number, or of the shared expert, for columns that are decoded.
    pub(super) fn decode_apart(
        &mut self,
        mixture: &Mixture,
        both: [MatrixId; 2],
        bank: Option<(usize, &Placed)>,
        name: &dyn Fn(&str) -> String,
    ) {
        let Mixture { layout, scratch, .. } = mixture;
        let Some(table) = bank.map(|bank| bank.1).or(mixture.banks.first()).map(|bank| bank.table) else {
            return;
        };
        let DecodeNorm {
            square_vectors,
            inv_cols,
            eps,
        } = self.decode_norm();
        let (of, placed, slots, y_at, width) = match bank {
            Some((_, bank)) => ("experts", bank.placed, layout.top_k, layout.act_at(), layout.width),
            None => ("shared", 1, 0, 0, layout.shared),
        };
        for (gated, matrix) in both.into_iter().enumerate() {
            let label = name(&format!("{of}.{}", PARTS[gated]));
            let Matrix { planes, segments, .. } = self.b.matrices[matrix].clone();
            for (i, segment) in segments.iter().enumerate() {
                let rows = segment.geometry.rows as u32;
                let op = Op::MoeMatvec(kernel::MoeMatvec {
                    rows,
                    units: segment.geometry.units() as u32,
                    outputs: rows / placed,
                    slots: slots as u32,
                    row0: segment.row0,
                    y_at: (y_at / 4) as u32,
                    y_stride: (width / 4) as u32,
                    stride: layout.logits as u32,
                    routes_at: layout.routes_at(bank.map_or(0, |bank| bank.0)) as u32,
                    square_vectors,
                    inv_cols,
                    eps,
                    gated: gated as u32,
                    gelu: mixture.gelu,
                });
                let buffers = [self.decode.x, self.decode.squares, table, scratch.router, scratch.act];
                let bindings = [Bind::Weight(matrix, i)].into_iter().chain(buffers.map(Bind::Buffer));
                self.push(Mode::Decode, &label, op, Some(planes), bindings.collect());
            }
        }
    }

    /// Activations of the experts of a bank for a chunk.
    pub(super) fn prefill_apart(
        &mut self,
        mixture: &Mixture,
        [gate, up]: [MatrixId; 2],
        bank: &Placed,
        name: &dyn Fn(&str) -> String,
    ) {
        let Mixture { layout, scratch, .. } = mixture;
        let (top_k, tiles) = (layout.top_k as u32, layout.tiles as u32);
        let y_stride = (layout.width / 4) as u32;
        for (part, matrix) in PARTS.into_iter().zip([gate, up]) {
            let Matrix { planes, segments, .. } = self.b.matrices[matrix].clone();
            for (i, segment) in segments.iter().enumerate() {
                let (rows, units) = (segment.geometry.rows as u32, segment.geometry.units() as u32);
                let (outputs, row0) = (rows / bank.placed, segment.row0);
                let op = match matrix == gate {
                    true => Op::MoeMatmul(kernel::MoeMatmul {
                        rows,
                        units,
                        outputs,
                        row0,
                        y_stride,
                        x_entries: top_k,
                        top_k,
                        tiles,
                    }),
                    false => Op::MoeMatmulUp(kernel::MoeMatmulUp {
                        rows,
                        units,
                        outputs,
                        row0,
                        y_stride,
                        x_entries: top_k,
                        tiles,
                        gelu: mixture.gelu,
                    }),
                };
                let buffers = [
                    self.prefill.ctl,
                    bank.table,
                    scratch.lists,
                    self.prefill.x,
                    scratch.acts,
                ];
                let bindings = [Bind::Weight(matrix, i)].into_iter().chain(buffers.map(Bind::Buffer));
                let label = name(&format!("experts.{part}"));
                self.push(Mode::Prefill, &label, op, Some(planes), bindings.collect());
            }
        }
    }

    /// Activations of the shared expert for a chunk; its weight comes when all that experts add is combined.
    pub(super) fn prefill_shared_apart(
        &mut self,
        mixture: &Mixture,
        both: [MatrixId; 2],
        name: &dyn Fn(&str) -> String,
    ) {
        let vectors = (mixture.layout.shared / 4) as u32;
        let to = [self.prefill.act, self.prefill.up];
        for ((part, matrix), y) in PARTS.into_iter().zip(both).zip(to) {
            let from = Source {
                matrix,
                bias: None,
                row0: 0,
            };
            self.matmul(from, self.prefill.x, y, vectors, &name(&format!("shared.{part}")));
        }
        let gelu = mixture.gelu;
        let bindings = [self.prefill.ctl, self.prefill.up, self.prefill.act];
        let op = Op::Glu(kernel::Glu { vectors, gelu });
        self.push(
            Mode::Prefill,
            &name("shared.glu"),
            op,
            None,
            bindings.map(Bind::Buffer).to_vec(),
        );
    }
}
