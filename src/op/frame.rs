//! The rows of an image that a run of an image operator computes. `shaders/lib/frame.wgsl` has the same words.

use super::host::Operands;
use crate::error::Result;

/// The rows of an image that a run computes, and those that it reads. An image that is too large for the device is computed in
/// strips of whole rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Frame {
    /// The first row that is computed, in the whole image.
    pub first: u32,
    /// Rows of the whole image.
    pub height: u32,
    /// The first row of the input that its buffer holds, in the whole input.
    pub held: u32,
    /// Rows that are computed.
    pub rows: u32,
}

impl Frame {
    /// A whole image.
    pub fn whole(height: u32) -> Frame {
        Frame {
            height,
            rows: height,
            ..Frame::default()
        }
    }

    /// Its words.
    pub fn words(self) -> [u32; 4] {
        [self.first, self.height, self.held, self.rows]
    }

    /// The frame that an operator reads.
    pub(super) fn of(o: &Operands) -> Result<Frame> {
        let words = o.words("frame", 0, 4)?;
        Ok(Frame {
            first: words[0],
            height: words[1],
            held: words[2],
            rows: words[3],
        })
    }
}
