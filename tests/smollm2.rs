//! A real model from conversion to answer, and limits on the cost of a token. Needs an adapter, and the model of
//! `scripts/fetch-smollm2`.

use serde_json::Value;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

const QUESTION: &str = "What is the capital of France?";

/// Held while a process runs: processes are timed, and each uses all cores.
static MACHINE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    MACHINE.lock().unwrap_or_else(|broken| broken.into_inner())
}

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_cmf-gpu"))
}

/// The shader cache of the driver is off, so that every start is a first start.
fn question(model: &Path) -> Command {
    let mut command = program();
    command
        .arg("run")
        .arg(model)
        .args(["--prompt", QUESTION, "--greedy", "-n", "24", "--ctx", "512"]);
    command.env("MESA_SHADER_CACHE_DISABLE", "true").stdin(Stdio::null());
    command
}

fn converted(quant: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/smollm2/smollm2-135m-instruct.gguf");
    assert!(
        source.exists(),
        "{} is missing; run scripts/fetch-smollm2",
        source.display()
    );
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("smollm2-{quant}.cmf"));
    let done = program()
        .arg("convert")
        .arg(source)
        .arg("--out")
        .arg(&out)
        .args(["--quant", quant, "-q"])
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    out
}

fn json(command: &mut Command) -> Value {
    let done = command.arg("--json").output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    serde_json::from_slice(&done.stdout).unwrap()
}

/// Asks a model a question; checks the answer and its cost.
fn answers(quant: &str) {
    let _alone = alone();
    let model = converted(quant);
    let answer = json(&mut question(&model));
    println!("{quant}: {answer}");
    assert!(answer["text"].as_str().unwrap().contains("Paris"), "{}", answer["text"]);
    assert_eq!(answer["finish"], "stop");
    let counters = &answer["counters"];
    let count = |name: &str| {
        counters[name]
            .as_u64()
            .unwrap_or_else(|| panic!("{name}: {}", counters[name]))
    };
    assert_eq!(count("submits"), 1);
    assert_eq!(count("passes"), 1);
    for none in ["bind_groups_created", "buffers_created", "write_buffer_calls"] {
        assert_eq!(count(none), 0, "{none}");
    }
    assert!(count("readback_bytes") <= 64);
    assert!(count("dispatches") <= 7 * 30 + 6, "{}", count("dispatches"));

    // Every weight is read once per token, and was uploaded once.
    let info = json(program().arg("info").arg(&model));
    let tensors: u64 = info["bytes_by_dtype"]
        .as_object()
        .unwrap()
        .values()
        .map(|bytes| bytes.as_u64().unwrap())
        .sum();
    let about = |bytes: u64| (bytes as f64 / tensors as f64 - 1.0).abs() <= 0.02;
    assert!(about(count("weight_bytes")), "{} of {tensors}", count("weight_bytes"));
    assert!(about(count("upload_bytes")), "{} of {tensors}", count("upload_bytes"));

    // Without the device memory of a software adapter.
    if cfg!(target_os = "linux") {
        let host = count("peak_host_bytes");
        assert!(host <= 200 << 20, "{} MiB of host memory", host >> 20);
    }
    std::fs::remove_file(model).unwrap();
}

#[test]
fn a_model_in_f16_answers() {
    answers("f16");
}

#[test]
fn a_model_in_q8_answers() {
    answers("q8");
}

#[test]
fn a_model_in_q8_2f_answers() {
    answers("q8_2f");
}

#[test]
fn a_model_in_q4_answers() {
    answers("q4");
}

#[test]
fn a_model_in_q4t_answers() {
    answers("q4t");
}

#[test]
fn a_model_in_q4tp_answers() {
    answers("q4tp");
}

#[test]
fn q4tp_stores_the_outer_layers_in_wider_types() {
    let _alone = alone();
    let infos = ["q4t", "q4tp"].map(|quant| {
        let model = converted(quant);
        let info = json(program().arg("info").arg(&model).arg("--tensors"));
        let bytes = std::fs::metadata(&model).unwrap().len();
        std::fs::remove_file(model).unwrap();
        (info, bytes)
    });
    assert!(infos[1].1 < infos[0].1, "{} of {} bytes", infos[1].1, infos[0].1);
    let tensors = infos[1].0["tensors"].as_array().unwrap();
    let wide = |layer: usize| {
        let name = format!("model.layers.{layer}.mlp.up_proj.weight");
        let tensor = tensors.iter().find(|tensor| tensor["name"] == name.as_str()).unwrap();
        let bits = tensor["nbytes"].as_f64().unwrap() * 8.0 / (1536.0 * 576.0);
        match tensor["dtype"].as_str().unwrap() {
            // 5 bits, half a bit of scales, and the data of each row.
            "vbit_ro" => {
                assert!((5.4..5.65).contains(&bits), "layer {layer}: {bits}");
                true
            }
            found => {
                assert_eq!(found, "q4tp", "layer {layer}");
                false
            }
        }
    };
    let found: Vec<usize> = (0..30).filter(|&layer| wide(layer)).collect();
    assert_eq!(found, [0, 1, 28, 29]);
}

/// The time from the start of the program to the first byte of the answer.
fn first_text(model: &Path) -> Duration {
    let start = Instant::now();
    let mut child = question(model)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut first = [0];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let waited = start.elapsed();
    child.kill().unwrap();
    child.wait().unwrap();
    waited
}

#[test]
fn the_first_text_comes_within_five_seconds() {
    let _alone = alone();
    let model = converted("q8");
    // The best of three starts, since other programs may use the cores.
    let waits = (0..3).map(|_| first_text(&model));
    let best = waits.min().unwrap();
    println!("first text after {best:?}");
    assert!(best <= Duration::from_secs(5), "{best:?}");
    std::fs::remove_file(model).unwrap();
}
