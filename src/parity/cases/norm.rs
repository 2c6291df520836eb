//! Cases of operators over whole rows of tokens: norms, activations, zeroing, moving a row.

use crate::error::Result;
use crate::op::{Kernel, hadamard, last_token};
use crate::parity::case::Table;
use crate::parity::maker::{Maker, op, sequence, token};
use crate::parity::random::padded;

/// Tokens of each round.
const TOKENS: [u32; 3] = [1, 2, 17];
/// The most of them.
const MOST: usize = 17;

pub fn add(table: &mut Table) {
    for cols in [32, 36, 96, 576, 1056] {
        let stride = usize::next_multiple_of(cols, 32);
        let add = |table: &mut Table, kernel: Kernel, inputs: &'static [&'static str], what: &str, own| {
            let name = format!("{} {cols}{what}", kernel.spec().name);
            table.add(name, move |maker| rows_case(maker, kernel, [cols, stride], inputs, own));
        };
        add(table, Kernel::PreNorm, &["source"], "", ("", 0));
        add(table, Kernel::Norm, &["x"], "", ("", 0));
        add(table, Kernel::AddNorm, &["y", "h"], "", ("", 0));
        add(table, Kernel::ZeroMasked, &["y"], "", ("", 0));
        table.add(format!("last_token {cols}"), move |maker| {
            last_token_case(maker, cols, stride)
        });
        for (what, gelu) in [("", 0), (" gelu", 1)] {
            add(table, Kernel::Glu, &["y", "up"], what, ("gelu", gelu));
        }
        for (what, cap) in [("", 0.0), (" soft", 0.2), (" hard", 1e-3f32)] {
            add(table, Kernel::Cap, &["y"], what, ("cap", cap.to_bits()));
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

/// An operator that computes rows of `cols` elements, `stride` apart. The buffers `inputs` hold random rows. `own` is a
/// parameter whose value differs between cases.
fn rows_case(
    maker: &mut Maker,
    kernel: Kernel,
    [cols, stride]: [usize; 2],
    inputs: &'static [&'static str],
    own: (&'static str, u32),
) -> Result<()> {
    let (spec, vectors) = (kernel.spec(), stride / 4);
    for label in ["g", "post"] {
        if spec.position(label).is_some() {
            maker.vector(label, cols)?;
        }
    }
    // The results of two tokens of `norm` are apart, and what is between them stays as it is.
    let y_stride = vectors + 16;
    for label in inputs {
        maker.rows(label, stride, MOST);
    }
    match kernel {
        Kernel::PreNorm => {
            maker.rows("x_scaled", stride, MOST);
            maker.rows("squares", vectors.next_multiple_of(32), MOST);
        }
        Kernel::Norm => maker.rows("y", y_stride * 4, MOST),
        Kernel::AddNorm => maker.rows("x", stride, MOST),
        Kernel::ZeroMasked => _ = maker.buffer("bits", stride / 32),
        _ => {}
    }
    let values = [
        own,
        ("vectors", vectors as u32),
        ("inv_cols", (1.0 / cols as f32).to_bits()),
        ("eps", 1e-2f32.to_bits()),
        ("multiplier", 0.75f32.to_bits()),
        ("y_stride", y_stride as u32),
        ("y_first", 8),
    ];
    maker.step(op(kernel, &values)?)?;
    for tokens in TOKENS {
        let mut contents = Vec::new();
        for label in inputs {
            let rows = padded(&mut maker.random, tokens as usize, cols, stride, 0.3);
            contents.push((*label, rows));
        }
        if kernel == Kernel::ZeroMasked {
            let bits = (0..stride / 32).map(|_| maker.random.bits() as u32);
            contents.push(("bits", bits.collect()));
        }
        maker.round(sequence(0, tokens), contents)?;
    }
    Ok(())
}

/// Only the last token is left, so these are not rows that are computed token by token.
fn last_token_case(maker: &mut Maker, cols: usize, stride: usize) -> Result<()> {
    maker.buffer("source", stride * MOST);
    maker.buffer("to", stride);
    maker.step(last_token::Params {
        vectors: stride as u32 / 4,
    })?;
    for tokens in TOKENS {
        let values = padded(&mut maker.random, tokens as usize, cols, stride, 0.3);
        let tokens = (0..tokens).map(|i| token(100 + i, i % 2, 10 + 3 * i));
        maker.round(tokens.collect(), vec![("source", values)])?;
    }
    Ok(())
}

fn hadamard_case(maker: &mut Maker, params: hadamard::Params) -> Result<()> {
    let cols = params.vectors as usize * 4;
    maker.buffer("signs", cols);
    // Rows of x and y are apart, and what is between them stays as it is.
    let (x_stride, y_stride) = (params.vectors + 8, params.vectors + 16);
    maker.rows("x", x_stride as usize * 4, MOST);
    maker.rows("y", y_stride as usize * 4, MOST);
    maker.step(hadamard::Params {
        x_stride,
        y_stride,
        ..params
    })?;
    for tokens in TOKENS {
        let x = padded(&mut maker.random, tokens as usize, cols, x_stride as usize * 4, 0.3);
        let sign = |bits: u64| if bits.is_multiple_of(2) { 1f32 } else { -1.0 };
        let signs = (0..cols).map(|_| sign(maker.random.bits()).to_bits()).collect();
        maker.round(sequence(0, tokens), vec![("x", x), ("signs", signs)])?;
    }
    Ok(())
}
