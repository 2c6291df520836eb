//! An answer as the user sees it: the text while it is generated, and the line that follows it.

use cmf_gpu::engine::OnText;
use cmf_gpu::{Answer, Error, Result};
use std::ops::ControlFlow;

/// Calls `ask` and writes the text that arrives, with a line break at its end, also after an error. Errors: those of
/// `write`, else those of `ask`.
pub fn streamed(
    write: &mut dyn FnMut(&str) -> Result<()>,
    ask: impl FnOnce(OnText) -> Result<Answer>,
) -> Result<Answer> {
    let mut unwritten: Option<Error> = None;
    let mut open = false;
    let answer = ask(&mut |text| {
        open = !text.ends_with('\n');
        match write(text) {
            Ok(()) => ControlFlow::Continue(()),
            Err(err) => {
                unwritten = Some(err);
                ControlFlow::Break(())
            }
        }
    });
    if let Some(err) = unwritten {
        return Err(err);
    }
    if open {
        write("\n")?;
    }
    answer
}

/// Prompt tokens that were run per second, and tokens of the answer after the first per second.
pub fn rates(answer: &Answer) -> (f64, f64) {
    let rate = |count: usize, seconds: f64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
    (
        rate(answer.prefilled_tokens, answer.prefill_s),
        rate(answer.tokens.len().saturating_sub(1), answer.decode_s),
    )
}

/// The line after an answer.
pub fn summary(answer: &Answer) -> String {
    let (prefill_rate, decode_rate) = rates(answer);
    let cached = match answer.cached_tokens {
        0 => String::new(),
        cached => format!(" ({cached} cached)"),
    };
    // A single token has no rate.
    let decoded = match answer.tokens.len() {
        0 | 1 => String::new(),
        _ => format!(" {decode_rate:.1} tok/s"),
    };
    let drafts = match answer.speculated.drafted {
        0 => String::new(),
        drafted => format!(" ({} of {drafted} drafts)", answer.speculated.accepted),
    };
    format!(
        "[prompt {} tok{cached} {prefill_rate:.1} tok/s | gen {} tok{drafts}{decoded} | ttft {:.2} s | finish: {}]",
        answer.prompt_tokens,
        answer.tokens.len(),
        answer.prefill_s,
        answer.finish.name(),
    )
}
