//! Convolution of an image with a kernel of 1 or 3 pixels a side, also of an image whose sides are doubled first.

use super::constants::{CONV_PIXELS, CONV_ROWS};
use super::define::*;
use super::frame::Frame;
use crate::dtype::RowDecoder;
use cmf_kernels_ref::op::conv::output;
use rayon::prelude::*;

operator! {
    conv
    weight w
    params {
        rows: u32,
        groups: u32 = "Groups of 32 columns in a row: those of a tap, for all taps.",
        row0: u32,
        tap_groups: u32 = "Groups of 32 columns of a tap.",
        side: u32 = "Side of the kernel: 1 or 3.",
        width: u32 = "Pixels of a row of the result.",
        doubled: u32 = "1 = the sides of x are doubled: a pixel stands for 2 × 2 pixels.",
        y_stride: u32 = "Vectors of 4 from one pixel of the result to the next.",
        adds: u32 = "1 = adds to y.",
    }
    bindings {
        read frame: array<u32>, x: array<vec4<f32>>, bias: array<vec4<f32>>;
        write y: array<vec4<f32>>;
    }
    threads Some(64),
    grid |p| Grid::Workgroups(p.rows.div_ceil(CONV_ROWS), CONV_PIXELS),
    tolerance |_| Tolerance::Summed,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let frame = Frame::of(o)?;
    let (rows, width, side) = (p.rows as usize, p.width as usize, p.side as usize);
    let inputs = p.tap_groups as usize * 32;
    let pixels = frame.rows as usize * width;
    let bias = o.values("bias", p.row0 as usize, rows)?;
    let weights = o.weight(p.rows)?;
    if weights.cols != side * side * inputs {
        bail!(
            Internal,
            "{} columns of 'w', expected {side}² taps of {inputs}",
            weights.cols
        );
    }
    let x = o.all_floats("x")?;
    let source = |pixel: usize, (dy, dx): (isize, isize)| -> Option<&[f32]> {
        let inside = |at: usize, d: isize, end: usize| at.checked_add_signed(d).filter(|&at| at < end);
        let row = inside(frame.first as usize + pixel / width, dy, frame.height as usize)?;
        let column = inside(pixel % width, dx, width)?;
        let (row, column) = (row >> p.doubled, column >> p.doubled);
        let at = (row.checked_sub(frame.held as usize)? * (width >> p.doubled) + column) * inputs;
        x.get(at..at + inputs)
    };
    let by_row = (0..rows).into_par_iter().map(|r| {
        let mut w = vec![0.0; weights.cols];
        weights.row(r, &mut w);
        let one = |pixel: usize| output(&w, inputs, side, |dy, dx| source(pixel, (dy, dx))) + bias[r];
        (0..pixels).map(one).collect()
    });
    let by_row: Vec<Vec<f64>> = by_row.collect();
    drop(weights);
    for pixel in 0..pixels {
        let values: Vec<f64> = by_row.iter().map(|values| values[pixel]).collect();
        let at = pixel * p.y_stride as usize * 4 + p.row0 as usize;
        match p.adds {
            0 => o.store_vectors("y", at, values)?,
            _ => o.add("y", at, &values)?,
        }
    }
    Ok(())
}
