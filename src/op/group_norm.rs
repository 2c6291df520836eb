//! Normalises the channels of an image by the mean and deviation of their group.

use super::define::*;
use super::frame::Frame;
use cmf_kernels_ref::op::glu::silu;

operator! {
    group_norm
    params {
        vectors: u32 = "Vectors of 4 channels.",
        pixel_stride: u32 = "Vectors of 4 from one pixel to the next.",
        width: u32,
        silu: u32 = "1 = the result is silu of the normalised value.",
    }
    bindings {
        read frame: array<u32>, x: array<vec4<f32>>, stats: array<vec4<f32>>, g: array<vec4<f32>>,
            bias: array<vec4<f32>>;
        write y: array<vec4<f32>>;
    }
    threads Some(64),
    grid |_| Grid::Workgroups(1, 64),
    tolerance |_| Tolerance::Exponential,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let pixels = (Frame::of(o)?.rows * p.width) as usize;
    let (channels, stride) = (p.vectors as usize * 4, p.pixel_stride as usize * 4);
    let stats = o.values("stats", 0, 2 * channels)?;
    let (g, bias) = (o.values("g", 0, channels)?, o.values("bias", 0, channels)?);
    for pixel in 0..pixels {
        let x = o.values("x", pixel * stride, channels)?;
        let normed = |(c, x): (usize, &f64)| {
            let v = (x - stats[c]) * stats[channels + c] * g[c] + bias[c];
            if p.silu == 1 { silu(v) } else { v }
        };
        let y: Vec<f64> = x.iter().enumerate().map(normed).collect();
        o.store("y", pixel * stride, &y)?;
    }
    Ok(())
}
