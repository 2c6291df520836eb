//! An answer as the user sees it: the text while it is generated, the line that follows it, and the JSON object.

use super::args::device_json;
use super::output::{Output, size};
use cmf_gpu::engine::{DeviceReport, OnText};
use cmf_gpu::graph::Counters;
use cmf_gpu::options::{Overlay, Sampling};
use cmf_gpu::{Answer, Engine, Error, Result};
use serde_json::{Value, json};
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
fn rates(answer: &Answer) -> (f64, f64) {
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

/// Prints the report of an answer.
pub fn report(engine: &Engine, answer: &Answer, sampling: &Sampling, out: &mut Output) -> Result<()> {
    out.notices(&answer.notices);
    out.note(summary(answer));
    let totals = engine.counters();
    if let Some(slots) = engine.device_report().expert_slots {
        out.note(format!(
            "experts, {slots} slots a layer: {} hits, {} misses, {} fetched",
            totals.expert_hits,
            totals.expert_misses,
            size(totals.paged_bytes)
        ));
    }
    match out.json {
        true => out.json(&answer_json(engine, answer, sampling, &totals)),
        false => Ok(()),
    }
}

fn answer_json(engine: &Engine, answer: &Answer, sampling: &Sampling, totals: &Counters) -> Value {
    let (prefill_rate, decode_rate) = rates(answer);
    let device = engine.device_report();
    let skill = match engine.overlay() {
        Overlay::Skill(id) => Some(id.as_str()),
        _ => None,
    };
    json!({
        "text": answer.text,
        "tokens": answer.tokens,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "finish": answer.finish.name(),
        "prefill_s": answer.prefill_s,
        "decode_s": answer.decode_s,
        "load_s": engine.load_s(),
        "prefill_tok_s": prefill_rate,
        "decode_tok_s": decode_rate,
        "ctx": device.ctx,
        "seed": sampling.seed,
        "task": engine.task(),
        "skill": skill,
        "device": device_json(device),
        "counters": counters_json(&answer.decode_counters, answer.decode_runs, totals, device),
        "speculation": {
            "mode": answer.speculated.mode.name(),
            "drafted": answer.speculated.drafted,
            "accepted": answer.speculated.accepted,
            "rounds": answer.speculated.steps,
        },
    })
}

/// The cost of a steady token, the mean over `runs` decode runs (null if there were none), and totals.
pub fn counters_json(decode: &Counters, runs: u64, totals: &Counters, device: &DeviceReport) -> Value {
    let each = |total: u64| match runs {
        0 => Value::Null,
        _ if total.is_multiple_of(runs) => (total / runs).into(),
        _ => (total as f64 / runs as f64).into(),
    };
    json!({
        "submits": each(decode.submits),
        "passes": each(decode.passes),
        "dispatches": each(decode.dispatches),
        "readback_bytes": each(decode.readback_bytes),
        "weight_bytes": each(decode.weight_bytes),
        "kv_bytes": each(decode.kv_bytes),
        "bind_groups_created": each(decode.bind_groups_created),
        "buffers_created": each(decode.buffers_created),
        "write_buffer_calls": each(decode.write_buffer_calls),
        "pipelines_compiled": totals.pipelines_compiled,
        "pipeline_ms": totals.pipeline_us as f64 / 1000.0,
        "upload_bytes": totals.upload_bytes,
        "peak_host_bytes": peak_host_bytes(totals, device),
        "gpu_bytes": totals.gpu_bytes,
        "expert_slots": device.expert_slots,
        "expert_hits": totals.expert_hits,
        "expert_misses": totals.expert_misses,
        "paged_bytes": totals.paged_bytes,
    })
}

/// The peak memory of this process without the device memory of a software adapter, if the system reports it.
fn peak_host_bytes(totals: &Counters, device: &DeviceReport) -> Option<u64> {
    let device_bytes = if device.kind == "software" { totals.gpu_bytes } else { 0 };
    Some(peak_bytes()?.saturating_sub(device_bytes))
}

/// The peak memory of this process, if the system reports it.
pub fn peak_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}
