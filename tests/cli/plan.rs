//! `bench --plan`: the memory and cost of models of real size, without a device.

use crate::build::{model, run};
use serde_json::Value;
use std::time::Instant;

fn plan(spec: &str, more: &[&str]) -> Value {
    run(&[&["bench", "--synthetic", spec, "--plan", "--json"], more].concat()).json()
}

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("expected a number, found {value}"))
}

fn decode(report: &Value) -> &Value {
    let programs = report["programs"].as_array().unwrap();
    programs.iter().find(|program| program["program"] == "decode").unwrap()
}

/// Its weights take 18 GB.
#[test]
fn a_large_model_is_planned_in_little_time_and_memory() {
    let start = Instant::now();
    let report = plan("qwen3.5-35b-a3b", &["--ctx", "8192"]);
    let seconds = start.elapsed().as_secs_f64();
    assert!(seconds < 2.0, "{seconds} s");
    if cfg!(target_os = "linux") {
        assert!(number(&report["peak_host_bytes"]) < 300 << 20);
    }
    // 10 attention layers of 2 heads of 256 elements, keys and values of 2 bytes each.
    assert_eq!(report["kv_bytes"], 10 * 2 * 2 * 256 * 2 * 8192);
    // 30 recurrent layers of 32 heads: 128 × 128 floats of state, and 4 + 1 positions of q, k and v.
    assert_eq!(report["state_bytes"], 30 * 32 * (128 * 128 + 5 * 3 * 128) * 4);
    // A little over 4.5 bits per weight; 8 of 256 experts per token.
    let whole = number(&report["weight_bytes"]);
    assert!((18_000_000_000..22_000_000_000).contains(&whole), "{whole}");
    let read = number(&decode(&report)["weight_bytes"]);
    assert!((1_500_000_000..2_600_000_000).contains(&read), "{read}");
}

#[test]
fn layers_take_few_dispatches() {
    // Outside of the layers: embedding, norm, head and sampler.
    let outside = |spec: &str| {
        let [one, two] = ["4", "8"].map(|layers| number(&decode(&plan(spec, &["--layers", layers]))["dispatches"]));
        (one - (two - one), two - one)
    };
    let (around, four) = outside("qwen3.5-27b");
    assert!(around <= 5, "{around}");
    // Three recurrent layers and one with attention: at most 6 and 7.
    assert!(four <= 3 * 6 + 7, "{four}");
    let (_, four) = outside("qwen3.5-35b-a3b");
    assert!(four <= 3 * (4 + 4) + (5 + 4), "{four}");
    let (_, four) = outside("qwen3-30b-a3b");
    assert!(four <= 4 * (5 + 3), "{four}");
    for spec in ["smollm2-135m", "llama-8b", "qwen3-8b"] {
        assert!(outside(spec).1 <= 4 * 7, "{spec}");
    }
}

#[test]
fn plans_are_printed_in_every_form() {
    let text = run(&["bench", "--synthetic", "qwen3-30b-a3b", "--plan"]).stdout;
    assert!(text.starts_with("qwen3-30b-a3b: 48 layers, 30.53"), "{text}");
    assert!(text.contains("\n| decode | "), "{text}");
    let csv = run(&["bench", "--synthetic", "qwen3-8b", "--plan", "-o", "csv"]).stdout;
    assert!(
        csv.starts_with("program,dispatches,barriers,weight_bytes\ndecode,"),
        "{csv}"
    );
    for program in plan("llama-8b", &[])["programs"].as_array().unwrap() {
        // At most one barrier between two steps.
        assert!(number(&program["barriers"]) < number(&program["dispatches"]));
        assert!(number(&program["barriers"]) > 0);
    }
    // A model file can be planned too.
    let file = run(&["bench", model(), "--plan", "--json"]).json();
    assert!(number(&file["weight_bytes"]) > 0);
    let fails = run(&["bench", "--synthetic", "llama-8b", "--plan", "--vram-mb", "1000"]);
    assert!(fails.fails(1, "OutOfMemory").contains("--vram-mb"));
}

/// Would fail: a plan has another context than a measurement with the same flags.
#[test]
fn a_plan_has_the_context_of_a_measurement() {
    for (flags, ctx) in [
        (&["-p", "32", "-n", "16"][..], 32),
        (&["-p", "32", "-n", "128"], 130),
        (&["-c", "4096"], 4096),
    ] {
        assert_eq!(plan("llama-8b", flags)["ctx"], ctx, "{flags:?}");
    }
}
