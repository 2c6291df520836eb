//! The flags of `imagine`, and what they mean together.

use crate::cli::args::{AdapterArgs, QuantArgs, positive, whole};
use crate::cli::context::{Result, usage};
use crate::cli::model::ModelArgs;
use crate::cli::sampling::random_seed;
use clap::ValueEnum;
use cmf_gpu::image::{ImageRequest, Latents, SYSTEM_PROMPT};
use std::path::{Path, PathBuf};

/// Most pictures of one call.
const MAX_BATCH: u32 = 999;

/// Most steps of a picture.
const MAX_STEPS: u32 = 1000;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub quant: QuantArgs,
    /// What the picture shows
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prompt: String,
    /// The PNG file to write; of several pictures NAME-1.png, NAME-2.png, ...
    #[arg(short, long, value_name = "NAME.png", value_parser = picture)]
    pub out: PathBuf,
    /// What the picture does not show
    #[arg(short, long, value_name = "TEXT", default_value = "", allow_hyphen_values = true)]
    pub negative: String,
    /// Width in pixels, a multiple of 16 [default: the size that the model was trained for]
    #[arg(short = 'W', long, value_name = "PIXELS", value_parser = positive::<u32>, allow_negative_numbers = true)]
    pub width: Option<u32>,
    /// Height in pixels, a multiple of 16 [default: the size that the model was trained for]
    #[arg(short = 'H', long, value_name = "PIXELS", value_parser = positive::<u32>, allow_negative_numbers = true)]
    pub height: Option<u32>,
    /// Denoising steps
    #[arg(long, default_value_t = 30, value_parser = steps, allow_negative_numbers = true)]
    pub steps: u32,
    /// How strongly the picture follows the prompt; up to 1 = the negative prompt is not used, which takes half the time
    #[arg(
        long,
        visible_alias = "cfg-scale",
        value_name = "G",
        default_value_t = 4.0,
        value_parser = guidance,
        allow_negative_numbers = true
    )]
    pub cfg: f32,
    /// Whether guidance keeps the length of each row of the velocity
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub cfg_norm: Switch,
    /// The part of the steps after which guidance ends, 0 to 1
    #[arg(long, value_name = "R", default_value_t = 1.0, value_parser = part, allow_negative_numbers = true)]
    pub cfg_trunc: f32,
    /// Shift of the noise levels [default: the schedule of the file]
    #[arg(long, visible_alias = "flow-shift", value_name = "S", value_parser = shift, allow_negative_numbers = true)]
    pub shift: Option<f64>,
    /// The system prompt, before the prompt [default: the one the model was trained with]
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub system: Option<String>,
    /// Seed of the noise; the same seed gives the same noise as torch on a CPU [default: random]
    #[arg(long, value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// Number of pictures, with the seeds SEED, SEED + 1, ...
    #[arg(short, long, visible_alias = "batch-count", value_name = "N", default_value_t = 1, value_parser = batch, allow_negative_numbers = true)]
    pub batch: u32,
    /// Writes a preview after every N steps
    #[arg(long, value_name = "N", value_parser = positive::<u32>, allow_negative_numbers = true)]
    pub preview_every: Option<u32>,
    /// The file of the preview; of several pictures FILE-1.png, FILE-2.png, ... [default: NAME-preview.png]
    #[arg(long, value_name = "FILE.png", requires = "preview_every", value_parser = picture)]
    pub preview_path: Option<PathBuf>,
    /// Starts with the noise in this safetensors file, `latents [channels, height / 8, width / 8]`
    #[arg(long, value_name = "FILE")]
    pub init_latents: Option<PathBuf>,
    /// Writes the result of the last step, before it is decoded; of several pictures FILE-1, FILE-2, ... [default:
    /// NAME-latents.safetensors, if decoding fails]
    #[arg(long, value_name = "FILE")]
    pub save_latents: Option<PathBuf>,
    /// Leaves prompt and settings out of the PNG file
    #[arg(long)]
    pub no_metadata: bool,
    /// Flags of other programs that make pictures from pictures.
    #[arg(short = 'i', long, aliases = ["strength", "mask", "control-image"], hide = true, value_name = "VALUE")]
    pub init_img: Option<String>,
    #[command(flatten)]
    pub adapter: AdapterArgs,
}

/// On or off.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    On,
    Off,
}

/// The file name of a picture.
fn picture(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    let is_png = path.extension().is_some_and(|kind| kind.eq_ignore_ascii_case("png"));
    is_png
        .then_some(path)
        .ok_or_else(|| "expected a name that ends with .png, the only format that is written".into())
}

fn steps(text: &str) -> Result<u32, String> {
    up_to(MAX_STEPS, text)
}

fn batch(text: &str) -> Result<u32, String> {
    up_to(MAX_BATCH, text)
}

