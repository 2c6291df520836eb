//! The sampler: noise levels, start noise, guidance and steps.
//!
//! All of it runs on the host in f32, as the sampler of diffusers does: it takes a few operations for each element of the latents,
//! which are a thousandth of the activations of one block of the network.

use super::config::SchedulerConfig;
use crate::error::{Result, bail};

/// The most steps of a schedule.
pub const MAX_STEPS: usize = 1000;

/// The noise levels of `steps` steps, and 0. `shift` replaces that of the schedule. `channels` are those of the latents: where
/// the shift depends on the length of the sequence, the pipeline of diffusers passes this number instead of the length
/// (diffusers issue 12913), and so do images that are compared with it.
///
/// Source: FlowMatchEulerDiscreteScheduler of diffusers. Errors: `Usage` for a number of steps or a shift that no schedule has.
pub fn sigmas(config: &SchedulerConfig, steps: usize, shift: Option<f64>, channels: usize) -> Result<Vec<f32>> {
    if !(1..=MAX_STEPS).contains(&steps) {
        bail!(Usage, "{steps} steps, expected 1 to {MAX_STEPS}");
    }
    if let Some(shift) = shift.filter(|shift| !(shift.is_finite() && *shift > 0.0)) {
        bail!(Usage, "a shift of {shift}, expected a finite number above 0");
    }
    let last = 1.0 / steps as f64;
    let level = |i: usize| match steps {
        1 => 1.0,
        _ => 1.0 + (last - 1.0) * i as f64 / (steps - 1) as f64,
    };
    let shifted = |u: f64| match (&config.dynamic, shift) {
        (Some(dynamic), None) => {
            let slope = (dynamic.max_shift - dynamic.base_shift) / (dynamic.max_len - dynamic.base_len);
            let mu = dynamic.base_shift + slope * (channels as f64 - dynamic.base_len);
            let factor = if dynamic.exponential { mu.exp() } else { mu };
            factor / (factor + 1.0 / u - 1.0)
        }
        (_, shift) => {
            let shift = shift.unwrap_or(config.shift);
            shift * u / (1.0 + (shift - 1.0) * u)
        }
    };
    let mut sigmas: Vec<f32> = (0..steps).map(|i| shifted(level(i)) as f32).collect();
    sigmas.push(0.0);
    if sigmas.iter().any(|sigma| !(0.0..=1.0).contains(sigma)) {
        bail!(Usage, "the shift leads to noise levels outside of 0 to 1");
    }
    Ok(sigmas)
}

/// The sinusoidal embedding of a time in 0 to 1: cosines, then sines.
pub fn time_embedding(time: f32, elements: usize) -> Vec<f32> {
    let half = elements / 2;
    let angle = |i: usize| f64::from(time) * 10_000f64.powf(-(i as f64) / half as f64);
    let cosines = (0..half).map(|i| angle(i).cos() as f32);
    cosines.chain((0..half).map(|i| angle(i).sin() as f32)).collect()
}

/// How the velocities with and without the prompt are combined.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guidance {
    /// Factor of what the prompt changes.
    pub scale: f32,
    /// Whether each row of latents keeps the length that it has with the prompt alone.
    pub normalise: bool,
    /// The share of the steps, from the first on, that are guided.
    pub until: f32,
}

impl Guidance {
    /// Whether step `i` of `steps` is guided.
    pub fn guides(&self, i: usize, steps: usize) -> bool {
        self.scale > 1.0 && (i + 1) as f32 / steps as f32 <= self.until
    }

    /// The guided velocity. A row has `width` elements; a row that is 0 stays 0.
    pub fn velocity(&self, with: &[f32], without: &[f32], width: usize) -> Vec<f32> {
        let mut guided: Vec<f32> = with
            .iter()
            .zip(without)
            .map(|(c, u)| u + self.scale * (c - u))
            .collect();
        if self.normalise {
            let length = |row: &[f32]| row.iter().map(|v| v * v).sum::<f32>().sqrt();
            for (row, with) in guided.chunks_mut(width).zip(with.chunks(width)) {
                let own = length(row);
                if own > 0.0 {
                    let factor = length(with) / own;
                    row.iter_mut().for_each(|v| *v *= factor);
                }
            }
        }
        guided
    }
}

