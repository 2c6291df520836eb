//! Mean and deviation of groups of channels over an image, from those of each channel in each row.

use super::define::*;
use super::frame::Frame;

operator! {
    group_merge
    params {
        channels: u32 = "Channels of the image.",
        groups: u32 = "Groups of channels.",
        width: u32,
        eps: f32 = "Added to the variance.",
    }
    bindings {
        read frame: array<u32>, partials: array<f32>;
        write stats: array<f32>;
    }
    threads Some(64),
    grid |p| Grid::Workgroups(p.groups, 0),
    tolerance |_| Tolerance::Summed,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let height = Frame::of(o)?.height as usize;
    let (stored, width) = (p.channels.next_multiple_of(4) as usize, f64::from(p.width));
    let members = (p.channels / p.groups.max(1)) as usize;
    for group in 0..p.groups as usize {
        let channels = group * members..(group + 1) * members;
        let partials = o.values("partials", 0, height * 2 * stored)?;
        let places = (0..height).flat_map(|row| channels.clone().map(move |channel| row * 2 * stored + channel));
        let count = (height * members) as f64;
        let mean = places.clone().map(|at| partials[at]).sum::<f64>() / count;
        // Sums of squares around each mean, moved to the mean of all.
        let squares = places.map(|at| partials[at + stored] + width * (partials[at] - mean).powi(2));
        let variance = squares.sum::<f64>() / (count * width);
        let factor = 1.0 / (variance + f64::from(p.eps)).sqrt();
        o.store("stats", channels.start, &vec![mean; members])?;
        o.store("stats", stored + channels.start, &vec![factor; members])?;
    }
    Ok(())
}
