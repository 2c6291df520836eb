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
    /// `pp` or `tg` and the number of tokens.
    pub test: String,
    /// Mean of the tokens per second.
    pub tok_s: f64,
    /// Their standard deviation.
    pub sd: f64,
    /// Bytes of weights read, in 10⁹ per second.
    pub weight_gb_s: f64,
}

/// Measures prefill of `tokens` tokens.
pub fn prompt_row(session: &mut Session, tokens: usize, repetitions: usize, cancel: &Cancel) -> Result<Row> {
    let seconds = measure(repetitions, || prefill(session, tokens, cancel))?;
    let plan = session.plan();
    let chunks = tokens.div_ceil(plan.chunk as usize) as u64;
    let bytes = plan.weight_bytes_read(ProgramKind::Prefill) * chunks;
    Ok(row(format!("pp{tokens}"), tokens, bytes, &seconds))
}

/// Measures decoding of `tokens` tokens. Also returns the number of decode runs and their cost.
pub fn generation_row(
    session: &mut Session,
    tokens: usize,
    repetitions: usize,
    cancel: &Cancel,
) -> Result<(Row, (u64, Counters))> {
    let seconds = measure(repetitions, || generate(session, tokens, cancel))?;
    let bytes = session.plan().weight_bytes_read(ProgramKind::Decode) * tokens as u64;
    let row = row(format!("tg{tokens}"), tokens, bytes, &seconds);
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

fn prefill(session: &mut Session, count: usize, cancel: &Cancel) -> Result<f64> {
    let tokens = prompt(session.plan().vocab, count);
    session.clear();
    let start = Instant::now();
    // Returns when the device is done.
    unless_broken(session.prefill(&tokens, cancel)?.1)?;
    Ok(start.elapsed().as_secs_f64())
}

fn generate(session: &mut Session, count: usize, cancel: &Cancel) -> Result<f64> {
    let tokens = prompt(session.plan().vocab, 1);
    session.clear();
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
    fn the_prompt_is_in_the_vocabulary() {
        assert_eq!(prompt(7, 100).len(), 100);
        assert!(prompt(7, 100).iter().all(|&token| token < 7));
    }
}