/// One step from a noise level to the next. The velocity points to the image.
pub fn step(latents: &mut [f32], velocity: &[f32], [from, to]: [f32; 2]) {
    let change = -(to - from);
    latents.iter_mut().zip(velocity).for_each(|(x, v)| *x += change * v);
}

/// `count` numbers of a normal distribution: those of `torch.randn` on the CPU with this seed, for 16 or more.
pub fn noise(seed: u64, count: usize) -> Vec<f32> {
    let mut twister = Twister::new(seed as u32);
    // 24 bits of each number are a fraction.
    let mut uniform = |count: usize| -> Vec<f32> {
        let fraction = |word: u32| (word & 0xff_ffff) as f32 / (1 << 24) as f32;
        (0..count).map(|_| fraction(twister.word())).collect()
    };
    let mut values = uniform(count.max(16));
    let whole = values.len() / 16 * 16;
    values[..whole].chunks_exact_mut(16).for_each(normal);
    if whole < values.len() {
        let at = values.len() - 16;
        values[at..].copy_from_slice(&uniform(16));
        normal(&mut values[at..]);
    }
    values.truncate(count);
    values
}

/// Sixteen uniform numbers become normal ones (Box and Muller 1958): the first eight are radii, the others angles.
fn normal(block: &mut [f32]) {
    let (radii, angles) = block.split_at_mut(8);
    for (radius, angle) in radii.iter_mut().zip(angles) {
        let length = (-2.0 * f64::from(1.0 - *radius).ln()).sqrt();
        let turn = std::f64::consts::TAU * f64::from(*angle);
        (*radius, *angle) = ((length * turn.cos()) as f32, (length * turn.sin()) as f32);
    }
}

/// The generator MT19937 (Matsumoto and Nishimura 1998).
struct Twister {
    state: [u32; 624],
    at: usize,
}

impl Twister {
    fn new(seed: u32) -> Twister {
        let mut state = [seed; 624];
        for i in 1..624 {
            let before = state[i - 1];
            state[i] = (before ^ before >> 30)
                .wrapping_mul(1_812_433_253)
                .wrapping_add(i as u32);
        }
        Twister { state, at: 624 }
    }

    fn word(&mut self) -> u32 {
        if self.at == 624 {
            for i in 0..624 {
                let pair = self.state[i] & 0x8000_0000 | self.state[(i + 1) % 624] & 0x7fff_ffff;
                let twist = if pair & 1 == 0 { 0 } else { 0x9908_b0df };
                self.state[i] = self.state[(i + 397) % 624] ^ pair >> 1 ^ twist;
            }
            self.at = 0;
        }
        let mut word = self.state[self.at];
        self.at += 1;
        word ^= word >> 11;
        word ^= word << 7 & 0x9d2c_5680;
        word ^= word << 15 & 0xefc6_0000;
        word ^ word >> 18
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_is_mt19937() {
        let mut twister = Twister::new(5489);
        let last = (0..10_000).map(|_| twister.word()).last();
        assert_eq!(last, Some(4_123_659_995), "the 10000th number of the standard");
    }

    #[test]
    fn guidance_ends_and_keeps_the_length_of_rows() {
        let guidance = Guidance {
            scale: 3.0,
            normalise: true,
            until: 0.5,
        };
        assert!(guidance.guides(1, 4) && !guidance.guides(2, 4));
        // The guided row is (9, 12), the row with the prompt has length 5; a row of zeros stays.
        let with = [3.0, 4.0, 0.0, 0.0];
        let velocity = guidance.velocity(&with, &[0.0; 4], 2);
        assert_eq!(velocity, [3.0, 4.0, 0.0, 0.0]);
    }

    #[test]
    fn one_step_begins_with_all_noise() {
        let config = SchedulerConfig::default();
        assert_eq!(sigmas(&config, 1, None, 16).unwrap(), [1.0, 0.0]);
        for steps in [0, MAX_STEPS + 1] {
            assert!(sigmas(&config, steps, None, 16).is_err());
        }
        assert!(sigmas(&config, 4, Some(0.0), 16).is_err());
    }
}
