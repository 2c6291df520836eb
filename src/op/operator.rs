//! The trait of operators: grid, cost, tolerance and host implementation.

use super::grid::Grid;
use super::host::Operands;
use super::spec::Bind;
use super::tolerance::Tolerance;
use crate::error::Result;

/// Parameters, with the bindings of their operator.
pub trait Bound: Operator {
    /// The operator's bindings by name.
    type Bindings: Into<Vec<Bind>>;
}

/// An operator with its parameters.
pub trait Operator {
    /// The parameters as the uniform buffer holds them.
    fn bytes(&self) -> &[u8];

    /// How many workgroups one dispatch needs.
    fn grid(&self) -> Grid;

    /// The grid of the masked variant, for a list with these first two words.
    fn masked_grid(&self, _counts: [u32; 2]) -> Grid {
        self.grid()
    }

    /// How far a device may differ from the host implementation.
    fn tolerance(&self) -> Tolerance;

    /// How much of the weight one dispatch reads.
    fn weight_read(&self) -> WeightRead {
        WeightRead::All
    }

    /// The share of the weight, or of the heads in the caches, that the masked variant reads: numerator and
    /// denominator.
    fn masked_share(&self, _counts: [u32; 2]) -> [u64; 2] {
        [1, 1]
    }

    /// What one dispatch reads of the key-value cache.
    fn kv_read(&self) -> Option<KvRead> {
        None
    }

    /// Whether it reads expert weights, and how.
    fn experts(&self) -> Option<ExpertUse> {
        None
    }

    /// Largest number of loop iterations of a thread, if it grows with the context; else 0.
    fn loop_steps(&self) -> u64 {
        0
    }

    /// Computes the step in f64 from the values in its bindings.
    ///
    /// Errors: `Internal` for bindings or parameters that do not fit together, and errors in the weights' payloads.
    fn run(&self, o: &mut Operands) -> Result<()>;
}

/// The share of a weight that a mask list selects: blocks of 4 rows times groups of 32 columns.
pub fn block_share([blocks, groups]: [u32; 2], rows: u32, all_groups: u32) -> [u64; 2] {
    [
        u64::from(blocks) * u64::from(groups),
        u64::from(rows.div_ceil(4)) * u64::from(all_groups),
    ]
}

/// How many rows of the weight a dispatch reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightRead {
    /// All rows.
    All,
    /// This number of rows, for any number of tokens.
    Rows(u64),
    /// This number of rows for every token of a decoding run.
    RowsEachToken(u64),
    /// `(experts, rows)`: the rows of this number of experts, at most of all that the weight holds. An expert has this
    /// number of rows.
    Experts(u32, u32),
    /// As `Experts`, but every token of a decoding run reads experts of its own.
    ExpertsEachToken(u32, u32),
}

/// The rows of the key-value cache that a step reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvRead {
    /// Key-value heads.
    pub kv_heads: u64,
    /// Elements of a head.
    pub head: u64,
    /// Positions that a token sees, its own included; 0 = all.
    pub window: u32,
    /// Tokens that share one reading.
    pub tokens: u32,
}

/// How a step uses expert weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertUse {
    /// Counts how often each expert was chosen.
    Counts,
    /// Reads weights. The step can run several times with different experts present: it leaves the outputs of absent
    /// experts unchanged.
    Repeatable,
    /// Reads weights and adds to its output. The step can run only once, so all experts of a token have to be present.
    Once,
}
