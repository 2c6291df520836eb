//! Sampling of the next token: settings, and the reference of the device's sampler.
//!
//! Device and host use the same integer arithmetic (described in `shaders/op/sample.wgsl`), so equal logits give equal tokens.
//! Random numbers come from a counter-based generator (Philox 2x32-10, Salmon et al. 2011) keyed by seed and position.

use crate::error::{Result, bail};
use bytemuck::{Pod, Zeroable};
use std::cmp::Ordering;

/// The most stop tokens that the device can check.
pub const MAX_STOPS: usize = 16;
/// Words of the settings buffer before the stop tokens.
const HEAD_WORDS: usize = 16;
/// Words of the settings buffer: settings, the stop tokens, both tables.
pub const SETTINGS_WORDS: usize = HEAD_WORDS + MAX_STOPS + 2048;
/// The flag of a prompt token in the buffer of seen tokens; the other bits count how often a token was sampled.
pub const SEEN_IN_PROMPT: u32 = 1 << 31;

/// Settings of one answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 = greedy.
    pub temperature: f32,
    /// Keeps this many of the most probable tokens; 0 = all.
    pub top_k: u32,
    /// Keeps the smallest set of most probable tokens with this total probability; 1 = all.
    pub top_p: f32,
    /// Keeps tokens whose probability is at least this fraction of the highest; 0 = all.
    pub min_p: f32,
    /// Divides the positive logits of tokens in the prompt or the answer, and multiplies the negative ones; 1 = off.
    pub repeat_penalty: f32,
    /// Subtracted from the logits of tokens in the answer.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token once for each time it occurs in the answer.
    pub frequency_penalty: f32,
    /// Key of the random draws.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 0.7,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.0,
            repeat_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        }
    }
}

/// The head of the settings buffer. A test compares it with `Settings` in `shaders/op/sample.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
struct Head {
    greedy: u32,
    top_k: u32,
    top_p: u32,
    min_mass: u32,
    log2_scale: f32,
    seed_low: u32,
    seed_high: u32,
    stops: u32,
    penalised: u32,
    repeat: f32,
    repeat_inverse: f32,
    presence: f32,
    frequency: f32,
    padding: [u32; 3],
}

impl Sampling {
    /// Always the most probable token.
    pub fn greedy() -> Self {
        Sampling {
            temperature: 0.0,
            ..Sampling::default()
        }
    }

    /// Errors: `Usage` with the value that is out of range.
    pub fn validate(&self) -> Result<()> {
        let Sampling { temperature, top_p, .. } = *self;
        if !(temperature >= 0.0 && temperature.is_finite()) {
            bail!(
                Usage,
                "temperature {temperature}: expected a finite number of at least 0"
            );
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            bail!(Usage, "top-p {top_p}: expected more than 0 and at most 1");
        }
        for (name, value, range) in [
            ("min-p", self.min_p, 0.0..=1.0),
            ("repeat penalty", self.repeat_penalty, 0.01..=100.0),
            ("presence penalty", self.presence_penalty, -100.0..=100.0),
            ("frequency penalty", self.frequency_penalty, -100.0..=100.0),
        ] {
            if !range.contains(&value) {
                bail!(Usage, "{name} {value}: expected {} to {}", range.start(), range.end());
            }
        }
        Ok(())
    }

