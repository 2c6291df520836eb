//! Where in the network a walk is, and the alternatives that masks choose from there.

use super::masking::{Axis, Content, Part, Shared, Target, When, restricts};
use super::walk::{Mode, Walk};
use super::{Bind, BufferId, Fill, Grid, Step};
use crate::error::Result;
use crate::kernel::{self, Op};
use std::fmt;

/// A layer in one pass over the stack.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// The layer.
    pub layer: usize,
    /// The pass, counted from 0.
    pub pass: usize,
    /// The row of masks for it; a draft head's layers have none.
    pub visit: Option<usize>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        if self.pass != 0 {
            write!(f, "pass.{}.", self.pass)?;
        }
        write!(f, "layer.{:02}", self.layer)
    }
}

/// What a mask may restrict of the rows or columns of a map.
#[derive(Clone, Copy, Debug)]
pub(super) struct Masked {
    pub visit: usize,
    pub part: Part,
    /// Elements of a unit.
    pub per: usize,
    /// Elements that belong to units, the first ones.
    pub limit: usize,
    /// What the units share behind them.
    pub shared: Option<Shared>,
}

impl Masked {
    fn axis(&self, first: u32, len: u32) -> Axis {
        Axis {
            first: first as usize,
            len: len as usize,
            per: self.per,
            limit: self.limit,
            shared: self.shared,
        }
    }
}

/// Which side of a map is restricted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Rows,
    Cols,
}

