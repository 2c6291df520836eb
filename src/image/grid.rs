//! Positions of tokens: their rotation, and the patches of latents that they stand for.
//!
//! These are computed on the host: they take one operation or so for each element of the latents, and no weights.

use super::config::DitConfig;
use crate::error::{Result, bail};

/// Pixels of one side of a latent.
pub const LATENT_PIXELS: usize = 8;
/// The sides of images are multiples of this: of the pixels of a patch of 2 × 2 latents.
pub const SIDE_MULTIPLE: u32 = 16;
/// Base of the rotary frequencies.
const THETA: f64 = 10_000.0;

/// The tokens of an image: rows and columns of patches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Rows of patches.
    pub rows: usize,
    /// Columns of patches.
    pub cols: usize,
}

impl Grid {
    /// The grid of an image of this width and height in pixels.
    ///
    /// Errors: `Usage` for a side that is not a multiple of 16, with the nearest that are, and for one that is longer than the
    /// network has positions.
    pub fn new(config: &DitConfig, width: u32, height: u32) -> Result<Grid> {
        let side = |what: &str, pixels: u32, axis: usize| -> Result<usize> {
            let (patch, most) = (SIDE_MULTIPLE, config.axes_lens[axis]);
            if pixels == 0 || !pixels.is_multiple_of(patch) {
                let below = (pixels / patch * patch).max(patch);
                let above = (pixels / patch).saturating_add(1).saturating_mul(patch);
                let nearest = match below < pixels {
                    true => format!("{below} and {above}"),
                    false => below.to_string(),
                };
                bail!(
                    Usage,
                    "the {what} of an image is a multiple of {patch}, found {pixels}; the nearest is {nearest}"
                );
            }
            let patches = (pixels / patch) as usize;
            if patches > most {
                bail!(
                    Usage,
                    "the {what} is {pixels} pixels, the network has positions for at most {}",
                    most * patch as usize
                );
            }
            Ok(patches)
        };
        Ok(Grid {
            rows: side("height", height, 1)?,
            cols: side("width", width, 2)?,
        })
    }

    /// Tokens of the image.
    pub fn tokens(&self) -> usize {
        self.rows * self.cols
    }

    /// Height and width of the latents.
    pub fn latents(&self, config: &DitConfig) -> [usize; 2] {
        [self.rows * config.patch, self.cols * config.patch]
    }

    /// Latents `[channels, height, width]` as the patches of tokens, each in the order of row, column, channel.
    pub fn patches(&self, config: &DitConfig, latents: &[f32]) -> Vec<f32> {
        let mut patches = vec![0.0; self.tokens() * padded(config)];
        self.each(config, |latent, element| patches[element] = latents[latent]);
        patches
    }

    /// The latents that patches, as [`Grid::patches`] returns them, stand for.
    pub fn unpatched(&self, config: &DitConfig, patches: &[f32]) -> Vec<f32> {
        let mut latents = vec![0.0; self.tokens() * config.patch_elements()];
        self.each(config, |latent, element| latents[latent] = patches[element]);
        latents
    }

    /// Calls with the index of every latent and of its element in the rows of patches.
    fn each(&self, config: &DitConfig, mut pair: impl FnMut(usize, usize)) {
        let (patch, channels) = (config.patch, config.channels);
        let [height, width] = self.latents(config);
        for channel in 0..channels {
            for y in 0..height {
                for x in 0..width {
                    let token = y / patch * self.cols + x / patch;
                    let element = (y % patch * patch + x % patch) * channels + channel;
                    pair((channel * height + y) * width + x, token * padded(config) + element);
                }
            }
        }
    }

    /// Cosines and sines of the image's tokens, then of the caption's: token i of the caption is at (i, 0, 0), an image token at
    /// (length of the caption, row, column).
    ///
    /// Errors: `Usage` for a caption that is longer than the network has positions.
    pub fn table(&self, config: &DitConfig, caption: usize) -> Result<Vec<f32>> {
        check_caption(config, caption)?;
        let mut table = Vec::new();
        for row in 0..self.rows {
            for col in 0..self.cols {
                rotation(config, [caption, row, col], &mut table);
            }
        }
        table.extend(caption_table(config, caption)?);
        Ok(table)
    }
}

/// Elements of a row of patches in its buffer.
fn padded(config: &DitConfig) -> usize {
    config.patch_elements().next_multiple_of(32)
}

/// Cosines and sines of the tokens of a caption. Errors: as [`Grid::table`].
pub fn caption_table(config: &DitConfig, caption: usize) -> Result<Vec<f32>> {
    check_caption(config, caption)?;
    let mut table = Vec::new();
    (0..caption).for_each(|i| rotation(config, [i, 0, 0], &mut table));
    Ok(table)
}

/// Errors: `Usage` for a caption that is longer than the network has positions.
pub fn check_caption(config: &DitConfig, caption: usize) -> Result<()> {
    let most = config.axes_lens[0];
    // The image's own position on this axis follows the caption.
    if caption >= most {
        bail!(
            Usage,
            "the prompt has {caption} tokens, the network has positions for at most {}",
            most.saturating_sub(1)
        );
    }
    Ok(())
}

/// Adds cosine and sine of each pair of a head at a position, in turns. Angles are computed in f64, as diffusers does. A row is
/// exactly as long as a head.
fn rotation(config: &DitConfig, position: [usize; 3], table: &mut Vec<f32>) {
    for (dim, position) in config.axes_dim.into_iter().zip(position) {
        for pair in 0..dim / 2 {
            let angle = position as f64 * THETA.powf(-2.0 * pair as f64 / dim as f64);
            table.extend([angle.cos() as f32, angle.sin() as f32]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    fn config() -> DitConfig {
        DitConfig {
            hidden: 32,
            heads: 2,
            kv_heads: 1,
            layers: 1,
            refiners: 0,
            patch: 2,
            channels: 3,
            caption: 8,
            norm_eps: 1e-5,
            axes_dim: [4, 6, 6],
            axes_lens: [10, 4, 4],
            sample_size: 8,
        }
    }

    #[test]
    fn sizes_are_multiples_of_16_within_the_positions() {
        let config = config();
        let grid = Grid::new(&config, 48, 64).unwrap();
        assert_eq!((grid.rows, grid.cols), (4, 3));
        for (width, height, text) in [
            (50, 64, "nearest is 48 and 64"),
            (0, 64, "nearest is 16"),
            (64, 80, "at most 64"),
        ] {
            let err = Grid::new(&config, width, height).unwrap_err();
            assert!(err.kind == Kind::Usage && err.message.contains(text), "{err}");
        }
    }

    #[test]
    fn patches_are_in_the_order_of_row_column_channel_and_go_back() {
        let config = config();
        let grid = Grid { rows: 2, cols: 3 };
        let latents: Vec<f32> = (0..3 * 4 * 6).map(|i| i as f32).collect();
        let patches = grid.patches(&config, &latents);
        // Token (1, 2), element (dy 1, dx 0, channel 2) is latent (2, 3, 4).
        assert_eq!(patches[5 * 32 + 2 * 3 + 2], (2 * 24 + 3 * 6 + 4) as f32);
        assert_eq!(grid.unpatched(&config, &patches), latents);
    }

    #[test]
    fn a_caption_leaves_a_position_for_the_image() {
        assert!(caption_table(&config(), 9).is_ok());
        assert_eq!(caption_table(&config(), 10).unwrap_err().kind, Kind::Usage);
    }
}
