//! Mean and deviation of each channel, for every row of an image.

use super::define::*;
use super::frame::Frame;
use cmf_kernels_ref::op::layer_norm::moments;

operator! {
    channel_stats
    params {
        vectors: u32 = "Vectors of 4 channels.",
        pixel_stride: u32 = "Vectors of 4 from one pixel to the next.",
        width: u32,
    }
    bindings {
        read frame: array<u32>, x: array<vec4<f32>>;
        write partials: array<vec4<f32>>;
    }
    threads Some(64),
    grid |p| Grid::Workgroups(p.vectors.div_ceil(16), p.width),
    tolerance |_| Tolerance::Summed,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let frame = Frame::of(o)?;
    let (width, channels, stride) = (p.width as usize, p.vectors as usize * 4, p.pixel_stride as usize * 4);
    for row in 0..frame.rows as usize {
        let x = o.floats("x", row * width * stride, (width - 1) * stride + channels)?;
        let of = |channel: usize| moments((0..width).map(move |pixel| f64::from(x[pixel * stride + channel])));
        let (means, variances): (Vec<f64>, Vec<f64>) = (0..channels).map(of).unzip();
        let squares = variances.iter().map(|variance| variance * width as f64);
        let values: Vec<f64> = means.iter().copied().chain(squares).collect();
        o.store("partials", (frame.first as usize + row) * 2 * channels, &values)?;
    }
    Ok(())
}
