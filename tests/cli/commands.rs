//! The output of every command when it succeeds.

use crate::build::{fixture, golden, has, ids, keys, model, run};
use safetensors::SafeTensors;
use serde_json::Value;
use std::path::Path;

fn floats(file: &[u8], name: &str) -> (Vec<usize>, Vec<f32>) {
    let file = SafeTensors::deserialize(file).unwrap();
    let tensor = file.tensor(name).unwrap();
    let values = tensor
        .data()
        .as_chunks::<4>()
        .0
        .iter()
        .map(|&bytes| f32::from_le_bytes(bytes));
    (tensor.shape().to_vec(), values.collect())
}

/// Asserts that every element is within 1e-3 of the recorded one. A NaN is not.
fn close(what: &str, found: &[f32], expected: &[crate::golden::Row]) {
    let mut rows = found.chunks_exact(expected[0].values.len());
    assert_eq!(rows.len(), expected.len());
    for (i, row) in expected.iter().enumerate() {
        for (k, (found, wanted)) in rows.next().unwrap().iter().zip(&row.values).enumerate() {
            let near = (found - wanted).abs() < 1e-3 - row.slack;
            assert!(near, "{what}, row {i}, element {k}: expected {wanted}, found {found}");
        }
    }
}

fn temporary(name: &str) -> String {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join(name)
        .to_str()
        .unwrap()
        .to_string()
}

#[test]
fn version_and_help() {
    let version = run(&["--version"]);
    assert_eq!(version.code, Some(0));
    assert!(
        version
            .stdout
            .starts_with(&format!("cmf-gpu {} (backends: ", env!("CARGO_PKG_VERSION")))
    );
    let help = run(&["--help"]);
    assert_eq!(help.code, Some(0));
    for command in [
        "devices", "info", "verify", "run", "logits", "ppl", "bench", "convert", "shaders",
    ] {
        assert!(help.stdout.contains(command));
        assert_eq!(run(&[command, "--help"]).code, Some(0));
    }
    let names = help.stdout.matches("CMF_GPU_").count();
    assert_eq!(names, 5, "{}", help.stdout);
}

#[test]
fn devices() {
    let all = run(&["devices", "--json"]).json();
    let devices = all["devices"].as_array().unwrap();
    let (cpu, devices) = devices.split_last().unwrap();
    assert_eq!([&cpu["backend"], &cpu["kind"]], ["cpu", "cpu"]);
    assert!(
        !devices.is_empty(),
        "these tests need an adapter; on Debian: apt-get install mesa-vulkan-drivers"
    );
    for (index, device) in devices.iter().enumerate() {
        has(
            device,
            &[
                "index", "name", "backend", "kind", "driver", "memory", "limits", "features",
            ],
        );
        assert_eq!(device["index"], index);
        let kind = device["kind"].as_str().unwrap();
        assert!(["discrete", "integrated", "other", "software", "cpu"].contains(&kind));
    }
    let text = run(&["devices"]);
    assert!(text.stdout.contains(devices[0]["name"].as_str().unwrap()));
    assert!(!text.stderr.contains("error"), "{}", text.stderr);
}

