//! How many workgroups a step needs. The number is computed when the step is encoded.

/// The size of a run's batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchShape {
    /// Tokens of the run.
    pub tokens: u32,
    /// One more than the largest position of these tokens.
    pub end: u32,
}

/// How many workgroups a step needs, as a number of workgroups, teams or threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid {
    /// This number of teams, folded into rows of workgroups.
    Teams(u32),
    /// This number of teams for each token that the step computes.
    TeamsEachToken(u32),
    /// `(threads, tokens)`: this number of threads for each group of this number of tokens.
    Threads(u32, u32),
    /// `(workgroups, tokens)`: this number of workgroups for each group of this number of tokens; 0 tokens = the whole
    /// batch is one group.
    Workgroups(u32, u32),
    /// One workgroup for each token.
    Tokens,
    /// One workgroup for each attention block of each token and each of this number of heads.
    Blocks(u32),
    /// `(teams, experts)`: this number of teams for each of this number of experts, of each token that the step
    /// computes.
    Experts(u32, u32),
    /// Threads for each tile of tokens grouped by expert.
    Tiles {
        /// Threads of one tile.
        threads: u32,
        /// Entries of a token: the experts that it takes.
        entries: u32,
        /// Largest number of tiles that the lists can hold.
        most: u32,
    },
    /// One workgroup.
    One,
}

/// Largest number of workgroups in one row of a folded grid.
pub const GRID_WIDTH: u32 = 32768;
/// Positions of an attention block, and of a page of the key-value cache.
pub const KV_PAGE: u32 = 64;

impl Grid {
    /// Workgroups of a dispatch. A workgroup has `threads` threads or `teams` teams; the step computes at most
    /// `width` tokens side by side.
    pub fn workgroups(self, shape: BatchShape, width: u32, threads: u32, teams: u32) -> [u32; 3] {
        let batches = |tokens: u32| match tokens {
            0 => 1,
            _ => shape.tokens.div_ceil(tokens),
        };
        let own = width.min(shape.tokens);
        let folded = |count: u32, layers: u32| {
            let groups = count.div_ceil(teams);
            [groups.min(GRID_WIDTH), groups.div_ceil(GRID_WIDTH), layers]
        };
        match self {
            Grid::Teams(count) => folded(count, 1),
            Grid::TeamsEachToken(count) => folded(count, own),
            Grid::Threads(count, tokens) => [count.div_ceil(threads), batches(tokens), 1],
            Grid::Workgroups(count, tokens) => [count, batches(tokens), 1],
            Grid::Tokens => [shape.tokens, 1, 1],
            Grid::Blocks(heads) => [shape.end.div_ceil(KV_PAGE), heads, shape.tokens],
            Grid::Experts(count, experts) => [count.div_ceil(teams), experts, own],
            Grid::Tiles {
                threads: count,
                entries,
                most,
            } => {
                let tiles = shape.tokens.saturating_mul(entries).min(most);
                [count.div_ceil(threads), tiles, 1]
            }
            Grid::One => [1, 1, 1],
        }
    }
}
