//! Lists and switches for the units that the task masks of a model can leave out.

use super::context::{LayerPath, Lowering, Phase, vectors_of};
use crate::error::Result;
use crate::graph::{Fill, Masked, SwitchId};
use crate::lm::masks::{Axis, Content, MaskAxis, Shared, Switch, Target, restricts};
use crate::op::{self, Bind, BufferId, MatrixId};

/// The units of the rows or columns of a weight that a mask can leave out.
#[derive(Clone, Copy, Debug)]
pub(super) struct MaskedUnits {
    pub invocation: usize,
    pub axis: MaskAxis,
    pub switch: SwitchId,
    /// Elements of a unit, which is a neuron, a head or an expert.
    pub per: usize,
    /// Elements that belong to one unit each. They come first.
    pub limit: usize,
    /// The units of the elements after them.
    pub shared: Option<Shared>,
}

impl MaskedUnits {
    pub fn elements(&self, first: u32, len: u32) -> Axis {
        Axis {
            first: first as usize,
            len: len as usize,
            per: self.per,
            limit: self.limit,
            shared: self.shared,
        }
    }
}

/// Whether a mask leaves out rows or columns of a weight.
#[derive(Clone, Copy, Debug)]
pub(super) enum MaskUse {
    Rows(MaskedUnits),
    Cols(MaskedUnits),
}

impl Lowering<'_> {
    /// `units` units of `per` elements, if any of the model's masks leaves some of them out; else `None`.
    pub fn masked_units(&mut self, path: LayerPath, axis: MaskAxis, units: usize, per: usize) -> Option<MaskedUnits> {
        let invocation = path.invocation?;
        let mut masks = self.model.masks.masks.iter();
        if !masks.any(|mask| mask.layer(path.layer) && restricts(mask, invocation, axis, units)) {
            return None;
        }
        Some(MaskedUnits {
            invocation,
            axis,
            switch: self.masking.switch(Switch::Restricted(invocation, axis)),
            per,
            limit: units * per,
            shared: None,
        })
    }

    /// The switch that leaves out a layer, if any of the model's masks does.
    pub fn layer_switch(&mut self, path: LayerPath) -> Option<SwitchId> {
        path.invocation?;
        let is_off = self.model.masks.masks.iter().any(|mask| !mask.layer(path.layer));
        is_off.then(|| self.masking.switch(Switch::LayerOff(path.layer)))
    }

    /// A buffer that masks fill.
    pub fn fill_by_mask(&mut self, units: &MaskedUnits, buffer: BufferId, content: Content) {
        self.masking.targets.push(Target {
            invocation: units.invocation,
            axis: units.axis,
            buffer,
            content,
        });
    }

    /// A new buffer that masks fill.
    pub fn mask_buffer(&mut self, label: String, units: &MaskedUnits, content: Content) -> Result<BufferId> {
        let buffer = self.b.buffer(label, content.len() as u64 * 4, Fill::Zero)?;
        self.fill_by_mask(units, buffer, content);
        Ok(buffer)
    }

    /// A list that masked steps read.
    pub fn mask_list(&mut self, label: String, units: &MaskedUnits, content: Content) -> Result<Masked> {
        Ok(Masked {
            switch: units.switch,
            list: self.mask_buffer(label, units, content)?,
        })
    }

    /// The lists of a product's segments, whose outputs begin at `row0`.
    pub fn lists(
        &mut self,
        label: &str,
        matrix: MatrixId,
        row0: u32,
        mask: Option<MaskUse>,
    ) -> Result<Vec<Option<Masked>>> {
        let segments = self.segments(matrix).into_iter().enumerate();
        let list = |(i, segment): (usize, super::context::SegmentShape)| {
            let whole_cols = Axis::whole(segment.groups as usize * 32);
            let (units, content) = match mask {
                None => return Ok(None),
                Some(MaskUse::Rows(units)) => {
                    let rows = units.elements(row0 + segment.row0, segment.rows);
                    (units, Content::Listed { rows, cols: whole_cols })
                }
                Some(MaskUse::Cols(units)) => {
                    let rows = Axis::whole(segment.rows as usize);
                    let cols = units.elements(0, segment.groups * 32);
                    (units, Content::Listed { rows, cols })
                }
            };
            self.mask_list(format!("{label}.{i}.list"), &units, content).map(Some)
        };
        segments.map(list).collect()
    }

    /// Sets elements that a mask leaves out to zero, in rows of `len` elements.
    pub fn zero_masked(
        &mut self,
        phases: &[Phase],
        label: &str,
        y: [BufferId; 2],
        units: Option<MaskedUnits>,
        len: usize,
    ) -> Result<()> {
        let Some(units) = units else { return Ok(()) };
        let content = Content::Bits(units.elements(0, len as u32));
        let bits = self.mask_buffer(format!("{label}.bits"), &units, content)?;
        for &phase in phases {
            self.under(Some(units.switch), true, |lowering| {
                let params = op::zero_masked::Params {
                    vectors: vectors_of(len),
                };
                let bindings = op::zero_masked::Bindings {
                    batch: Bind::Buffer(lowering.scratch[phase as usize].batch),
                    bits: Bind::Buffer(bits),
                    y: Bind::Buffer(y[phase as usize]),
                };
                lowering.emit(phase, label, params, bindings);
                Ok(())
            })?;
        }
        Ok(())
    }
}