#[test]
fn info() {
    let info = run(&["info", model(), "--json"]).json();
    let fields = [
        "format",
        "arch",
        "params",
        "bytes_by_dtype",
        "eos_token_ids",
        "masks",
        "skills",
        "shards",
        "index",
        "mtp",
        "moe",
        "unused",
        "memory",
        "tokenizer",
        "template",
    ];
    has(&info, &fields);
    assert!(info.get("tensors").is_none());
    assert_eq!(info["arch"]["num_layers"], 3);
    assert_eq!(info["params"], 619_392);
    assert_eq!(info["eos_token_ids"], serde_json::json!([2]));
    assert_eq!(info["stop_token_ids"], serde_json::json!([2]));
    assert_eq!(keys(&info["bytes_by_dtype"]), ["f16"]);
    assert_eq!(info["template"]["source"], "file");
    let bytes = info["memory"].clone();
    // Keys and values: 3 layers of 2 heads of 32, as f16, for the 2048 positions the model was trained for.
    assert_eq!(bytes["kv_bytes"], 3 * 2 * 2 * 32 * 2048 * 2);
    let part = |name: &str| bytes[name].as_u64().unwrap();
    assert_eq!(
        part("total_bytes"),
        part("weight_bytes") + part("kv_bytes") + part("scratch_bytes")
    );
    let short = run(&["info", model(), "--json", "--ctx", "128"]).json();
    assert_eq!(short["memory"]["kv_bytes"], 3 * 2 * 2 * 32 * 128 * 2);

    let info = run(&["info", "--json", "--tensors", "-m", model()]).json();
    let tensors = info["tensors"].as_array().unwrap();
    assert_eq!(info["tensor_count"], tensors.len());
    for tensor in tensors {
        has(tensor, &["name", "dtype", "shape", "offset", "nbytes", "hash"]);
        let hash = tensor["hash"].as_str().unwrap();
        assert!(hash.len() == 16 && hash.chars().all(|c| c.is_ascii_hexdigit()));
    }
    let text = run(&["info", model(), "--tensors"]).stdout;
    assert!(
        text.contains("model.layers.2.mlp.down_proj.weight f16 [128,352]"),
        "{text}"
    );
}

#[test]
fn info_shows_what_cannot_be_run_and_says_why() {
    let path = |name: &str| fixture("interop").join(name).to_str().unwrap().to_string();
    let skill = run(&["info", &path("qwen2-q4tp-gfx-skillfile.cmf"), "--json"]).json();
    assert_eq!(skill["runs"], false);
    assert!(skill["reason"].as_str().unwrap().starts_with("SkillFile: "));
    assert_eq!(skill["memory"], Value::Null);
    assert!(!skill["skills"].as_array().unwrap().is_empty());
    let masked = run(&["info", &path("qwen2-q8_row-densemasks.cmf"), "--json"]).json();
    assert!(masked["masks"][0]["name"] == "general", "{}", masked["masks"]);
    let shown = run(&["info", &path("qwen2-q8_row-densemasks.cmf")]).stdout;
    assert!(shown.contains("general is active by default"), "{shown}");
    let shards = run(&["info", &path("llama_tied-q8_row-sharded-00002-of-00003.cmf"), "--json"]).json();
    assert_eq!(shards["shards"].as_array().unwrap().len(), 3);
    let mtp = run(&["info", &path("qwen3_mtp-q8-appended.cmf"), "--json"]).json();
    assert!(mtp["mtp"]["num_layers"].as_u64().unwrap() > 0 && mtp["draft_head"] == true);
    // With its draft head, which `run` uses and `bench` does not.
    let planned = run(&["bench", "--plan", &path("qwen3_mtp-q8-appended.cmf"), "--json"]).json();
    assert!(mtp["memory"]["weight_bytes"].as_u64() > planned["weight_bytes"].as_u64());
}