fn up_to(most: u32, text: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|number| (1..=most).contains(number));
    number.ok_or_else(|| format!("expected a whole number from 1 to {most}"))
}

fn guidance(text: &str) -> Result<f32, String> {
    let number = text.parse().ok().filter(|number| (0.0..=1000.0).contains(number));
    number.ok_or_else(|| "expected a number from 0 to 1000".into())
}

fn part(text: &str) -> Result<f32, String> {
    let number = text.parse().ok().filter(|number| (0.0..=1.0).contains(number));
    number.ok_or_else(|| "expected a number from 0 to 1".into())
}

fn shift(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| *number > 0.0 && *number <= 1000.0);
    number.ok_or_else(|| "expected a number above 0 and at most 1000".into())
}

/// Where everything goes.
pub struct Outputs {
    /// The pictures.
    pub pictures: Vec<PathBuf>,
    /// The latents of each picture, if they are asked for.
    pub latents: Vec<PathBuf>,
    /// The preview of each picture, if previews are asked for.
    pub previews: Vec<PathBuf>,
}

impl Args {
    /// Errors: `Usage` for flags that contradict each other.
    pub fn check(&self) -> Result<()> {
        if self.init_img.is_some() {
            return Err(usage(
                "a picture cannot be made from a picture: files of this format have no encoder for pictures",
            ));
        }
        if self.init_latents.is_some() && self.batch > 1 {
            return Err(usage(
                "--init-latents replaces the noise, so -b would make the same picture again",
            ));
        }
        Ok(())
    }

    /// The request for the first picture, with these latents in place of noise.
    pub fn request(&self, latents: Option<Latents>) -> ImageRequest {
        let system = self.system.clone().unwrap_or_else(|| SYSTEM_PROMPT.into());
        ImageRequest {
            prompt: self.prompt.clone(),
            negative: self.negative.clone(),
            system,
            width: self.width,
            height: self.height,
            steps: self.steps,
            guidance: self.cfg,
            normalise: self.cfg_norm == Switch::On,
            guide_until: self.cfg_trunc,
            shift: self.shift,
            // The generator uses 32 bits of a seed, so no more are drawn.
            seed: self.seed.unwrap_or_else(|| random_seed() & u64::from(u32::MAX)),
            latents,
            preview_every: self.preview_every,
        }
    }

    /// Where everything goes. Errors: `Usage` if two outputs have one path.
    pub fn outputs(&self) -> Result<Outputs> {
        let numbered = |path: &PathBuf| match self.batch {
            1 => vec![path.clone()],
            count => (1..=count)
                .map(|number| with_suffix(path, &format!("-{number}")))
                .collect(),
        };
        let preview = self.preview_every.map(|_| {
            let default = || with_suffix(&self.out, "-preview");
            self.preview_path.clone().unwrap_or_else(default)
        });
        let outputs = Outputs {
            pictures: numbered(&self.out),
            latents: self.save_latents.as_ref().map(numbered).unwrap_or_default(),
            previews: preview.as_ref().map(numbered).unwrap_or_default(),
        };
        let mut all: Vec<&PathBuf> = outputs.all().collect();
        all.sort();
        match all.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(usage(format!("{}: two outputs have this path", pair[0].display()))),
            None => Ok(outputs),
        }
    }
}

impl Outputs {
    /// Every path.
    pub fn all(&self) -> impl Iterator<Item = &PathBuf> {
        self.pictures.iter().chain(&self.latents).chain(&self.previews)
    }

    /// The latents of a picture that cannot be decoded, if none were asked for.
    pub fn rescued(&self, index: usize) -> PathBuf {
        with_suffix(&self.pictures[index], "-latents").with_extension("safetensors")
    }
}

/// A path with this at the end of its name, before the extension.
fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default();
    let mut name = stem.to_owned();
    name.push(suffix);
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_outputs() {
        let suffixed = |path: &str| with_suffix(Path::new(path), "-2").to_str().unwrap().to_owned();
        assert_eq!(suffixed("a/fox.png"), "a/fox-2.png");
        assert_eq!(suffixed("a.b/fox"), "a.b/fox-2");
        assert!(picture("a.PNG").is_ok() && picture("a.jpg").is_err() && picture("png").is_err());
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        assert_eq!((guidance("4"), guidance("0"), part("1")), (Ok(4.0), Ok(0.0), Ok(1.0)));
        for text in ["-1", "nan", "inf", "", "x"] {
            assert!(guidance(text).is_err() && part(text).is_err() && shift(text).is_err());
            assert!(steps(text).is_err() && batch(text).is_err());
        }
        assert!(part("1.01").is_err() && shift("0").is_err() && steps("0").is_err() && steps("1001").is_err());
    }
}
