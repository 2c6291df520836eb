//! Lists and switches for the units that the task masks of a model can leave out.

use super::context::{LayerPath, Lowering, Phase, Product, vectors_of};
use crate::error::Result;
use crate::graph::{Masked, SwitchId};
use crate::lm::masks::{Axis, Content, MaskAxis, Switch, Target, restricts};
use crate::op::{self, Bind, BufferId, MatrixId};

/// The units of the rows or columns of a weight that a mask can leave out.
#[derive(Clone, Copy, Debug)]
pub(super) struct MaskedUnits {
    pub invocation: usize,
    pub axis: MaskAxis,
    pub switch: SwitchId,
    /// Which unit each element of a row or column belongs to.
    pub elements: Axis,
}

impl MaskedUnits {
    /// Some of the elements.
    pub fn part(&self, first: u32, len: u32) -> Axis {
        Axis {
            first: first as usize,
            len: len as usize,
            ..self.elements
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
            elements: Axis::of(units, per),
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
        let buffer = self.b.words(label, content.words(&|_| true).len())?;
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

    /// A matrix whose outputs begin at `row0`. If a mask leaves out rows or columns, its segments get lists.
    pub fn operand(
        &mut self,
        label: &str,
        (matrix, row0): (MatrixId, u32),
        bias: Option<Bind>,
        mask: Option<MaskUse>,
    ) -> Result<Product> {
        let mut segments = self.segments(matrix);
        for (i, segment) in segments.iter_mut().enumerate() {
            segment.row0 += row0;
            let cols = segment.groups * 32;
            let (units, axes) = match mask {
                None => continue,
                Some(MaskUse::Rows(units)) => (units, [units.part(segment.row0, segment.rows), Axis::whole(cols)]),
                Some(MaskUse::Cols(units)) => (units, [Axis::whole(segment.rows), units.part(0, cols)]),
            };
            segment.masked = Some(self.mask_list(format!("{label}.{i}.list"), &units, Content::Listed(axes))?);
        }
        Ok(Product { segments, bias })
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
        let content = Content::Bits(units.part(0, len as u32));
        let bits = self.mask_buffer(format!("{label}.bits"), &units, content)?;
        let params = op::zero_masked::Params {
            vectors: vectors_of(len),
        };
        self.under(Some(units.switch), true, |lowering| {
            for &phase in phases {
                let buffers = [lowering.scratch[phase as usize].batch, bits, y[phase as usize]];
                let [batch, bits, y] = buffers.map(Bind::Buffer);
                lowering.emit(phase, label, params, op::zero_masked::Bindings { batch, bits, y });
            }
        });
        Ok(())
    }
}