#[test]
fn info_shows_unusual_constants() {
    let shown = |name: &str| {
        let file = temporary(&format!("{name}.cmf"));
        crate::golden::fields::Fixture::open(name).write(&serde_json::json!({}), Path::new(&file));
        let json = run(&["info", &file, "--json"]).json();
        (json, run(&["info", &file]).stdout)
    };
    let (json, text) = shown("attention");
    assert_eq!(json["arch"]["logit_multiplier"], 1.75);
    assert_eq!(json["experts_per_layer"], Value::Null);
    // Keys and values of as many heads as each layer has, of 16 elements, as f16, for 4096 positions.
    assert_eq!(json["memory"]["kv_bytes"], (2 + 1 + 3 + 2) * 2 * 16 * 2 * 4096);
    for says in [
        "4 layers, hidden 48, 2 to 6 heads, 1 to 3 kv heads, vocabulary 72",
        "2 attention, 2 sliding attention",
        "partial_rotary_factor 0.5, local_partial_rotary_factor 1.0, rope_local_base_freq 20.0, yarn {\"factor\":4.0",
        "qk_norm_after_rope true, attn_v_norm true, query_pre_attn_scalar 5.0, attn_logit_softcapping 1.5",
        "sliding_window 5, embed_multiplier 3.0, logit_multiplier 1.75",
    ] {
        assert!(text.contains(says), "{says}:\n{text}");
    }
    assert!(!text.contains("loops") && !text.contains("experts"), "{text}");
    let (json, text) = shown("mixture");
    assert_eq!(json["experts_per_layer"], serde_json::json!([0, 5, 0, 7, 2, 8]));
    assert!(text.contains("experts      2 to 8 in 4 of 6 layers"), "{text}");
    assert!(text.contains("\"routed_scaling_factor\":2.5"), "{text}");
    let (_, text) = shown("passes");
    assert!(
        text.contains("loops        3 over the layers, with the final norm between them"),
        "{text}"
    );
    let plain = run(&["info", model()]).stdout;
    assert!(!plain.contains("constants") && !plain.contains("loops"), "{plain}");
}

#[test]
fn a_task_is_chosen_by_name() {
    let model = fixture("interop").join("qwen2-q8_row-densemasks.cmf");
    let model = model.to_str().unwrap();
    let answer = |task: &[&str]| {
        let prompt = [
            "--prompt-tokens",
            "51,457,310,294,82,262,220",
            "--greedy",
            "-n",
            "4",
            "--device",
            "cpu",
        ];
        run(&[&["run", model, "--json"], &prompt[..], task].concat())
    };
    let unmeasured = "the quality of the model with this mask was not measured";
    let general = answer(&[]);
    assert!(
        general.stderr.contains("task general") && general.stderr.contains(unmeasured),
        "{}",
        general.stderr
    );
    assert_eq!(general.json()["tokens"], serde_json::json!([543, 447, 216, 259]));
    let narrow = answer(&["--task", "narrow"]);
    assert!(!narrow.stderr.contains(unmeasured), "{}", narrow.stderr);
    assert_eq!(narrow.json()["tokens"], serde_json::json!([259, 486, 228, 200]));
    let full = answer(&["--task", "none"]);
    assert!(!full.stderr.contains("task"), "{}", full.stderr);
    assert_eq!(full.json()["tokens"], serde_json::json!([366, 128, 19, 177]));
    let bytes = |run: Value| run["counters"]["weight_bytes"].as_u64().unwrap();
    assert!(bytes(narrow.json()) < bytes(general.json()) && bytes(general.json()) < bytes(full.json()));
    let message = answer(&["--task", "poetry"]).fails(2, "Usage");
    assert!(message.contains("general, narrow"), "{message}");
}

#[test]
fn verify() {
    let report = run(&["verify", model(), "--json"]).json();
    has(&report, &["ok", "tensors", "bytes", "failures", "signature"]);
    assert_eq!(report["ok"], true);

    let mut bytes = std::fs::read(model()).unwrap();
    // Past envelope, header and directory: a weight.
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    let broken = temporary("broken.cmf");
    std::fs::write(&broken, bytes).unwrap();
    let ran = run(&["verify", &broken, "--json"]);
    assert_eq!(ran.code, Some(1));
    let report: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(report["ok"], false);
    assert_eq!(report["failures"].as_array().unwrap().len(), 1);
    assert_eq!(report["failures"][0]["kind"], "HashMismatch");
    assert!(ran.stderr.contains("error: HashMismatch: "));
}