    /// Whether any penalty applies, so that the sampler must know the tokens seen.
    pub fn penalises(&self) -> bool {
        self.repeat_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// The settings buffer. Errors: `Usage` for invalid values or too many stop tokens.
    pub fn words(&self, stops: &[u32]) -> Result<Vec<u32>> {
        self.validate()?;
        if stops.len() > MAX_STOPS {
            bail!(Usage, "{} stop tokens, expected at most {MAX_STOPS}", stops.len());
        }
        // A temperature this small is greedy. This avoids a division by almost 0.
        let greedy = self.temperature < 1e-4;
        let log2_scale = std::f32::consts::LOG2_E / self.temperature;
        let top_p = (f64::from(self.top_p) * 4294967296.0) as u32;
        let head = Head {
            greedy: u32::from(greedy),
            top_k: self.top_k,
            top_p: if self.top_p >= 1.0 { 0 } else { top_p.max(1) },
            min_mass: (self.min_p as f64 * 2147483648.0) as u32,
            log2_scale: if greedy { 0.0 } else { log2_scale },
            seed_low: self.seed as u32,
            seed_high: (self.seed >> 32) as u32,
            stops: stops.len() as u32,
            penalised: u32::from(self.penalises()),
            repeat: self.repeat_penalty,
            repeat_inverse: 1.0 / self.repeat_penalty,
            presence: self.presence_penalty,
            frequency: self.frequency_penalty,
            padding: [0; 3],
        };
        let mut words: Vec<u32> = bytemuck::cast_slice(&[head]).to_vec();
        words.extend_from_slice(stops);
        words.resize(HEAD_WORDS + MAX_STOPS, 0);
        let table = |step: f64| (0..1024).map(move |i| (2147483648.0 * (-i as f64 * step).exp2()).round() as u32);
        words.extend(table(1.0 / 1024.0));
        words.extend(table(1.0 / 1048576.0));
        Ok(words)
    }
}

/// The result of a sampler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The next token.
    Token(u32),
    /// One of the logits is not a finite number.
    NonFinite,
}

fn head(settings: &[u32]) -> Head {
    bytemuck::pod_read_unaligned(bytemuck::cast_slice(&settings[..HEAD_WORDS]))
}

/// The stop tokens of a settings buffer.
pub fn stops(settings: &[u32]) -> &[u32] {
    let count = (head(settings).stops as usize).min(MAX_STOPS);
    &settings[HEAD_WORDS..HEAD_WORDS + count]
}

/// Whether the sampler counts tokens under these settings.
pub fn counts_tokens(settings: &[u32]) -> bool {
    head(settings).penalised != 0
}

/// The logits after penalties for the tokens in `seen`.
fn penalised(logits: &[f32], head: &Head, seen: &[u32]) -> Vec<f32> {
    let penalise = |(&raw, &seen): (&f32, &u32)| {
        if head.penalised == 0 || seen == 0 {
            return raw;
        }
        let count = seen & !SEEN_IN_PROMPT;
        let once = if count != 0 { head.presence } else { 0.0 };
        let factor = if raw > 0.0 { head.repeat_inverse } else { head.repeat };
        raw.mul_add(factor, -head.frequency.mul_add(count as f32, once))
    };
    logits.iter().zip(seen).map(penalise).collect()
}