impl Walk<'_> {
    /// Whether any of the model's masks restricts `units` units of a part here, each of `per` elements.
    pub(super) fn masked(&self, place: Place, part: Part, units: usize, per: usize) -> Option<Masked> {
        let visit = place.visit?;
        let mut masks = self.model.masks.masks.iter();
        masks
            .any(|mask| mask.layer(place.layer) && restricts(mask, visit, part, units))
            .then_some(Masked {
                visit,
                part,
                per,
                limit: units * per,
                shared: None,
            })
    }

    /// Whether any of the model's masks turns a layer off.
    pub(super) fn may_be_off(&self, place: Place) -> bool {
        place.visit.is_some() && self.model.masks.masks.iter().any(|mask| !mask.layer(place.layer))
    }

    fn target(&mut self, label: String, masked: &Masked, content: Content) -> Result<BufferId> {
        let buffer = self.b.buffer(label, content.len() as u64 * 4, Fill::Zero)?;
        self.fill_by_mask(masked.visit, masked.part, buffer, content);
        Ok(buffer)
    }

    /// A buffer that masks fill.
    pub(super) fn fill_by_mask(&mut self, visit: usize, part: Part, buffer: BufferId, content: Content) {
        self.masking.targets.push(Target {
            visit,
            part,
            buffer,
            content,
        });
    }

    /// Makes the decoding steps from `from` on those without a mask, and plans others that leave out what a mask restricts.
    /// Maps with a bias behind the residual keep their kernel: what is left out of their input is zero.
    pub(super) fn narrow(&mut self, from: usize, masked: Option<Masked>, side: Side) -> Result<()> {
        let Some(masked) = masked else { return Ok(()) };
        let steps: Vec<Step> = self.steps(Mode::Decode)[from..].to_vec();
        self.only(Mode::Decode, from, When::Whole(masked.visit, masked.part));
        let alternative = self.at(Mode::Decode);
        for (i, mut step) in steps.into_iter().enumerate() {
            let listed = |rows: u32, row0: u32, units: u32| match side {
                Side::Rows => Content::Listed {
                    rows: masked.axis(row0, rows),
                    cols: Axis::whole(units as usize * 32),
                },
                Side::Cols => Content::Listed {
                    rows: Axis::whole(rows as usize),
                    cols: masked.axis(0, units * 32),
                },
            };
            // The operator, what its list holds, and which binding the list comes before; the bias of a sum goes.
            let (op, content, at) = match step.op {
                Op::Matvec(p) => (Op::MatvecSome(p), listed(p.rows, p.row0, p.units), 3),
                Op::MatvecAdd(p) if p.has_bias == 0 => {
                    step.bindings.remove(2);
                    let op = Op::MatvecAddSome(kernel::MatvecAddSome {
                        rows: p.rows,
                        units: p.units,
                        row0: p.row0,
                        part1: p.part1,
                        part2: p.part2,
                        y_stride: p.y_stride,
                    });
                    (op, listed(p.rows, p.row0, p.units), 2)
                }
                Op::MatvecGlu(p) => (Op::MatvecGluSome(p), Content::Outputs(masked.axis(p.row0, p.part1)), 3),
                _ => {
                    self.push_step(Mode::Decode, step);
                    continue;
                }
            };
            let list = self.target(format!("{}.{i}.list", step.label), &masked, content)?;
            step.bindings.insert(at, Bind::Buffer(list));
            step.grid = Grid::of(&op);
            step.op = op;
            self.push_step(Mode::Decode, step);
        }
        self.only(Mode::Decode, alternative, When::Some(masked.visit, masked.part));
        Ok(())
    }

    /// The same for the chunk's steps. Of gate and up blocks of 4 outputs are left out, so some zeros are still to be made.
    pub(super) fn narrow_chunk(&mut self, from: usize, masked: Option<Masked>, side: Side) -> Result<()> {
        let Some(masked) = masked else { return Ok(()) };
        let steps: Vec<Step> = self.steps(Mode::Prefill)[from..].to_vec();
        self.only(Mode::Prefill, from, When::Whole(masked.visit, masked.part));
        let alternative = self.at(Mode::Prefill);
        for (i, mut step) in steps.into_iter().enumerate() {
            let (op, rows, row0, units) = match step.op {
                Op::Matmul(p) => (Op::MatmulSome(p), p.rows, p.row0, p.units),
                Op::MatmulAdd(p) => (Op::MatmulAddSome(p), p.rows, p.row0, p.units),
                Op::MatmulGlu(p) => (Op::MatmulGluSome(p), p.part1, p.row0, p.units),
                _ => {
                    self.push_step(Mode::Prefill, step);
                    continue;
                }
            };
            let content = match side {
                Side::Rows => Content::Listed {
                    rows: masked.axis(row0, rows),
                    cols: Axis::whole(units as usize * 32),
                },
                Side::Cols => Content::Listed {
                    rows: Axis::whole(rows as usize),
                    cols: masked.axis(0, units * 32),
                },
            };
            let list = self.target(format!("{}.{i}.chunk.list", step.label), &masked, content)?;
            // Before the bias and what is written.
            step.bindings.insert(step.bindings.len() - 2, Bind::Buffer(list));
            step.grid = Grid::of(&op);
            step.op = op;
            self.push_step(Mode::Prefill, step);
        }
        self.only(Mode::Prefill, alternative, When::Some(masked.visit, masked.part));
        Ok(())
    }

    /// Makes the attention steps from `from` on, of both modes, those without a mask, and plans others that attend only the heads
    /// that a mask leaves. What the others would have read is zero after a merge, and as it was after a chunk.
    pub(super) fn narrow_attention(&mut self, from: [usize; 2], masked: Option<Masked>, label: &str) -> Result<()> {
        let Some(masked) = masked else { return Ok(()) };
        let mut list = None;
        for mode in [Mode::Decode, Mode::Prefill] {
            let from = from[mode as usize];
            let steps: Vec<Step> = self.steps(mode)[from..].to_vec();
            self.only(mode, from, When::Whole(masked.visit, masked.part));
            let alternative = self.at(mode);
            for mut step in steps {
                let (op, heads, kv_heads) = match step.op {
                    Op::AttnBlock(p) => (Op::AttnBlockSome(p), p.heads, p.kv_heads),
                    Op::AttnMerge(p) => (Op::AttnMergeSome(p), p.heads, p.kv_heads),
                    Op::AttnChunk(p) => (Op::AttnChunkSome(p), p.heads, p.kv_heads),
                    _ => {
                        self.push_step(mode, step);
                        continue;
                    }
                };
                let list = match list {
                    Some(list) => list,
                    None => {
                        let content = Content::Heads { heads, kv_heads };
                        *list.insert(self.target(format!("{label}.list"), &masked, content)?)
                    }
                };
                // The list comes before what is written.
                step.bindings.insert(step.bindings.len() - 1, Bind::Buffer(list));
                step.grid = Grid::of(&op);
                step.op = op;
                self.push_step(mode, step);
            }
            self.only(mode, alternative, When::Some(masked.visit, masked.part));
        }
        Ok(())
    }

    /// Zeros in the columns of `y`, each of so many elements, where a mask leaves something out.
    pub(super) fn silence(
        &mut self,
        modes: &[Mode],
        label: &str,
        y: [BufferId; 2],
        masked: Option<Masked>,
        len: usize,
    ) -> Result<()> {
        let Some(masked) = masked else { return Ok(()) };
        let content = Content::Bits(masked.axis(0, len as u32));
        let bits = self.target(format!("{label}.bits"), &masked, content)?;
        for &mode in modes {
            let from = self.at(mode);
            let op = Op::Silence(kernel::Silence {
                vectors: Self::vectors_of(len),
            });
            let bindings = [self.scratch(mode).ctl, bits, y[mode as usize]];
            self.push(mode, label, op, None, bindings.map(Bind::Buffer).to_vec());
            self.only(mode, from, When::Some(masked.visit, masked.part));
        }
        Ok(())
    }

    /// The router's steps from `from` on, of both modes, are those without a mask; the others add a bias that keeps experts
    /// from being chosen.
    pub(super) fn narrow_router(&mut self, from: [usize; 2], masked: Option<Masked>, label: &str) -> Result<()> {
        let Some(masked) = masked else { return Ok(()) };
        let content = Content::Logits(masked.limit);
        let bias = self.target(format!("{label}.bias"), &masked, content)?;
        for mode in [Mode::Decode, Mode::Prefill] {
            let from = from[mode as usize];
            let steps: Vec<Step> = self.steps(mode)[from..].to_vec();
            self.only(mode, from, When::Whole(masked.visit, masked.part));
            let alternative = self.at(mode);
            for mut step in steps {
                match &mut step.op {
                    Op::Matvec(p) => p.has_bias = 1,
                    Op::Matmul(p) => p.has_bias = 1,
                    _ => {}
                }
                if let Some(unused) = step.bindings.get_mut(3) {
                    *unused = Bind::Buffer(bias);
                }
                self.push_step(mode, step);
            }
            self.only(mode, alternative, When::Some(masked.visit, masked.part));
        }
        Ok(())
    }
}