#[test]
fn run_answers_as_the_reference_does() {
    for prompt in 0..3 {
        let (prompt, greedy) = golden(prompt);
        let answer = run(&[
            "run",
            model(),
            "--prompt-tokens",
            &ids(&prompt),
            "--greedy",
            "-n",
            "32",
            "--json",
            "--kv",
            "f32",
        ])
        .json();
        let fields = [
            "text",
            "tokens",
            "prompt_tokens",
            "finish",
            "prefill_s",
            "decode_s",
            "load_s",
            "prefill_tok_s",
            "decode_tok_s",
            "device",
            "counters",
            "speculation",
        ];
        has(&answer, &fields);
        assert_eq!(answer["tokens"], serde_json::json!(greedy));
        assert_eq!(answer["prompt_tokens"], prompt.len());
        assert_eq!(answer["finish"], "length");
        has(&answer["device"], &["name", "backend", "kind"]);
        has(&answer["speculation"], &["mode", "drafted", "accepted", "rounds"]);
        let counters = &answer["counters"];
        let of_a_token = [
            "submits",
            "passes",
            "dispatches",
            "readback_bytes",
            "weight_bytes",
            "bind_groups_created",
            "buffers_created",
            "write_buffer_calls",
        ];
        has(counters, &of_a_token);
        has(
            counters,
            &[
                "kv_bytes",
                "pipelines_compiled",
                "pipeline_ms",
                "upload_bytes",
                "peak_host_bytes",
                "gpu_bytes",
            ],
        );
        assert_eq!(of_a_token.map(|name| counters[name].as_u64().unwrap())[..2], [1, 1]);
        assert!(counters["readback_bytes"].as_u64().unwrap() <= 64);
        for none in ["bind_groups_created", "buffers_created", "write_buffer_calls"] {
            assert_eq!(counters[none], 0, "{none}");
        }
    }
}

#[test]
fn drafts_change_no_answer_and_are_reported() {
    let path = |name: &str| fixture("interop").join(name).to_str().unwrap().to_string();
    let head = path("qwen3_mtp-q8-appended.cmf");
    let ask = |model: &str, drafts: &str| {
        let arguments = [
            "run",
            model,
            "--prompt-tokens",
            "51,457,310",
            "--temp",
            "0.5",
            "--seed",
            "3",
        ];
        run(&[&arguments[..], &["-n", "40", "--json", "--spec", drafts]].concat())
    };
    let plain = ask(&head, "off").json();
    assert_eq!(
        plain["speculation"],
        serde_json::json!({"mode": "off", "drafted": 0, "accepted": 0, "rounds": 0})
    );
    for drafts in ["auto", "1", "3", "7"] {
        let ran = ask(&head, drafts);
        let answer = ran.json();
        assert_eq!(answer["tokens"], plain["tokens"], "{drafts}");
        let reported = |name: &str| answer["speculation"][name].as_u64().unwrap();
        assert_eq!(answer["speculation"]["mode"], "mtp", "{drafts}");
        assert!(
            reported("accepted") <= reported("drafted") && reported("rounds") > 0,
            "{drafts}"
        );
        if drafts != "auto" {
            let count = answer["tokens"].as_array().unwrap().len() as u64;
            assert_eq!(reported("rounds") + reported("accepted") + 1, count, "{drafts}");
            let line = format!(
                "gen {count} tok ({} of {} drafts)",
                reported("accepted"),
                reported("drafted")
            );
            assert!(ran.stderr.contains(&line), "{}", ran.stderr);
        }
    }
    // Without a draft head: from the conversation, if requested.
    let plain = ask(model(), "auto").json();
    assert_eq!(plain["speculation"]["mode"], "off");
    let looked_up = ask(model(), "4").json();
    assert_eq!(looked_up["tokens"], plain["tokens"]);
    assert_eq!(looked_up["speculation"]["mode"], "lookup");
    for wrong in ["0", "8", "-1", "x", ""] {
        assert_eq!(ask(model(), wrong).code, Some(2), "{wrong}");
    }
}

