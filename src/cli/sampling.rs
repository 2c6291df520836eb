//! Flags of sampling and speculation.

use super::args::{parsed, whole};
use cmf_gpu::Result;
use cmf_gpu::options::{Sampling, Speculation};
use std::hash::{BuildHasher, Hasher};

/// How tokens are chosen. Flags that are not given leave the setting to the model.
#[derive(clap::Args)]
pub struct SamplingArgs {
    /// Temperature, 0 = greedy
    #[arg(long, visible_alias = "temperature", allow_negative_numbers = true)]
    temp: Option<f32>,
    /// Samples from this many of the most probable tokens, 0 = all
    #[arg(long, value_parser = whole::<u32>, allow_negative_numbers = true)]
    top_k: Option<u32>,
    /// Samples from the most probable tokens that together have this probability
    #[arg(long, allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Samples from tokens with at least this share of the highest probability
    #[arg(long, allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Seed of the random numbers; -1 = random [default: random]
    #[arg(long, value_parser = seed, allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// Always chooses the most probable token
    #[arg(long, conflicts_with = "temp")]
    greedy: bool,
    /// Makes tokens of the prompt and the answer less probable by this factor; 1 = off
    #[arg(long, visible_alias = "rep-penalty", allow_negative_numbers = true)]
    repeat_penalty: Option<f32>,
    /// Subtracted from the logits of tokens in the answer; 0 = off
    #[arg(long, allow_negative_numbers = true)]
    presence_penalty: Option<f32>,
    /// Subtracted from the logit of a token for each time it is in the answer; 0 = off
    #[arg(long, allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,
    /// Speculative decoding, which never changes the answer: auto = with the model's draft head while that is faster; off;
    /// or a number of drafts per step, from the draft head or from the conversation
    #[arg(long, default_value = "auto", value_parser = parsed::<Speculation>)]
    pub spec: Speculation,
}

impl SamplingArgs {
    /// The settings: flags, else the model's own, else the defaults of this program. Errors: `Usage`.
    pub fn settings(&self, defaults: &Sampling) -> Result<Sampling> {
        let sampling = Sampling {
            temperature: match self.greedy {
                true => 0.0,
                false => self.temp.unwrap_or(defaults.temperature),
            },
            top_k: self.top_k.unwrap_or(defaults.top_k),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repeat_penalty: self.repeat_penalty.unwrap_or(defaults.repeat_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(defaults.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            seed: self.seed.unwrap_or_else(random_seed),
        };
        sampling.validate()?;
        Ok(sampling)
    }
}

/// A seed; -1 is a random one.
fn seed(text: &str) -> Result<u64, String> {
    match text {
        "-1" => Ok(random_seed()),
        _ => whole(text).map_err(|err| format!("{err}, or -1 for a random one")),
    }
}

/// A random number, from the keys that the standard library draws for hash tables.
pub fn random_seed() -> u64 {
    std::hash::RandomState::new().build_hasher().finish()
}
