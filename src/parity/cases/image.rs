//! Cases of the operators of text to image: modulated norms, rotation by a table, full attention, copies, convolutions and
//! norms of groups of channels.

use crate::dtype::Dtype;
use crate::error::Result;
use crate::graph::Stacking;
use crate::op::{Frame, Kernel, conv};
use crate::parity::case::{Table, flags};
use crate::parity::maker::{Maker, op, sequence};
use crate::parity::random::{Values, padded};
use crate::source::Tensors;

/// Tokens of each round, and the most of them.
const TOKENS: [u32; 3] = [1, 2, 17];
const MOST: usize = 17;

pub fn add(table: &mut Table) {
    for cols in [32, 36, 96, 1056] {
        for (what, centred) in [("", 0), (" centred", 1)] {
            table.add(format!("norm_mod {cols}{what}"), move |maker| {
                norm_case(maker, Kernel::NormMod, cols, centred)
            });
        }
        table.add(format!("add_norm_mod {cols}"), move |maker| {
            norm_case(maker, Kernel::AddNormMod, cols, 0)
        });
        table.add(format!("copy_rows {cols}"), move |maker| copy_case(maker, cols));
    }
    for (heads, kv_heads, dim) in [(6, 2, 16), (3, 3, 96), (1, 1, 4), (4, 1, 132)] {
        table.add(format!("rope_pairs {heads}/{kv_heads} heads of {dim}"), move |maker| {
            rope_case(maker, heads, kv_heads, dim)
        });
        table.add(format!("attn_full {heads}/{kv_heads} heads of {dim}"), move |maker| {
            attention_case(maker, heads, kv_heads, dim)
        });
    }
    table.add("attn_full 1/1 heads of 512".into(), |maker| {
        attention_case(maker, 1, 1, 512)
    });
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for (i, (rows, inputs)) in [(3, 32), (70, 64), (132, 32)].into_iter().enumerate() {
            for side in [1, 3] {
                for doubled in [0, 1] {
                    let conv = Conv {
                        dtype,
                        rows,
                        inputs,
                        side,
                        doubled,
                        adds: i % 2 == 1,
                    };
                    conv.add(table);
                }
            }
        }
    }
    for (channels, groups) in [(16, 8), (32, 8), (96, 32), (132, 2)] {
        let name = |operator: &str| format!("{operator} {channels} in {groups}");
        table.add(name("channel_stats"), move |maker| stats_case(maker, channels));
        table.add(name("group_merge"), move |maker| merge_case(maker, channels, groups));
        for (what, silu) in [("", 0), (" silu", 1)] {
            table.add(name("group_norm") + what, move |maker| {
                group_norm_case(maker, channels, silu)
            });
        }
    }
}

fn norm_case(maker: &mut Maker, kernel: Kernel, cols: usize, centred: u32) -> Result<()> {
    let stride = cols.next_multiple_of(32);
    maker.vector("g", cols)?;
    maker.vector("post", cols)?;
    maker.buffer("mods", 3 * stride);
    let inputs: &[&str] = match kernel {
        Kernel::NormMod => &["x"],
        _ => &["y", "h"],
    };
    for label in ["x", "y", "h"] {
        maker.rows(label, stride, MOST);
    }
    let values = [
        ("vectors", (stride / 4) as u32),
        ("cols", cols as u32),
        ("inv_cols", (1.0 / cols as f32).to_bits()),
        ("eps", 1e-2f32.to_bits()),
        ("centred", centred),
        ("gate_at", 0),
        ("scale_at", (stride / 2) as u32),
    ];
    maker.step(op(kernel, &values)?)?;
    for tokens in TOKENS {
        let mut contents = vec![("mods", padded(&mut maker.random, 3, cols, stride, 0.8))];
        for label in inputs {
            contents.push((*label, padded(&mut maker.random, tokens as usize, cols, stride, 0.3)));
        }
        maker.round(sequence(0, tokens), contents)?;
    }
    Ok(())
}

/// The rows of the result begin after others, so these are not rows that are computed token by token.
fn copy_case(maker: &mut Maker, cols: usize) -> Result<()> {
    let stride = cols.next_multiple_of(32);
    maker.buffer("x", stride * MOST);
    maker.buffer("y", stride * (MOST + 5));
    let values = [("vectors", (stride / 4) as u32), ("first", 5)];
    maker.step(op(Kernel::CopyRows, &values)?)?;
    for tokens in TOKENS {
        let rows = padded(&mut maker.random, tokens as usize, cols, stride, 0.3);
        maker.round(sequence(0, tokens), vec![("x", rows)])?;
    }
    Ok(())
}