#[test]
fn text_and_json_answers_are_the_same_and_seeds_repeat() {
    let arguments = [
        "run",
        model(),
        "-p",
        "Hello",
        "-s",
        "Short.",
        "-n",
        "12",
        "--seed",
        "7",
        "--temp",
        "0.9",
    ];
    let json = run(&[&arguments[..], &["--json"]].concat()).json();
    let plain = run(&arguments);
    assert_eq!(
        plain.stdout.strip_suffix('\n').unwrap(),
        json["text"].as_str().unwrap().trim_end_matches('\n')
    );
    let stats = plain.stderr.lines().last().unwrap();
    assert!(
        stats.starts_with("[prompt ") && stats.ends_with(&format!("| finish: {}]", json["finish"].as_str().unwrap()))
    );
    for part in [" tok/s | gen ", " tok/s | ttft ", " s | finish: "] {
        assert!(stats.contains(part), "{stats}");
    }
    let quiet = run(&[&arguments[..], &["-q"]].concat());
    assert_eq!(quiet.stderr, "");
    assert_eq!(quiet.stdout, plain.stdout);
    assert_eq!(json["seed"], 7);
    let other = run(&["run", model(), "-p", "Hello", "-n", "1", "--json"]).json()["seed"].clone();
    assert_ne!(
        other,
        run(&["run", model(), "-p", "Hello", "-n", "1", "--json"]).json()["seed"]
    );
}

