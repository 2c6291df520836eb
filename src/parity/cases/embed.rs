//! Cases of `embed`.

use super::dtypes::{WHOLE, has_halves, overlays, runnable, segment_bytes};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::graph::Stacking;
use crate::op::{Token, embed};
use crate::parity::case::Table;
use crate::parity::maker::Maker;
use crate::parity::random::Values;

/// Tokens of a round.
const TOKENS: usize = 9;

#[derive(Clone, Copy)]
struct Embed {
    dtype: Dtype,
    rows: usize,
    cols: usize,
    values: Values,
    /// Bytes of a segment.
    limit: u64,
}

pub fn add(table: &mut Table) {
    for dtype in runnable() {
        let ragged = (dtype.row_multiple() == 1).then_some((9, 36));
        for (rows, cols) in [(33, 32), (7, 576), (70, 1056)].into_iter().chain(ragged) {
            Embed::plain(dtype, rows, cols).add(table, "");
        }
        Embed::plain(dtype, 100, 96).cut().add(table, " segments");
        let small = Embed::plain(dtype, 33, 96);
        if has_halves(dtype) {
            small.with(Values::SUBNORMAL).add(table, " subnormal");
        }
        for (what, overlay) in overlays(dtype) {
            small.with(Values::with_overlay(overlay)).add(table, what);
        }
    }
    // Groups of 32 weights that straddle rows.
    let dtype = Dtype::Q4Block;
    Embed::plain(dtype, 50, 1001).add(table, "");
    Embed::plain(dtype, 100, 50).cut().add(table, " segments");
    let small = Embed::plain(dtype, 33, 50);
    small.with(Values::SUBNORMAL).add(table, " subnormal");
    // The size of a vocabulary.
    Embed::plain(Dtype::Q8Row, 65_539, 32).add(table, "");
}

impl Embed {
    fn plain(dtype: Dtype, rows: usize, cols: usize) -> Embed {
        Embed {
            dtype,
            rows,
            cols,
            values: Values::PLAIN,
            limit: WHOLE,
        }
    }

    fn with(self, values: Values) -> Embed {
        Embed { values, ..self }
    }

    /// The same in segments of 32 rows.
    fn cut(self) -> Embed {
        let limit = segment_bytes(self.dtype, self.cols);
        Embed { limit, ..self }
    }

    fn add(self, table: &mut Table, what: &str) {
        let name = format!("embed.{} {}x{}{what}", self.dtype.name(), self.rows, self.cols);
        table.add(name, move |maker| self.build(maker));
    }

    fn build(&self, maker: &mut Maker) -> Result<()> {
        let tensor = maker.tensor(self.dtype, self.rows, self.cols, self.values)?;
        let matrix = maker.stack(&[tensor], Stacking::Rows, self.limit)?;
        let groups = self.cols.div_ceil(32);
        maker.rows("h", groups * 32, TOKENS);
        for (i, segment) in matrix.segments.iter().enumerate() {
            let params = embed::Params {
                rows: segment.geometry.rows as u32,
                groups: groups as u32,
                row0: segment.row0,
                multiplier: 11.3,
            };
            maker.segment_step(i, params)?;
        }
        // The first and the last row, and some between.
        let rows = self.rows as u64;
        let mut ids = vec![0, rows as u32 - 1];
        ids.resize_with(TOKENS, || (maker.random.bits() % rows) as u32);
        let token = |(id, position): (u32, u32)| Token {
            id,
            position,
            ..Token::default()
        };
        maker.round(ids.into_iter().zip(0..).map(token).collect(), Vec::new())
    }
}
