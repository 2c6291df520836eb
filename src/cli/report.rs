//! The report of an answer: notices, the summary, and the JSON object with counters.

use super::answer::{rates, summary};
use super::args::device_json;
use super::output::{Output, size};
use cmf_gpu::engine::DeviceReport;
use cmf_gpu::graph::Counters;
use cmf_gpu::options::{Overlay, Sampling};
use cmf_gpu::{Answer, Engine, Result};
use serde_json::{Value, json};

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
    let device_bytes = match device.kind.as_str() {
        "software" => totals.gpu_bytes,
        _ => 0,
    };
    Some(peak_bytes()?.saturating_sub(device_bytes))
}

/// The peak memory of this process, if the system reports it.
pub fn peak_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}