#[test]
fn the_template_is_applied_unless_the_prompt_is_raw() {
    let messages = temporary("messages.json");
    std::fs::write(&messages, r#"[{"role": "user", "content": "What is <s>this</s>?"}]"#).unwrap();
    let rendered = run(&["chat-template", model(), "--messages", &messages, "--json"]).json();
    assert_eq!(rendered["text"], "<s> [INST] What is <s>this</s>? [/INST]");
    assert_eq!(
        run(&["chat-template", model(), "--messages", &messages]).stdout,
        rendered["text"].as_str().unwrap()
    );
    let tokens = rendered["tokens"].as_array().unwrap();
    // The user's text becomes no special token.
    assert_eq!(tokens.iter().filter(|&token| token == 1 || token == 2).count(), 1);
    let templated = run(&["run", model(), "-p", "What is <s>this</s>?", "-n", "1", "--json"]).json();
    assert_eq!(templated["prompt_tokens"], tokens.len());
    let raw = run(&["run", model(), "--raw", "-p", "What is this?", "-n", "1", "--json"]).json();
    let plain = run(&["tokenize", model(), "What is this?", "--json"]).json();
    assert_eq!(raw["prompt_tokens"], plain["tokens"].as_array().unwrap().len());
}

/// The tokens of a prompt are those that `chat-template` shows for the same messages and variables.
#[test]
fn system_messages_and_thinking_reach_the_template() {
    let out = temporary("qwen3.cmf");
    let src = crate::golden::dir("qwen3");
    run(&["convert", src.to_str().unwrap(), "-o", &out, "--quant", "f16", "--json"]).json();
    let messages = temporary("thinking.json");
    let turns = r#"[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]"#;
    std::fs::write(&messages, turns).unwrap();
    let mut lengths = Vec::new();
    for (kwargs, flags) in [("{}", &[][..]), (r#"{"enable_thinking": false}"#, &["--no-think"])] {
        let rendered = run(&[
            "chat-template",
            &out,
            "--messages",
            &messages,
            "--kwargs",
            kwargs,
            "--json",
        ])
        .json();
        let answer = ["run", &out, "-s", "Be brief.", "-p", "Hi", "-n", "1", "--json"];
        let prompt = run(&[&answer[..], flags].concat()).json()["prompt_tokens"].clone();
        assert_eq!(prompt, rendered["tokens"].as_array().unwrap().len());
        assert_eq!(
            rendered["text"].as_str().unwrap().contains("<think>"),
            !flags.is_empty()
        );
        lengths.push(prompt);
    }
    assert_ne!(lengths[0], lengths[1]);
}

#[test]
fn each_of_several_stop_texts_ends_the_answer() {
    let answer = |stops: &[&str]| {
        let flags = ["run", model(), "-p", "Hello there", "--greedy", "-n", "12", "--json"];
        run(&[&flags[..], stops].concat()).json()
    };
    let whole = answer(&[]);
    let whole = whole["text"].as_str().unwrap();
    let ascii: Vec<&str> = whole
        .split(|c: char| !c.is_ascii_lowercase())
        .filter(|part| part.len() > 1)
        .collect();
    let stop = ascii[ascii.len() - 1];
    for stops in [
        ["--stop", "never said", "--stop", stop],
        ["--stop", stop, "--stop", "never said"],
    ] {
        let ended = answer(&stops);
        assert_eq!(ended["finish"], "stop");
        assert_eq!(ended["text"], whole.split(stop).next().unwrap());
    }
}

#[test]
fn tokenize_and_detokenize_are_inverse() {
    let text = "Grüße, 世界 — 1 2 3";
    let tokens = run(&["tokenize", model(), text, "--no-special"]).stdout;
    assert_eq!(run(&["detokenize", model(), tokens.trim()]).stdout.trim_end(), text);
    let with_start = run(&["tokenize", model(), text, "--json"]).json();
    assert_eq!(with_start["tokens"][0], 1);
    let back = run(&["detokenize", model(), &format!("1,{}", tokens.trim()), "--json"]).json();
    let back = back["text"].as_str().unwrap();
    assert!(back.starts_with("<s>") && back.ends_with(text), "{back}");
}

#[test]
fn logits_are_the_golden_ones_by_prefill_and_by_steps() {
    let recorded = crate::golden::Recorded::of("llama_tied");
    let (prompt, _) = golden(2);
    let expected = recorded.rows("logits.p2");
    let shape = [expected.len(), expected[0].values.len()];
    for step_from in ["40", "17", "0"] {
        let out = temporary(&format!("logits-{step_from}.safetensors"));
        let done = run(&[
            "logits",
            model(),
            "--tokens",
            &ids(&prompt),
            "--out",
            &out,
            "--hidden",
            "--step-from",
            step_from,
            "--kv",
            "f32",
            "--json",
        ])
        .json();
        assert_eq!(done, serde_json::json!({"n": 40, "vocab": 512}));
        let file = std::fs::read(&out).unwrap();
        let (found_shape, found) = floats(&file, "logits");
        assert_eq!(found_shape, shape);
        close("logits", &found, &expected);
        for layer in 0..3 {
            let expected = recorded.rows(&format!("hidden.p2.layer{layer}"));
            let (shape, found) = floats(&file, &format!("hidden.{layer}"));
            assert_eq!(shape, [40, 128]);
            close(&format!("layer {layer}"), &found, &expected);
        }
    }
}

#[test]
fn perplexity_is_that_of_the_logits() {
    let text = "It was a bright cold day in April, and the clocks were striking thirteen.";
    let file = temporary("text.txt");
    std::fs::write(&file, text).unwrap();
    let tokens: Vec<u32> =
        serde_json::from_value(run(&["tokenize", model(), text, "--json"]).json()["tokens"].clone()).unwrap();
    let out = temporary("ppl.safetensors");
    run(&[
        "logits",
        model(),
        "--tokens",
        &ids(&tokens),
        "--out",
        &out,
        "--kv",
        "f32",
        "--json",
    ])
    .json();
    let (_, logits) = floats(&std::fs::read(&out).unwrap(), "logits");
    let rows = logits.chunks(512).zip(&tokens[1..]).map(|(row, &next)| {
        let sum: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
        sum.ln() - f64::from(row[next as usize])
    });
    let expected = rows.sum::<f64>() / (tokens.len() - 1) as f64;
    let ppl = run(&["ppl", model(), "--file", &file, "--kv", "f32", "--json"]).json();
    has(&ppl, &["ppl", "nll", "tokens"]);
    assert_eq!(ppl["tokens"], tokens.len() - 1);
    assert!((ppl["nll"].as_f64().unwrap() - expected).abs() < 1e-4);
    assert!((ppl["ppl"].as_f64().unwrap() - expected.exp()).abs() / expected.exp() < 1e-4);
    let strided = run(&["ppl", model(), "--file", &file, "--ctx", "8", "--stride", "3", "--json"]).json();
    assert_eq!(strided["tokens"], tokens.len() - 1);
    assert_ne!(strided["nll"], ppl["nll"]);
}

#[test]
fn bench() {
    let small = ["bench", model(), "-p", "70", "-n", "5", "-r", "2"];
    let report = run(&[&small[..], &["--json"]].concat()).json();
    has(&report, &["rows", "counters"]);
    let tests: Vec<_> = report["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["test"].clone())
        .collect();
    assert_eq!(tests, ["pp70", "tg5"]);
    for row in report["rows"].as_array().unwrap() {
        for field in ["tok_s", "sd", "weight_gb_s"] {
            assert!(row[field].as_f64().unwrap() >= 0.0);
        }
    }
    assert_eq!(report["counters"]["submits"], 1);
    assert_eq!(report["counters"]["write_buffer_calls"], 0);
    // A token reads each weight at most once.
    let file = std::fs::metadata(model()).unwrap().len();
    let read = report["counters"]["weight_bytes"].as_u64().unwrap();
    assert!((file / 2..=file).contains(&read), "{read} of {file}");
    // The conditions of the measurement.
    for known in [&report["version"], &report["host"], &report["device"]["driver"]] {
        assert!(!known.as_str().unwrap().is_empty());
    }
    let csv = run(&[&small[..], &["-o", "csv"]].concat()).stdout;
    assert!(csv.starts_with("test,tok_s,sd,weight_gb_s\npp70,"));
    let md = run(&[&small[..], &["-o", "md"]].concat()).stdout;
    assert!(md.lines().nth(3).unwrap().starts_with("| tg5 | ") && md.contains(" ± "));
    let only = run(&["bench", model(), "-p", "0", "-n", "5", "-r", "1", "-o", "json"]).json();
    assert_eq!(only["rows"].as_array().unwrap().len(), 1);
    let deep = ["-p", "3", "-n", "5", "-d", "70", "-r", "1", "-o", "csv"];
    let deep = run(&[&["bench", model()], &deep[..]].concat()).stdout;
    assert!(deep.contains("\npp3 @ d70,") && deep.contains("\ntg5 @ d70,"), "{deep}");
}

#[test]
fn convert_reports_and_requantises() {
    let out = temporary("again.cmf");
    let report = run(&["convert", model(), "-o", &out, "--quant", "q8", "--json"]).json();
    has(&report, &["tensors", "bytes", "dropped"]);
    assert_eq!(report["bytes"], std::fs::metadata(&out).unwrap().len());
    let info = run(&["info", &out, "--json"]).json();
    assert!(keys(&info["bytes_by_dtype"]).contains(&"q8_row"));
    let down = "*.mlp.down_proj.weight=q8";
    let report = [
        "convert",
        model(),
        "-o",
        &out,
        "--quant",
        "vbit",
        "--mean-bits",
        "3.5",
        "--tensor-quant",
        down,
    ];
    let report = run(&[&report[..], &["--json"]].concat()).json();
    let groups = report["groups"].as_array().unwrap();
    has(
        &groups[0],
        &["name", "dtype", "tensors", "bytes", "bits_per_weight", "relative_error"],
    );
    let group = |name: &str| groups.iter().find(|group| group["name"] == name).unwrap();
    assert_eq!(group("model.layers.*.mlp.down_proj.weight")["dtype"], "q8_row");
    let up = group("model.layers.*.mlp.up_proj.weight");
    assert_eq!(up["dtype"], "vbit_ro");
    assert!((0.01..0.5).contains(&up["relative_error"].as_f64().unwrap()), "{up}");
    assert!((3.9..4.5).contains(&up["bits_per_weight"].as_f64().unwrap()), "{up}");
}

#[test]
fn shaders() {
    let all = run(&["shaders", "--json"]).json();
    let variants = all["variants"].as_array().unwrap();
    assert!(variants.len() > 100);
    has(&variants[0], &["name", "kernel", "threads", "wgsl"]);
    let dir = temporary("shaders");
    let dumped = run(&["shaders", "--dump", &dir]);
    assert_eq!(dumped.code, Some(0));
    for variant in [&variants[0], &variants[variants.len() - 1]] {
        let path = Path::new(&dir).join(format!("{}.wgsl", variant["name"].as_str().unwrap()));
        assert_eq!(
            std::fs::read_to_string(path).unwrap(),
            variant["wgsl"].as_str().unwrap()
        );
    }
}

#[test]
fn the_cpu_reference_answers_like_the_device() {
    let (prompt, greedy) = golden(1);
    let arguments = [
        "run",
        model(),
        "--prompt-tokens",
        &ids(&prompt),
        "--greedy",
        "-n",
        "8",
        "--kv",
        "f32",
        "--json",
    ];
    let answer = run(&[&arguments[..], &["--device", "cpu"]].concat()).json();
    assert_eq!(answer["tokens"], serde_json::json!(greedy[..8]));
    assert_eq!(answer["device"]["kind"], "cpu");
}

#[test]
fn parity_of_kernels_and_of_programs() {
    let fields = ["cases", "passed", "failed", "worst", "device"];
    let kernels = run(&["parity", "--filter", "sample", "--json"]).json();
    has(&kernels, &fields);
    assert!(kernels["cases"].as_u64().unwrap() > 0);
    assert_eq!(kernels["cases"], kernels["passed"]);
    let programs = run(&["parity", model(), "--json"]).json();
    has(&programs, &fields);
    assert_eq!(programs["cases"], programs["passed"]);
    assert!(run(&["parity", model()]).stdout.contains(" comparisons passed on "));
    run(&["parity", "--filter", "no such kernel"]).fails(2, "Usage");
    run(&["parity", "--filter", "norm", "--device", "cpu"]).fails(1, "NoAdapter");
}

/// Forms that users of other programs type mean the same as ours.
#[test]
fn a_prompt_and_a_model_may_stand_by_position() {
    let rest = ["--device", "cpu", "--greedy", "-q", "-n", "4"];
    let answer = |start: &[&str]| run(&[start, &rest].concat());
    let wanted = answer(&["run", "-m", model(), "-p", "hello"]);
    assert!(wanted.code == Some(0) && !wanted.stdout.is_empty(), "{}", wanted.stderr);
    for start in [
        &["run", model(), "hello"][..],
        &[model(), "hello"],
        &["-m", model(), "hello"],
        &["run", "-m", model(), "hello", "-ngl", "99", "--jinja"],
    ] {
        assert_eq!(answer(start).stdout, wanted.stdout, "{start:?}");
    }
    let noted = run(&[
        "run",
        model(),
        "hello",
        "--device",
        "cpu",
        "-n",
        "1",
        "-t",
        "4",
        "--seed",
        "-1",
    ]);
    assert!(
        noted.code == Some(0) && noted.stderr.contains("note: -t is not needed"),
        "{}",
        noted.stderr
    );
    for wrong in [
        &["run", model(), "a", "-p", "b"][..],
        &["run", model(), "a", "b"],
        &["-hf", "a/b"],
    ] {
        assert_eq!(run(wrong).code, Some(2), "{wrong:?}");
    }
    assert!(run(&["help", "run"]).stdout.contains("--max-tokens"));
    assert_eq!(run(&["version"]).stdout, run(&["--version"]).stdout);
}
