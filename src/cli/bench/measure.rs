//! The measurements of `bench`: prefill and decode of a session.

use crate::cli::context::{Result, interrupted, usage};
use cmf_gpu::Cancel;
use cmf_gpu::graph::Counters;
use cmf_gpu::lm::ProgramKind;
use cmf_gpu::lm::run::{Generation, Session};
use cmf_gpu::options::Sampling;
use serde::Serialize;
use std::ops::ControlFlow;
use std::time::Instant;

/// A row of the table.
#[derive(Serialize)]
pub struct Row {
    /// `pp` or `tg` and the number of tokens; `@ d` and the tokens that are cached before.
    pub test: String,
    /// Mean of the tokens per second.
    pub tok_s: f64,
    /// Their standard deviation.
    pub sd: f64,
    /// Bytes of weights read, in 10⁹ per second.
    pub weight_gb_s: f64,
}

/// What a row measures.
#[derive(Clone, Copy)]
pub struct Test {
    /// Tokens that are cached before the measured ones.
    pub depth: usize,
    /// Tokens that are measured.
    pub tokens: usize,
    /// Measurements.
    pub repetitions: usize,
}

impl Test {
    fn name(&self, kind: &str) -> String {
        let (depth, tokens) = (self.depth, self.tokens);
        match depth {
            0 => format!("{kind}{tokens}"),
            _ => format!("{kind}{tokens} @ d{depth}"),
        }
    }
}

/// Measures prefill.
pub fn prompt_row(session: &mut Session, test: Test, cancel: &Cancel) -> Result<Row> {
    let tokens = test.tokens;
    let seconds = measure(test.repetitions, || prefill(session, test, cancel))?;
    let plan = session.plan();
    let chunks = tokens.div_ceil(plan.chunk as usize) as u64;
    let bytes = plan.weight_bytes_read(ProgramKind::Prefill) * chunks;
    Ok(row(test.name("pp"), tokens, bytes, &seconds))
}

/// Measures decoding. Also returns the number of decode runs and their cost.
pub fn generation_row(session: &mut Session, test: Test, cancel: &Cancel) -> Result<(Row, (u64, Counters))> {
    let tokens = test.tokens;
    let seconds = measure(test.repetitions, || generate(session, test, cancel))?;
    let bytes = session.plan().weight_bytes_read(ProgramKind::Decode) * tokens as u64;
    let row = row(test.name("tg"), tokens, bytes, &seconds);
    Ok((row, session.decode_cost()))
}

/// Seconds of each repetition, after one that is not counted.
fn measure(repetitions: usize, mut once: impl FnMut() -> Result<f64>) -> Result<Vec<f64>> {
    once()?;
    (0..repetitions).map(|_| once()).collect()
}

fn row(test: String, tokens: usize, bytes: u64, seconds: &[f64]) -> Row {
    let rates: Vec<f64> = seconds.iter().map(|seconds| tokens as f64 / seconds).collect();
    let (tok_s, sd) = mean_sd(&rates);
    let each = seconds.iter().sum::<f64>() / seconds.len() as f64;
    Row {
        test,
        tok_s,
        sd,
        weight_gb_s: bytes as f64 / each / 1e9,
    }
}

/// Mean and standard deviation of a sample; the deviation of one value is 0.
fn mean_sd(values: &[f64]) -> (f64, f64) {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, (squares / (values.len() - 1).max(1) as f64).sqrt())
}

/// Arbitrary tokens, the same in every run.
fn prompt(vocab: u32, count: usize) -> Vec<u32> {
    let token = |i: u64| ((i * 2_654_435_761) % u64::from(vocab)) as u32;
    (0..count as u64).map(token).collect()
}

fn unless_broken(flow: ControlFlow<()>) -> Result<()> {
    match flow {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(interrupted()),
    }
}

/// Caches these tokens, and no others. Cached tokens are used again.
fn cache(session: &mut Session, tokens: &[u32], cancel: &Cancel) -> Result<()> {
    if tokens.is_empty() {
        session.clear();
        return Ok(());
    }
    unless_broken(session.prefill(tokens, cancel)?.1)
}

fn prefill(session: &mut Session, test: Test, cancel: &Cancel) -> Result<f64> {
    let tokens = prompt(session.plan().vocab, test.depth + test.tokens);
    cache(session, &tokens[..test.depth], cancel)?;
    let start = Instant::now();
    // Returns when the device is done.
    unless_broken(session.prefill(&tokens, cancel)?.1)?;
    Ok(start.elapsed().as_secs_f64())
}

fn generate(session: &mut Session, test: Test, cancel: &Cancel) -> Result<f64> {
    let count = test.tokens;
    let tokens = prompt(session.plan().vocab, test.depth + 1);
    cache(session, &tokens[..test.depth], cancel)?;
    unless_broken(session.prefill(&tokens, cancel)?.1)?;
    let generation = Generation {
        sampling: Sampling::greedy(),
        stops: Vec::new(),
        max_tokens: count + 1,
    };
    let (mut first, mut tokens) = (None, 0);
    session.generate(&generation, cancel, &mut |_| {
        first.get_or_insert_with(Instant::now);
        tokens += 1;
        ControlFlow::Continue(())
    })?;
    match first {
        Some(first) if tokens == count + 1 => Ok(first.elapsed().as_secs_f64()),
        _ if cancel.is_cancelled() => Err(interrupted()),
        _ => {
            let wanted = count + 1;
            Err(usage(format!(
                "only {tokens} of {wanted} tokens fit; give a larger --ctx"
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deviation_is_that_of_a_sample() {
        assert_eq!(mean_sd(&[4.0]), (4.0, 0.0));
        assert_eq!(mean_sd(&[1.0, 3.0]), (2.0, 2f64.sqrt()));
    }

    #[test]
    fn a_row_names_its_depth_if_it_has_one() {
        let named = |depth| {
            let (tokens, repetitions) = (512, 1);
            Test {
                depth,
                tokens,
                repetitions,
            }
            .name("pp")
        };
        assert_eq!([named(0), named(4096)], ["pp512", "pp512 @ d4096"]);
    }

    #[test]
    fn the_prompt_is_in_the_vocabulary() {
        assert_eq!(prompt(7, 100).len(), 100);
        assert!(prompt(7, 100).iter().all(|&token| token < 7));
    }
}