/// The parameters of heads, and the elements from one token to the next. What is after its values is not read.
fn heads(heads: u32, kv_heads: u32, dim: u32) -> ([(&'static str, u32); 4], usize) {
    let stride = (heads + 2 * kv_heads) * dim / 4 + 2;
    let params = [
        ("heads", heads),
        ("kv_heads", kv_heads),
        ("head_vectors", dim / 4),
        ("qkv_stride", stride),
    ];
    (params, stride as usize * 4)
}

fn rope_case(maker: &mut Maker, q: u32, kv: u32, dim: u32) -> Result<()> {
    let (params, stride) = heads(q, kv, dim);
    maker.vector("q_norm", dim as usize)?;
    maker.vector("k_norm", dim as usize)?;
    maker.rows("table", dim as usize, MOST);
    maker.rows("qkv", stride, MOST);
    maker.step(op(
        Kernel::RopePairs,
        &[&params[..], &[("eps", 1e-2f32.to_bits())]].concat(),
    )?)?;
    for tokens in TOKENS {
        let angles = maker.random.floats(tokens as usize * dim as usize / 2, 3.0);
        let table = angles
            .iter()
            .flat_map(|angle| [angle.cos(), angle.sin()].map(f32::to_bits));
        let qkv = maker.random.words(tokens as usize * stride, 1.0);
        maker.round(sequence(0, tokens), vec![("table", table.collect()), ("qkv", qkv)])?;
    }
    Ok(())
}

/// Every token sees all others, so these are not rows that are computed token by token.
fn attention_case(maker: &mut Maker, q: u32, kv: u32, dim: u32) -> Result<()> {
    const LONGEST: u32 = 64;
    let (params, stride) = heads(q, kv, dim);
    let y_stride = q * dim / 4 + 1;
    maker.buffer("qkv", stride * LONGEST as usize);
    maker.buffer("y", y_stride as usize * 4 * LONGEST as usize);
    let own = [
        ("y_stride", y_stride),
        ("scale", (1.0 / (dim as f32).sqrt()).to_bits()),
        ("most", LONGEST),
    ];
    maker.step(op(Kernel::AttnFull, &[&params[..], &own].concat())?)?;
    for tokens in [1, 15, 16, 17, 63, 64] {
        // Large values, so that some keys stand out.
        let qkv = maker.random.words(tokens as usize * stride, 3.0);
        maker.round(sequence(0, tokens), vec![("qkv", qkv)])?;
    }
    Ok(())
}

/// Pixels of a row and rows of the images of the cases below.
const WIDTH: u32 = 6;
const HEIGHT: u32 = 10;

/// A whole image, and the strips of it that a run can compute: the first, one in the middle, the last.
fn frames() -> [Frame; 4] {
    let strip = |first, rows, held| Frame {
        first,
        height: HEIGHT,
        held,
        rows,
    };
    [Frame::whole(HEIGHT), strip(0, 3, 0), strip(4, 2, 3), strip(8, 2, 7)]
}

/// As many tokens as a frame has pixels: they decide about the grid only.
fn pixels(frame: &Frame) -> Vec<crate::op::Token> {
    sequence(0, frame.rows * WIDTH)
}

#[derive(Clone, Copy)]
struct Conv {
    dtype: Dtype,
    rows: usize,
    /// Inputs of a tap.
    inputs: usize,
    side: usize,
    doubled: u32,
    adds: bool,
}

impl Conv {
    fn add(self, table: &mut Table) {
        let Conv {
            dtype,
            rows,
            inputs,
            side,
            ..
        } = self;
        let flags = flags([(self.doubled == 1, " doubled"), (self.adds, " added")]);
        let name = format!("conv.{} {rows} of {inputs}, {side}x{side}{flags}", dtype.name());
        table.add(name, move |maker| self.build(maker));
    }

    fn build(self, maker: &mut Maker) -> Result<()> {
        let cols = self.side * self.side * self.inputs;
        let tensor = maker.tensor(self.dtype, self.rows, cols, Values::PLAIN)?;
        let matrix = maker.stack(&[tensor], Stacking::Rows, super::dtypes::WHOLE)?;
        let y_stride = self.rows.next_multiple_of(32);
        let pixels_of = |rows: u32| (rows * WIDTH) as usize;
        maker.buffer("frame", 4);
        maker.buffer("x", pixels_of(HEIGHT) * self.inputs);
        maker.buffer("y", pixels_of(HEIGHT) * y_stride);
        maker.vector("bias", self.rows)?;
        for (i, segment) in matrix.segments.iter().enumerate() {
            let params = conv::Params {
                rows: segment.geometry.rows as u32,
                groups: (cols / 32) as u32,
                row0: segment.row0,
                tap_groups: (self.inputs / 32) as u32,
                side: self.side as u32,
                width: WIDTH,
                doubled: self.doubled,
                y_stride: (y_stride / 4) as u32,
                adds: u32::from(self.adds),
            };
            maker.segment_step(i, params)?;
        }
        for frame in frames() {
            let held = match self.doubled {
                0 => frame.held,
                _ => frame.first.saturating_sub(1) / 2,
            };
            let frame = Frame { held, ..frame };
            // More rows of the input than the strip needs.
            let count = pixels_of(HEIGHT) * self.inputs;
            let mut contents = vec![("frame", frame.words().to_vec()), ("x", maker.random.words(count, 1.0))];
            if self.adds {
                let y = padded(&mut maker.random, pixels_of(frame.rows), self.rows, y_stride, 1.0);
                contents.push(("y", y));
            }
            let name = format!("{} rows from {}", frame.rows, frame.first);
            maker.named_round(name, pixels(&frame), contents)?;
        }
        debug_assert_eq!(maker.tensors.infos()[tensor].rows_cols().1, cols);
        Ok(())
    }
}

/// Vectors of channels, and elements from one pixel to the next.
fn image(channels: usize) -> ([(&'static str, u32); 3], usize) {
    let stride = channels.next_multiple_of(32);
    let params = [
        ("vectors", channels.div_ceil(4) as u32),
        ("pixel_stride", (stride / 4) as u32),
        ("width", WIDTH),
    ];
    (params, stride)
}

fn stats_case(maker: &mut Maker, channels: usize) -> Result<()> {
    let (params, stride) = image(channels);
    maker.buffer("frame", 4);
    maker.buffer("x", (WIDTH * HEIGHT) as usize * stride);
    maker.buffer("partials", HEIGHT as usize * 2 * channels);
    maker.step(op(Kernel::ChannelStats, &params)?)?;
    for frame in frames() {
        let count = (frame.rows * WIDTH) as usize;
        let x = padded(&mut maker.random, count, channels, stride, 1.0);
        // A mean that is far from 0 compared to the deviation.
        let x = x.iter().map(|&word| (f32::from_bits(word) + 20.0).to_bits()).collect();
        let name = format!("{} rows from {}", frame.rows, frame.first);
        let contents = vec![("frame", frame.words().to_vec()), ("x", x)];
        maker.named_round(name, pixels(&frame), contents)?;
    }
    Ok(())
}

fn merge_case(maker: &mut Maker, channels: usize, groups: u32) -> Result<()> {
    maker.buffer("frame", 4);
    maker.buffer("partials", HEIGHT as usize * 2 * channels);
    maker.buffer("stats", 2 * channels);
    let params = [
        ("channels", channels as u32),
        ("groups", groups),
        ("width", WIDTH),
        ("eps", 1e-2f32.to_bits()),
    ];
    maker.step(op(Kernel::GroupMerge, &params)?)?;
    let mut partials = Vec::new();
    for _ in 0..HEIGHT {
        let means = maker.random.floats(channels, 1.0).into_iter().map(|mean| mean + 20.0);
        partials.extend(means.map(f32::to_bits));
        let squares = maker.random.floats(channels, 3.0).into_iter().map(f32::abs);
        partials.extend(squares.map(f32::to_bits));
    }
    let frame = Frame::whole(HEIGHT);
    let contents = vec![("frame", frame.words().to_vec()), ("partials", partials)];
    maker.named_round("an image".into(), pixels(&frame), contents)
}

fn group_norm_case(maker: &mut Maker, channels: usize, silu: u32) -> Result<()> {
    let (params, stride) = image(channels);
    maker.buffer("frame", 4);
    for label in ["x", "y"] {
        maker.buffer(label, (WIDTH * HEIGHT) as usize * stride);
    }
    maker.buffer("stats", 2 * channels);
    maker.vector("g", channels)?;
    maker.vector("bias", channels)?;
    maker.step(op(Kernel::GroupNorm, &[&params[..], &[("silu", silu)]].concat())?)?;
    for frame in frames() {
        let x = padded(&mut maker.random, (frame.rows * WIDTH) as usize, channels, stride, 2.0);
        let name = format!("{} rows from {}", frame.rows, frame.first);
        let stats = maker.random.words(2 * channels, 1.0);
        let contents = vec![("frame", frame.words().to_vec()), ("stats", stats), ("x", x)];
        maker.named_round(name, pixels(&frame), contents)?;
    }
    Ok(())
}
