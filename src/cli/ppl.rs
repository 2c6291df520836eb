//! `ppl`: perplexity of a text over sliding windows.
//!
//! The text is tokenised once, including the tokens that the tokenizer adds. A window of `--ctx` tokens begins every
//! `--stride` tokens and runs on its own. It scores the tokens that no earlier window has scored, each given the tokens
//! before it in the window. The first token of the text has no context and is not scored. Perplexity is the exponential of
//! the mean negative log-likelihood; Hugging Face's documentation calls this strided perplexity.

use super::args::{self, LoadArgs, whole};
use super::context::{Context, Result, unless_cancelled, usage};
use super::file::read_text;
use cmf_gpu::source::ModelSource;
use cmf_gpu::{Engine, Error, Kind, LoadOptions};
use serde_json::json;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Tokens of a window by default.
const DEFAULT_WINDOW: u32 = 512;

/// The help of `--ctx` in commands that measure perplexity.
pub const CTX_HELP: &str = "Tokens of a window; 0 = the length the model was trained for [default: 512]";

#[derive(clap::Args)]
#[command(mut_arg("ctx", |arg| arg.help(CTX_HELP)))]
pub struct Args {
    #[command(flatten)]
    load: LoadArgs,
    /// The text; - = stdin
    #[arg(short, long)]
    file: PathBuf,
    /// Tokens from one window's start to the next [default: half a window]
    #[arg(long, value_parser = whole::<usize>, allow_negative_numbers = true)]
    stride: Option<usize>,
}

/// One run of the model.
#[derive(Debug, PartialEq, Eq)]
struct Window {
    /// Its tokens.
    range: Range<usize>,
    /// First token that is scored.
    scored_from: usize,
}

fn windows(tokens: usize, window: usize, stride: usize) -> Vec<Window> {
    let mut all: Vec<Window> = Vec::new();
    for start in (0..tokens).step_by(stride) {
        let end = tokens.min(start + window);
        let (scored_from, range) = (all.last().map_or(1, |before| before.range.end), start..end);
        all.push(Window { range, scored_from });
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

/// The windows over a text.
pub struct Windows {
    window: usize,
    stride: usize,
}

impl Windows {
    /// Windows as long as the context of the options, by default 512 tokens. Sets the options that a measurement needs.
    ///
    /// Errors: `Usage` for a window of less than 2 tokens, and for a stride that is 0 or longer than the window.
    pub fn new(options: &mut LoadOptions, source: &ModelSource, stride: Option<usize>) -> Result<Windows> {
        options.all_logits = true;
        options.ctx = options.ctx.or(Some(DEFAULT_WINDOW));
        let window = options.positions(source.arch.max_position_embeddings)? as usize;
        if window < 2 {
            return Err(usage(format!("--ctx {window}: expected a window of at least 2 tokens")));
        }
        let stride = stride.unwrap_or(window / 2);
        if stride == 0 || stride > window {
            return Err(usage(format!("--stride {stride}: expected 1 to {window}, the window")));
        }
        Ok(Windows { window, stride })
    }

    /// The mean negative log-likelihood of a token, in nats, and the number of scored tokens.
    pub fn measure(&self, engine: &mut Engine, tokens: &[u32], context: &mut Context) -> Result<(f64, u64)> {
        let cancel = context.interrupt.cancel();
        let mut bar = context.out.progress("perplexity", false);
        let (mut sum, mut count) = (0.0, 0u64);
        let all = tokens.len();
        for Window { range, scored_from } in windows(all, self.window, self.stride) {
            let run = &tokens[range.clone()];
            engine.session().logits(run, run.len(), false, &mut |at, logits, _| {
                unless_cancelled(&cancel)?;
                let next = range.start + at + 1;
                if next >= scored_from && next < range.end {
                    sum += nll(logits, tokens[next]).ok_or_else(|| {
                        let message = format!("the probability of token {next} is not a finite number");
                        Error::new(Kind::NonFinite, message)
                    })?;
                    count += 1;
                }
                Ok(())
            })?;
            bar.set(range.end as u64, all as u64);
            let (end, ppl) = (range.end, (sum / count as f64).exp());
            context.out.detail(format!("{end} of {all} tokens: {ppl:.4}"));
        }
        Ok((sum / count as f64, count))
    }
}

/// The tokens of a text. Errors: `Usage` for less than 2.
pub fn tokens(engine: &Engine, text: &str, file: &Path) -> Result<Vec<u32>> {
    let tokens = engine.tokenizer()?.encode(text, true)?;
    if tokens.len() < 2 {
        let file = file.display();
        return Err(usage(format!("{file}: expected a text of at least 2 tokens")));
    }
    Ok(tokens)
}

pub fn run(args: Args, context: &mut Context) -> Result {
    args.load.model.path()?;
    let text = read_text(&args.file)?;
    let source = args.load.open()?;
    let skills = args.load.overlay.choice(&source)?;
    let task = args.load.task.choice();
    let mut options = skills.first(args.load.options());
    let windows = Windows::new(&mut options, &source, args.stride)?;
    let mut engine = args::load(source, &options, context)?;
    let tokens = tokens(&engine, &text, &args.file)?;
    let cancel = context.interrupt.cancel();
    // Skills are chosen by the first window: a prompt is no longer than that.
    let first = &tokens[..tokens.len().min(windows.window)];
    skills.settle(&mut engine, &task, first, &cancel, &context.out)?;
    let (nll, count) = windows.measure(&mut engine, &tokens, context)?;
    let (Windows { window, stride }, ppl) = (windows, nll.exp());
    let object = json!({"ppl": ppl, "nll": nll, "tokens": count, "ctx": window, "stride": stride});
    context.answer(object, [format!("ppl {ppl:.4} (nll {nll:.6}, {count} tokens)")])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_but_the_first_is_scored_once() {
        for (tokens, window, stride) in [(2, 8, 8), (8, 8, 4), (9, 8, 4), (100, 8, 3), (100, 16, 16), (17, 8, 1)] {
            let mut counts = vec![0; tokens];
            for window in windows(tokens, window, stride) {
                let first = window.scored_from.max(window.range.start + 1);
                counts[first..window.range.end].iter_mut().for_each(|count| *count += 1);
            }
            // With strides as long as the window, no window has a context for its first token.
            let uncounted: Vec<_> = (0..tokens).filter(|&token| counts[token] == 0).collect();
            assert!(counts.iter().all(|&count| count < 2));
            assert_eq!(uncounted[0], 0);
            assert!(
                stride == window || uncounted == [0],
                "{tokens} {window} {stride}: {uncounted:?}"
            );
        }
        let window = |range, scored_from| Window { range, scored_from };
        assert_eq!(windows(10, 8, 4), [window(0..8, 1), window(4..10, 8)]);
    }

    #[test]
    fn equal_logits_have_equal_likelihoods() {
        assert!((nll(&[2.0; 6], 3).unwrap() - 6f64.ln()).abs() < 1e-12);
        assert_eq!(nll(&[f32::NAN, 1.0], 1), None);
        assert_eq!(nll(&[1.0], 7), None);
    }
}
