//! What a picture is made from, and what is made.

use crate::error::{Result, bail};

/// The system prompt with which the network was trained.
pub const SYSTEM_PROMPT: &str = "You are an assistant designed to generate superior images with the superior degree of \
                                 image-text alignment based on textual prompts or user prompts.";

/// A request for one picture.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageRequest {
    /// What the picture shows.
    pub prompt: String,
    /// What it does not show; used where guidance is.
    pub negative: String,
    /// The text before the prompt.
    pub system: String,
    /// Pixels, a multiple of 16; `None`: the width of the latents, else the size that the network was trained for.
    pub width: Option<u32>,
    /// Pixels, as `width`.
    pub height: Option<u32>,
    /// Denoising steps, 1 to 1000.
    pub steps: u32,
    /// Factor of what the prompt changes, against the negative prompt; up to 1: no guidance.
    pub guidance: f32,
    /// Whether guidance keeps the length of each row of the velocity.
    pub normalise: bool,
    /// The share of the steps, from the first on, that are guided.
    pub guide_until: f32,
    /// Shift of the noise levels; `None`: that of the schedule.
    pub shift: Option<f64>,
    /// Seed of the noise; the noise is that of torch on a CPU.
    pub seed: u64,
    /// Noise to start with, in place of that of the seed.
    pub latents: Option<Latents>,
    /// Steps between pictures of what the denoiser expects; `None`: there are none.
    pub preview_every: Option<u32>,
}

impl Default for ImageRequest {
    fn default() -> ImageRequest {
        ImageRequest {
            prompt: String::new(),
            negative: String::new(),
            system: SYSTEM_PROMPT.to_owned(),
            width: None,
            height: None,
            steps: 30,
            guidance: 4.0,
            normalise: true,
            guide_until: 1.0,
            shift: None,
            seed: 0,
            latents: None,
            preview_every: None,
        }
    }
}

/// Latents: a picture as the denoiser sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct Latents {
    /// Channels.
    pub channels: usize,
    /// An eighth of the picture's height.
    pub height: usize,
    /// An eighth of the picture's width.
    pub width: usize,
    /// The values `[channels, height, width]`.
    pub values: Vec<f32>,
}

/// A picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Pixels of a row.
    pub width: u32,
    /// Rows.
    pub height: u32,
    /// Red, green and blue of each pixel, row by row.
    pub rgb: Vec<u8>,
}

impl Image {
    /// The picture of a decoder's output `[3, height, width]`, in which -1 is black and 1 is full intensity.
    ///
    /// Source: VaeImageProcessor of diffusers. Errors: `NonFinite`; `Internal` for another number of values.
    pub fn of(values: &[f32], width: u32, height: u32) -> Result<Image> {
        let pixels = width as usize * height as usize;
        if values.len() != 3 * pixels {
            bail!(Internal, "{} values for {pixels} pixels", values.len());
        }
        if values.iter().any(|value| !value.is_finite()) {
            bail!(NonFinite, "the decoded picture is not a finite number everywhere");
        }
        let byte = |value: f32| ((value / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0).round_ties_even() as u8;
        let rgb = (0..pixels).flat_map(|pixel| [0, 1, 2].map(|channel| byte(values[channel * pixels + pixel])));
        Ok(Image {
            width,
            height,
            rgb: rgb.collect(),
        })
    }
}