/// The reference sampler. `settings` are those of [`Sampling::words`]; `seen` has one word per logit; `position` is that of the
/// token to sample.
pub fn choose(logits: &[f32], settings: &[u32], seen: &[u32], position: u32) -> Choice {
    let head = head(settings);
    let logits = penalised(logits, &head, seen);
    if logits.iter().any(|logit| !logit.is_finite()) || logits.is_empty() {
        return Choice::NonFinite;
    }
    let mut best = 0;
    for (i, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = i;
        }
    }
    if head.greedy != 0 {
        return Choice::Token(best as u32);
    }
    let (top_k, top_p, min_mass) = (head.top_k as usize, head.top_p, head.min_mass);
    let scale = head.log2_scale;
    let tables = &settings[HEAD_WORDS + MAX_STOPS..];
    let mass = |logit: f32| -> u32 {
        let fixed = (((logits[best] - logit) * scale).min(40.0) * 1048576.0) as u32;
        let [coarse, fine] = [fixed >> 10 & 1023, 1024 + (fixed & 1023)].map(|at| u64::from(tables[at as usize]));
        let product = (coarse * fine) >> 31;
        (product as u32).checked_shr(fixed >> 20).unwrap_or(0)
    };
    // By descending probability, then by ascending index.
    let mut order: Vec<usize> = (0..logits.len()).collect();
    let descending = |a: usize, b: usize| logits[b].partial_cmp(&logits[a]).unwrap_or(Ordering::Equal);
    order.sort_by(|&a, &b| descending(a, b).then(a.cmp(&b)));
    if top_k != 0 {
        order.truncate(top_k);
    }
    let total = |order: &[usize]| {
        let masses = order.iter().map(|&i| mass(logits[i]));
        masses.filter(|&m| m >= min_mass).map(u64::from).sum::<u64>()
    };
    let scaled = |total: u64, fraction: u32| ((u128::from(total) * u128::from(fraction)) >> 32) as u64;
    if top_p != 0 {
        let wanted = scaled(total(&order), top_p).max(1);
        let mut reached = 0;
        let mut keep = 0;
        while keep < order.len() && reached < wanted {
            reached += u64::from(mass(logits[order[keep]]));
            keep += 1;
        }
        order.truncate(keep);
    }
    order.sort_unstable();
    let target = scaled(total(&order), random_bits(head.seed_low, head.seed_high, position));
    let mut sum = 0;
    for &i in &order {
        let m = mass(logits[i]);
        if m < min_mass {
            continue;
        }
        sum += u64::from(m);
        if target < sum {
            return Choice::Token(i as u32);
        }
    }
    Choice::Token(best as u32)
}

