//! Cases of operators over whole rows of tokens: norms, activations, zeroing, moving a row.

use crate::error::Result;
use crate::op::{Token, add_norm, cap, glu, hadamard, last_token, norm, pre_norm, zero_masked};
use crate::parity::case::Table;
use crate::parity::maker::{Maker, sequence};
use crate::parity::random::padded;

/// Tokens of each round.
const TOKENS: [u32; 3] = [1, 2, 17];
/// The most of them.
const MOST: usize = 17;

/// Added to mean squares.
const EPS: f32 = 1e-2;

/// The rows that an operator of a case computes.
#[derive(Clone, Copy)]
struct Shape {
    cols: usize,
    /// Elements from one row to the next.
    stride: usize,
    /// Vectors of 4 in a row.
    vectors: u32,
    /// 1 / `cols`.
    inv_cols: f32,
}

type Build = fn(&mut Maker, Shape) -> Result<()>;

pub fn add(table: &mut Table) {
    for cols in [32, 36, 96, 576, 1056] {
        let stride = usize::next_multiple_of(cols, 32);
        let shape = Shape {
            cols,
            stride,
            vectors: stride as u32 / 4,
            inv_cols: 1.0 / cols as f32,
        };
        let operators: [(&str, Build); 5] = [
            ("pre_norm", pre_norm_case),
            ("norm", norm_case),
            ("add_norm", add_norm_case),
            ("zero_masked", zero_masked_case),
            ("last_token", last_token_case),
        ];
        for (name, build) in operators {
            table.add(format!("{name} {cols}"), move |maker| build(maker, shape));
        }
        for (what, gelu) in [("", 0), (" gelu", 1)] {
            table.add(format!("glu {cols}{what}"), move |maker| glu_case(maker, shape, gelu));
        }
        for (what, cap) in [("", 0.0), (" soft", 0.2), (" hard", 1e-3)] {
            table.add(format!("cap {cols}{what}"), move |maker| cap_case(maker, shape, cap));
        }
    }
    for (vectors, block) in [
        (16, 64),
        (96, 128),
        (160, 128),
        (1280, 1024),
        (1024, 4096),
        (3072, 4096),
        (8, 8),
    ] {
        for (what, inverse) in [("", false), (" inverse", true)] {
            let name = format!("hadamard {} by {block}{what}", 4 * vectors);
            table.add(name, move |maker| {
                hadamard_case(maker, hadamard::Params::new(vectors, block, inverse))
            });
        }
    }
}

impl Shape {
    /// Buffers with a row for each token.
    fn rows(&self, maker: &mut Maker, labels: &[&str]) {
        labels.iter().for_each(|label| maker.rows(label, self.stride, MOST));
    }

    /// Rounds in which these buffers hold random rows.
    fn rounds(&self, maker: &mut Maker, inputs: &[&'static str]) -> Result<()> {
        for tokens in TOKENS {
            let inputs = inputs.iter().map(|&label| (label, self.values(maker, tokens)));
            let inputs = inputs.collect();
            maker.round(sequence(0, tokens), inputs)?;
        }
        Ok(())
    }

    fn values(&self, maker: &mut Maker, tokens: u32) -> Vec<u32> {
        padded(&mut maker.random, tokens as usize, self.cols, self.stride, 0.3)
    }
}

fn pre_norm_case(maker: &mut Maker, shape: Shape) -> Result<()> {
    maker.vector("g", shape.cols)?;
    shape.rows(maker, &["source", "x_scaled"]);
    maker.rows("squares", (shape.stride / 4).next_multiple_of(32), MOST);
    maker.step(pre_norm::Params { vectors: shape.vectors })?;
    shape.rounds(maker, &["source"])
}

fn norm_case(maker: &mut Maker, shape: Shape) -> Result<()> {
    maker.vector("g", shape.cols)?;
    shape.rows(maker, &["x"]);
    // The results of two tokens are apart, and what is between them stays as it is.
    let y_stride = shape.vectors + 16;
    maker.rows("y", y_stride as usize * 4, MOST);
    maker.step(norm::Params {
        vectors: shape.vectors,
        inv_cols: shape.inv_cols,
        eps: EPS,
        y_stride,
        y_first: 8,
    })?;
    shape.rounds(maker, &["x"])
}

fn add_norm_case(maker: &mut Maker, shape: Shape) -> Result<()> {
    maker.vector("g", shape.cols)?;
    maker.vector("post", shape.cols)?;
    shape.rows(maker, &["y", "h", "x"]);
    maker.step(add_norm::Params {
        vectors: shape.vectors,
        inv_cols: shape.inv_cols,
        eps: EPS,
    })?;
    shape.rounds(maker, &["y", "h"])
}

fn hadamard_case(maker: &mut Maker, params: hadamard::Params) -> Result<()> {
    let cols = params.vectors as usize * 4;
    maker.buffer("signs", cols);
    // Rows of x and y are apart, and what is between them stays as it is.
    let params = hadamard::Params {
        x_stride: params.vectors + 8,
        y_stride: params.vectors + 16,
        ..params
    };
    maker.rows("x", params.x_stride as usize * 4, MOST);
    maker.rows("y", params.y_stride as usize * 4, MOST);
    maker.step(params)?;
    for tokens in TOKENS {
        let x = padded(
            &mut maker.random,
            tokens as usize,
            cols,
            params.x_stride as usize * 4,
            0.3,
        );
        let sign = |bits: u64| if bits.is_multiple_of(2) { 1f32 } else { -1.0 };
        let signs = (0..cols).map(|_| sign(maker.random.bits()).to_bits()).collect();
        maker.round(sequence(0, tokens), vec![("x", x), ("signs", signs)])?;
    }
    Ok(())
}

fn glu_case(maker: &mut Maker, shape: Shape, gelu: u32) -> Result<()> {
    shape.rows(maker, &["y", "up"]);
    maker.step(glu::Params {
        vectors: shape.vectors,
        gelu,
    })?;
    shape.rounds(maker, &["y", "up"])
}

fn cap_case(maker: &mut Maker, shape: Shape, cap: f32) -> Result<()> {
    shape.rows(maker, &["y"]);
    maker.step(cap::Params {
        vectors: shape.vectors,
        multiplier: 0.75,
        cap,
    })?;
    shape.rounds(maker, &["y"])
}

fn zero_masked_case(maker: &mut Maker, shape: Shape) -> Result<()> {
    shape.rows(maker, &["y"]);
    maker.buffer("bits", shape.stride / 32);
    maker.step(zero_masked::Params { vectors: shape.vectors })?;
    for tokens in TOKENS {
        let values = shape.values(maker, tokens);
        let bits = (0..shape.stride / 32).map(|_| maker.random.bits() as u32).collect();
        maker.round(sequence(0, tokens), vec![("y", values), ("bits", bits)])?;
    }
    Ok(())
}

fn last_token_case(maker: &mut Maker, shape: Shape) -> Result<()> {
    // Only the last token is left, so these are not rows that are computed token by token.
    maker.buffer("source", shape.stride * MOST);
    maker.buffer("to", shape.stride);
    maker.step(last_token::Params { vectors: shape.vectors })?;
    for tokens in TOKENS {
        let token = |i| Token {
            id: 100 + i,
            slot: i % 2,
            position: 10 + 3 * i,
            ..Token::default()
        };
        let values = shape.values(maker, tokens);
        maker.round((0..tokens).map(token).collect(), vec![("source", values)])?;
    }
    Ok(())
}
