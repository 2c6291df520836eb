//! Ctrl-C at any time: the text so far is kept, no incomplete file remains, the exit code is 130.
#![cfg(unix)]

use crate::files::names;
use crate::permutation::Permutation;
use crate::process::{output_of, program};
use serde_json::{Map, Value, json};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn interrupt(child: &Child) {
    let killed = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(killed.success());
}

/// Guards against Ctrl-C being ignored after the start, or causing a backtrace.
#[test]
fn a_run_can_be_interrupted_at_any_moment() {
    let (_dir, path) = Permutation::repeating(&[b"a", b"b"]).file();
    for device in ["cpu", "0"] {
        for delay in [0, 3, 10, 30, 60, 100, 200, 400] {
            let mut command = program();
            command
                .arg("run")
                .arg(&path)
                .args(["-p", "p", "--greedy", "-n", "100000", "-c", "512", "--device", device]);
            let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            std::thread::sleep(Duration::from_millis(delay));
            interrupt(&child);
            let start = Instant::now();
            let output = child.wait_with_output().unwrap();
            assert!(start.elapsed() < Duration::from_secs(20));
            // The signal may arrive before the program handles it, or after the context is full.
            let killed = output.status.signal() == Some(2);
            let (code, stdout, stderr) = output_of(&output);
            let done = code == Some(0) && stderr.contains("finish: context");
            assert!(
                killed || done || code == Some(130),
                "{code:?} after {delay} ms: {stderr}"
            );
            assert!("ab".repeat(600).starts_with(stdout.trim_end()), "{stdout}");
            assert!(!stderr.contains("error:"), "{stderr}");
        }
    }
}

/// Guards against long prompts that cannot be interrupted.
#[test]
fn a_prompt_can_be_interrupted() {
    let mut model = Permutation::repeating(&[b"a"]);
    model.context = 32768;
    let (_dir, path) = model.file();
    let prompt = path.with_file_name("prompt.txt");
    std::fs::write(&prompt, "p".repeat(32000)).unwrap();
    let mut command = program();
    command
        .arg("run")
        .arg(&path)
        .arg("-f")
        .arg(&prompt)
        .args(["--raw", "-c", "0", "--device", "cpu"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut log = String::new();
    while !log.contains("loaded in") {
        assert!(stderr.read_line(&mut log).unwrap() > 0, "{log}");
    }
    std::thread::sleep(Duration::from_millis(200));
    interrupt(&child);
    let start = Instant::now();
    stderr.read_to_string(&mut log).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(130), 0), "{log}");
    assert!(log.trim_end().ends_with("finish: interrupted]"), "{log}");
    assert!(start.elapsed() < Duration::from_secs(20));
}

/// Guards against reporting Ctrl-C as an error, and against missing JSON output.
#[test]
fn an_interrupted_command_reports_it_in_json() {
    let mut model = Permutation::repeating(&[b"a"]);
    model.context = 32768;
    let (_dir, path) = model.file();
    let text = path.with_file_name("text.txt");
    std::fs::write(&text, "p".repeat(32000)).unwrap();
    for json in [true, false] {
        let mut command = program();
        command
            .arg("ppl")
            .arg(&path)
            .arg("-f")
            .arg(&text)
            .args(["-c", "0", "--device", "cpu"])
            .args(json.then_some("--json"));
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut log = String::new();
        while !log.contains("loaded in") {
            assert!(stderr.read_line(&mut log).unwrap() > 0, "{log}");
        }
        interrupt(&child);
        stderr.read_to_string(&mut log).unwrap();
        let (code, stdout, _) = output_of(&child.wait_with_output().unwrap());
        let wanted = ["", "{\"finish\":\"interrupted\"}\n"][usize::from(json)];
        assert_eq!((code, stdout.as_str()), (Some(130), wanted), "{log}");
        assert!(!log.contains("error:"), "{log}");
    }
}

/// Guards against an incomplete or temporary file after an interrupted conversion.
#[test]
fn an_interrupted_conversion_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let src = dir.path().join("src");
    std::fs::create_dir(&src).unwrap();
    long_source(&src);
    let out = dir.path().join("out.cmf");
    for (delay, times) in [(0, 1), (50, 1), (400, 1), (900, 1), (400, 2)] {
        let mut command = program();
        command.arg("convert").arg(&src).arg("-o").arg(&out);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(delay));
        for _ in 0..times {
            interrupt(&child);
        }
        let output = child.wait_with_output().unwrap();
        let killed = output.status.signal() == Some(2);
        let (code, stdout, stderr) = output_of(&output);
        assert!(
            killed || code == Some(130),
            "{code:?} after {delay} ms: {stdout}{stderr}"
        );
        // A second signal ends the program at once and may leave a `.partial` file.
        let left: Vec<String> = names(dir.path()).into_iter().filter(|name| name != "src").collect();
        assert!(
            left.is_empty() || (times == 2 && left.iter().all(|name| name.ends_with(".partial"))),
            "{left:?}"
        );
        for name in left {
            std::fs::remove_file(dir.path().join(name)).unwrap();
        }
    }
}

/// A model of zeros that takes long to convert. It is a sparse file if the file system supports that.
fn long_source(dir: &std::path::Path) {
    let (hidden, layers) = (1024u64, 96);
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![4096, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    for layer in 0..layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        for part in ["input_layernorm", "post_attention_layernorm"] {
            shapes.push((name(part), vec![hidden]));
        }
        for part in [
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
        ] {
            shapes.push((name(part), vec![hidden, hidden]));
        }
        for part in ["mlp.gate_proj", "mlp.up_proj"] {
            shapes.push((name(part), vec![3 * hidden, hidden]));
        }
        shapes.push((name("mlp.down_proj"), vec![hidden, 3 * hidden]));
    }
    let mut header = Map::new();
    let mut at = 0;
    for (name, shape) in shapes {
        let bytes = shape.iter().product::<u64>() * 4;
        header.insert(
            name,
            json!({"dtype": "F32", "shape": shape, "data_offsets": [at, at + bytes]}),
        );
        at += bytes;
    }
    let header = Value::Object(header).to_string();
    let path = dir.join("model.safetensors");
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    let head = file.len() as u64;
    std::fs::write(&path, file).unwrap();
    std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(head + at)
        .unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": true, "eos_token_id": 2,
        "bos_token_id": 1
    });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
}