/// The first word of Philox 2x32-10 with counter (position, seed_high) and key seed_low.
fn random_bits(seed_low: u32, seed_high: u32, position: u32) -> u32 {
    let (mut a, mut b, mut key) = (position, seed_high, seed_low);
    for _ in 0..10 {
        let product = u64::from(a) * 0xD256_D193;
        (a, b) = ((product >> 32) as u32 ^ key ^ b, product as u32);
        key = key.wrapping_add(0x9E37_79B9);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_matches_the_published_vectors() {
        // Random123's known answers for philox2x32 with 10 rounds: counter, key -> first word.
        assert_eq!(random_bits(0, 0, 0), 0xff1dae59);
        assert_eq!(random_bits(u32::MAX, u32::MAX, u32::MAX), 0x2c3f628b);
        assert_eq!(random_bits(0x13198a2e, 0x85a308d3, 0x243f6a88), 0xdd7ce038);
    }

    #[test]
    fn draws_follow_the_distribution() {
        let logits = [1.0f32, 2.0, 0.0, -1.0];
        let settings = Sampling {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 7,
            ..Sampling::default()
        }
        .words(&[])
        .unwrap();
        let n = 40_000;
        let mut counts = [0f64; 4];
        for position in 0..n {
            match choose(&logits, &settings, &[0; 8], position) {
                Choice::Token(token) => counts[token as usize] += 1.0,
                Choice::NonFinite => unreachable!(),
            }
        }
        let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        let chi2: f64 = logits
            .iter()
            .zip(counts)
            .map(|(&l, count)| {
                let wanted = f64::from(l).exp() / sum * f64::from(n);
                (count - wanted).powi(2) / wanted
            })
            .sum();
        // The 99.9 % quantile for 3 degrees of freedom.
        assert!(chi2 < 16.27, "{chi2}");
    }

    #[test]
    fn cuts_keep_the_most_probable_tokens() {
        let logits = [3.0f32, 2.0, 2.0, 1.0, -5.0];
        let drawn = |sampling: Sampling| {
            let settings = sampling.words(&[]).unwrap();
            let tokens = (0..2000).map(|position| match choose(&logits, &settings, &[0; 8], position) {
                Choice::Token(token) => token,
                Choice::NonFinite => unreachable!(),
            });
            tokens
                .collect::<std::collections::BTreeSet<_>>()
                .into_iter()
                .collect::<Vec<_>>()
        };
        let all = Sampling {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 1,
            ..Sampling::default()
        };
        assert_eq!(
            drawn(Sampling {
                top_k: 2,
                ..all.clone()
            }),
            [0, 1]
        );
        // Probabilities 0.535, 0.197, 0.197, 0.072, 0.0002: the first two reach 0.7.
        assert_eq!(
            drawn(Sampling {
                top_p: 0.7,
                ..all.clone()
            }),
            [0, 1]
        );
        assert_eq!(
            drawn(Sampling {
                min_p: 0.3,
                ..all.clone()
            }),
            [0, 1, 2]
        );
        assert_eq!(
            drawn(Sampling {
                temperature: 0.0,
                ..all.clone()
            }),
            [0]
        );
        assert!(drawn(all).len() >= 4);
    }

    #[test]
    fn non_finite_logits_are_not_a_token() {
        let settings = Sampling::greedy().words(&[]).unwrap();
        assert_eq!(choose(&[0.0, f32::NAN], &settings, &[0; 8], 0), Choice::NonFinite);
        assert_eq!(choose(&[0.0, f32::INFINITY], &settings, &[0; 8], 0), Choice::NonFinite);
        assert_eq!(
            choose(&[f32::NEG_INFINITY; 3], &settings, &[0; 8], 0),
            Choice::NonFinite
        );
        assert_eq!(choose(&[1.0, 3.0, 3.0], &settings, &[0; 8], 0), Choice::Token(1));
        assert!(
            Sampling {
                top_p: f32::NAN,
                ..Sampling::default()
            }
            .words(&[])
            .is_err()
        );
    }

    #[test]
    fn penalties_move_seen_tokens_only() {
        let logits = [2.0f32, 1.9, -1.0, -1.1];
        let chosen = |sampling: Sampling, seen: [u32; 4]| {
            let settings = sampling.words(&[]).unwrap();
            choose(&logits, &settings, &seen, 0)
        };
        let greedy = Sampling::greedy();
        let repeat = Sampling {
            repeat_penalty: 1.2,
            ..greedy.clone()
        };
        assert_eq!(chosen(repeat.clone(), [0; 4]), Choice::Token(0));
        assert_eq!(chosen(repeat.clone(), [SEEN_IN_PROMPT, 0, 0, 0]), Choice::Token(1));
        assert_eq!(chosen(repeat, [SEEN_IN_PROMPT, 1, 0, 0]), Choice::Token(0));
        let presence = Sampling {
            presence_penalty: 0.2,
            ..greedy.clone()
        };
        // Tokens of the prompt do not count as tokens of the answer.
        assert_eq!(chosen(presence.clone(), [SEEN_IN_PROMPT, 0, 0, 0]), Choice::Token(0));
        assert_eq!(chosen(presence, [5, 0, 0, 0]), Choice::Token(1));
        let frequency = Sampling {
            frequency_penalty: 0.06,
            ..greedy
        };
        assert_eq!(chosen(frequency.clone(), [1, 0, 0, 0]), Choice::Token(0));
        assert_eq!(chosen(frequency, [2, 0, 0, 0]), Choice::Token(1));
    }

    #[test]
    fn the_head_has_the_fields_that_the_shader_reads() {
        let shader = include_str!("../shaders/op/sample.wgsl");
        let fields = shader
            .split("struct Settings {")
            .nth(1)
            .unwrap()
            .split("stop_tokens")
            .next()
            .unwrap();
        let names: Vec<_> = fields
            .lines()
            .filter_map(|line| line.trim().split_once(':'))
            .map(|(name, _)| name)
            .collect();
        let ours = "greedy top_k top_p min_mass log2_scale seed_low seed_high stops penalised repeat repeat_inverse presence frequency";
        assert_eq!(names.join(" "), ours);
        let debug = format!("{:?}", Head::default());
        assert!(ours.split(' ').all(|name| debug.contains(&format!("{name}: "))));
        // `stop_tokens` is aligned to 16 bytes.
        assert_eq!(HEAD_WORDS * 4, names.len().next_multiple_of(4) * 4);
        assert_eq!(size_of::<Head>(), HEAD_WORDS * 4);
    }
}
