//! `ppl`: perplexity of a text over sliding windows.
//!
//! The text is tokenised once, with what the tokenizer adds at its start. Windows of `--ctx` tokens begin every `--stride`
//! tokens; each window is run on its own, and of its tokens those count that no window before has counted, each given all
//! tokens of the window before it. The very first token is given nothing and never counts. Perplexity is the exponential
//! of the mean negative log-likelihood: what Hugging Face's documentation calls strided perplexity.

use super::args::{self, LoadArgs, read_text, whole};
use super::model;
use super::{Context, Outcome, Result, interrupted, usage};
use cmf_gpu::container::Container;
use cmf_gpu::engine::Engine;
use cmf_gpu::options::LoadOptions;
use cmf_gpu::{Error, Kind};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Tokens of a window when nothing is said.
const DEFAULT_WINDOW: u32 = 512;

/// Flags of `ppl`.
#[derive(clap::Args)]
#[command(mut_arg("ctx", |arg| arg.help("Tokens of a window; 0 = what the model was trained for [default: 512]")))]
pub struct Args {
    #[command(flatten)]
    load: LoadArgs,
    /// The text; - = stdin
    #[arg(short, long, env = "CMF_GPU_FILE", hide_env = true)]
    file: PathBuf,
    /// Tokens from one window's start to the next [default: half a window]
    #[arg(long, env = "CMF_GPU_STRIDE", value_parser = whole::<usize>, allow_negative_numbers = true, hide_env = true)]
    stride: Option<usize>,
}

/// One run of the model.
#[derive(Debug, PartialEq, Eq)]
struct Window {
    /// First token.
    start: usize,
    /// One past the last.
    end: usize,
    /// First token that counts.
    counted_from: usize,
}

fn windows(tokens: usize, window: usize, stride: usize) -> Vec<Window> {
    let mut all: Vec<Window> = Vec::new();
    for start in (0..tokens).step_by(stride) {
        let end = tokens.min(start + window);
        let counted_from = all.last().map_or(1, |before| before.end);
        all.push(Window {
            start,
            end,
            counted_from,
        });
        if end == tokens {
            break;
        }
    }
    all
}

/// Negative log-likelihood of a token, in nats.
fn nll(logits: &[f32], token: u32) -> Option<f64> {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - best).exp()).sum();
    let logit = logits.get(token as usize)?;
    let nll = sum.ln() - f64::from(logit - best);
    nll.is_finite().then_some(nll)
}

/// How a text is cut.
pub struct Windows {
    window: usize,
    stride: usize,
}

impl Windows {
    /// Windows of the context that the options ask for, or of 512 tokens; the options become those of a measurement.
    ///
    /// Errors: `Usage` for a window or a stride that leaves nothing to measure.
    pub fn planned(options: &mut LoadOptions, container: &Container, stride: Option<usize>) -> Result<Windows> {
        options.all_logits = true;
        options.ctx = options.ctx.or(Some(DEFAULT_WINDOW));
        let window = options.positions(container.header().arch.max_position_embeddings)? as usize;
        if window < 2 {
            return Err(usage(format!(
                "--ctx {window}: a window of at least 2 tokens is wanted"
            )));
        }
        let stride = stride.unwrap_or(window / 2);
        if stride == 0 || stride > window {
            return Err(usage(format!("--stride {stride}: wanted 1 to the window, {window}")));
        }
        Ok(Windows { window, stride })
    }

    /// The mean negative log-likelihood of a token, in nats, and how many counted.
    pub fn measure(&self, engine: &mut Engine, tokens: &[u32], context: &mut Context) -> Result<(f64, u64)> {
        let cancel = context.interrupt.cancel();
        let mut bar = context.out.progress("perplexity", false);
        let (mut sum, mut count) = (0.0, 0u64);
        for Window {
            start,
            end,
            counted_from,
        } in windows(tokens.len(), self.window, self.stride)
        {
            let run = &tokens[start..end];
            engine.session().logits(run, run.len(), false, &mut |at, logits, _| {
                if cancel.is_cancelled() {
                    return Err(interrupted());
                }
                let next = start + at + 1;
                if next >= counted_from && next < end {
                    let Some(nll) = nll(logits, tokens[next]) else {
                        return Err(Error::new(
                            Kind::NonFinite,
                            format!("no finite probability of token {next}"),
                        ));
                    };
                    sum += nll;
                    count += 1;
                }
                Ok(())
            })?;
            bar.set(end as u64, tokens.len() as u64);
            context.out.detail(format!(
                "{end} of {} tokens: {:.4}",
                tokens.len(),
                (sum / count as f64).exp()
            ));
        }
        Ok((sum / count as f64, count))
    }
}

/// The tokens of a text. Errors: `Usage` for a text without anything to measure.
pub fn tokens(engine: &Engine, text: &str, file: &Path) -> Result<Vec<u32>> {
    let tokens = engine.tokenizer()?.encode(text, true)?;
    if tokens.len() < 2 {
        return Err(usage(format!(
            "{}: a text of at least 2 tokens is wanted",
            file.display()
        )));
    }
    Ok(tokens)
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let path = args.load.model.path(context)?;
    let text = read_text(&args.file)?;
    let mut options = args.load.options();
    let container = model::open(&path)?;
    let overlay = args.load.overlay.wanted(&container, context)?;
    let task = options.task.clone();
    options = overlay.first(options);
    let windows = Windows::planned(&mut options, &container, args.stride)?;
    let mut engine = args::load(container, &options, context)?;
    let tokens = tokens(&engine, &text, &args.file)?;
    let cancel = context.interrupt.cancel();
    // The first window decides; a prompt has no more.
    let first = &tokens[..tokens.len().min(windows.window)];
    overlay.settle(&mut engine, &task, first, &cancel, &context.out)?;
    let (nll, count) = windows.measure(&mut engine, &tokens, context)?;
    let Windows { window, stride } = windows;
    match context.out.json {
        true => context.out.json(&json!({
            "ppl": nll.exp(), "nll": nll, "tokens": count, "ctx": window, "stride": stride,
        }))?,
        false => context
            .out
            .line(format!("ppl {:.4} (nll {nll:.6}, {count} tokens)", nll.exp()))?,
    }
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_but_the_first_counts_once() {
        for (tokens, window, stride) in [(2, 8, 8), (8, 8, 4), (9, 8, 4), (100, 8, 3), (100, 16, 16), (17, 8, 1)] {
            let mut counts = vec![0; tokens];
            for window in windows(tokens, window, stride) {
                let first = window.counted_from.max(window.start + 1);
                counts[first..window.end].iter_mut().for_each(|count| *count += 1);
            }
            // With strides as long as the window, each window's first token is given nothing.
            let uncounted: Vec<_> = (0..tokens).filter(|&token| counts[token] == 0).collect();
            assert!(counts.iter().all(|&count| count < 2));
            assert_eq!(uncounted[0], 0);
            assert!(
                stride == window || uncounted == [0],
                "{tokens} {window} {stride}: {uncounted:?}"
            );
        }
        assert_eq!(
            windows(10, 8, 4),
            [
                Window {
                    start: 0,
                    end: 8,
                    counted_from: 1
                },
                Window {
                    start: 4,
                    end: 10,
                    counted_from: 8
                }
            ]
        );
    }

    #[test]
    fn the_likelihood_of_equal_logits_is_that_of_a_die() {
        assert!((nll(&[2.0; 6], 3).unwrap() - 6f64.ln()).abs() < 1e-12);
        assert_eq!(nll(&[f32::NAN, 1.0], 1), None);
        assert_eq!(nll(&[1.0], 7), None);
    }
}
