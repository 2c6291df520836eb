//! Graphs: buffers, weights and programs of steps, as data. Executors perform them, on a device or on the host.
//!
//! A graph contains nothing of the network that it was made from, and nothing of wgpu.

mod buffer;
mod cost;
mod executor;
mod matrix;
mod paged;
mod pauses;
mod print;
mod program;
mod selected;
mod slices;

pub use crate::op::{BatchShape, Bind, BufferId, MatrixId, VectorId};
pub use buffer::{Buffer, Fill};
pub use cost::{Cost, KvBytes, ProgramCost};
pub use executor::{Counters, Executor, READBACK_WORDS, Ticket};
pub use matrix::{
    Matrix, Measured, Piece, Run, Segment, Stacking, Vector, may_follow, planes, source, sources, stored,
};
pub use paged::{ExpertSlices, Paged, Routed, table_words};
pub use pauses::{Pause, Waiting};
pub use program::{Condition, Graph, Masked, PARAMS_SLOT, Program, Resolved, Selection, Step, SwitchId};
pub use selected::{Selected, SelectedProgram};
pub use slices::{Slice, Stack};
