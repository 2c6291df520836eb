//! Skills: flags, messages, and the commands that run a model with them.

use crate::build::{fixture, has, ids, run};
use serde_json::Value;
use tempfile::TempDir;

const PROMPT: &str = "The licensor grants you a copyright license";

fn interop(name: &str) -> String {
    fixture("interop").join(name).to_str().unwrap().to_string()
}

fn file(dir: &TempDir, name: &str, text: &str) -> String {
    let path = dir.path().join(name).to_str().unwrap().to_string();
    std::fs::write(&path, text).unwrap();
    path
}

fn answer(model: &str, flags: &[&str]) -> (Value, String) {
    let base = [
        "run", model, "--raw", "-p", PROMPT, "--greedy", "-n", "8", "-c", "64", "--json",
    ];
    let ran = run(&[&base, flags].concat());
    (ran.json()["tokens"].clone(), ran.stderr)
}

fn ppl(model: &str, text: &str, skill: &str) -> Value {
    run(&["ppl", model, "-f", text, "--skill", skill, "-c", "16", "--json"]).json()["ppl"].clone()
}

#[test]
fn a_skill_is_chosen_by_name_or_by_the_prompt() {
    let model = &interop("qwen3-q4t-alpha.cmf");
    let (none, _) = answer(model, &["--skill", "none"]);
    assert_eq!(answer(model, &[]).0, none, "none is the default");
    let (alpha, said) = answer(model, &["--skill", "alpha"]);
    assert!(
        said.contains("skill alpha; its quality was not measured") && none != alpha,
        "{said}"
    );
    let (auto, said) = answer(model, &["--skill", "auto"]);
    assert!(said.contains("skill alpha") && auto == alpha, "{said}");
    let (whole, said) = answer(model, &["--blend", "alpha:1"]);
    assert!(said.contains("skills alpha:1.000") && whole == alpha, "{said}");
    // E is 0.211 and 1.468, so that a temperature of 0.5 gives 0.925 and 0.075.
    let (_, said) = answer(model, &["--blend", "auto:0.5", "--kv", "f32"]);
    assert!(said.contains("skills alpha:0.925,beta:0.075"), "{said}");

    let of = |flags: &[&str]| run(&[&["run", model, "-p", "x", "-c", "64"], flags].concat());
    let message = of(&["--skill", "nobody"]).fails(2, "Usage");
    assert!(message.contains("alpha, beta"), "{message}");
    of(&["--skill", "alpha", "--blend", "alpha:1"]).fails(2, "Usage");
    for bad in ["alpha:0.5", "alpha:2,beta:-1", "alpha", "auto:0", "nobody:1"] {
        of(&["--blend", bad]).fails(2, "Usage");
    }
    let appended = &interop("qwen3_mtp-q8-appended.cmf");
    let message = run(&["run", appended, "-p", "x", "--skill", "auto"]).fails(2, "Usage");
    assert!(message.contains("skill fit"), "{message}");
    run(&["bench", model, "--skill", "auto"]).fails(2, "Usage");
    run(&["bench", "--synthetic", "smollm2-135m", "--skill", "a"]).fails(2, "Usage");
}

#[test]
fn other_commands_take_skills_too() {
    let dir = tempfile::tempdir().unwrap();
    let model = &interop("qwen3_mtp-q8-appended.cmf");
    let out = file(&dir, "l.safetensors", "");
    let logits = |skill: &str| {
        let flags = ["--tokens", "51,457,310", "--skill", skill, "-o", &out, "-c", "16"];
        assert_eq!(run(&[&["logits", model], &flags[..]].concat()).code, Some(0));
        std::fs::read(&out).unwrap()
    };
    assert_ne!(logits("none"), logits("tail"));
    let text = &file(&dir, "text", &format!("{PROMPT} to reproduce and to modify."));
    assert_ne!(ppl(model, text, "none"), ppl(model, text, "tail"));
    let ran = run(&[
        "bench", model, "-p", "4", "-n", "4", "-r", "1", "--skill", "tail", "--json",
    ]);
    assert!(ran.stderr.contains("skill tail"), "{}", ran.stderr);
    has(&ran.json(), &["rows"]);
    let parity = run(&["parity", model, "-c", "48", "--skill", "tail", "--json"]).json();
    assert_eq!(parity["cases"], parity["passed"]);
    let message = run(&["parity", "--skill", "tail"]).fails(2, "Usage");
    assert!(message.contains("MODEL"), "{message}");
}

#[test]
fn energies_are_shown() {
    let model = &interop("qwen3-q4t-alpha.cmf");
    let route = |flags: &[&str]| run(&[&["skill", "route", model, "--kv", "f32"], flags].concat());
    let by_text = route(&["-p", PROMPT, "--json"]).json();
    let tokens = ids(&[51, 457, 310, 294, 82, 262, 220, 334, 384, 82, 350, 259, 415, 395, 463]);
    assert_eq!(by_text, route(&["--prompt-tokens", &tokens, "--json"]).json());
    assert_eq!((&by_text["winner"], &by_text["tokens"]), (&"alpha".into(), &15.into()));
    for (i, wanted) in [(0, 0.211135), (1, 1.468198)] {
        let found = by_text["routes"][i]["energy"].as_f64().unwrap();
        assert!((found - wanted).abs() < 1e-4, "{by_text}");
    }
    let shown = route(&["-p", PROMPT]).stdout;
    assert!(
        shown.starts_with("alpha  E 0.2111") && shown.lines().count() == 2,
        "{shown}"
    );
    route(&[]).fails(2, "Usage");
    route(&["-p", "x", "--prompt-tokens", "1"]).fails(2, "Usage");
    route(&["--prompt-tokens", "100000"]).fails(2, "Usage");
}

#[test]
fn skills_are_fitted_and_measured_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let model = &file(&dir, "model.cmf", "");
    std::fs::copy(interop("qwen3-q4t-alpha.cmf"), model).unwrap();
    let law = file(
        &dir,
        "law.txt",
        "The licensor grants a license\n\nYou may copy the work\nA copyright notice applies\n",
    );
    let numbers = file(
        &dir,
        "numbers.json",
        r#"["1 2 3 4 5 6", "98 76 54 32 10", [16, 17, 18, 19, 20]]"#,
    );
    for (id, examples) in [("alpha", &law), ("beta", &numbers)] {
        let ran = run(&["skill", "fit", model, id, "-f", examples, "--rank", "2", "--json"]);
        let fitted = ran.json();
        has(&fitted, &["out", "bytes", "notes"]);
        let found = ["skill", "examples", "rank", "phi_layer"].map(|field| fitted[field].clone());
        assert_eq!(found, [Value::from(id), 3.into(), 2.into(), 2.into()]);
    }
    let winner = |prompt: &str| run(&["skill", "route", model, "-p", prompt, "--json"]).json()["winner"].clone();
    assert_eq!(winner("The licensor may copy the work"), "alpha");
    assert_eq!(winner("5 4 3 2 1"), "beta");
    let described = || run(&["skill", "list", model, "--json"]).json()["skills"][0].clone();
    let before = described();
    assert_eq!(
        (&before["quality"], &before["selection"]["rank"]),
        (&Value::Null, &2.into())
    );

    let text = &file(&dir, "held-out", "You may grant the licensor a copy of the work.");
    let measured = run(&["skill", "measure", model, "alpha", "-f", text, "-c", "16", "--json"]);
    let measured = measured.json();
    assert_eq!(measured["backbone"], ppl(model, text, "none"));
    assert_eq!(measured["overlaid"], ppl(model, text, "alpha"));
    let quality = described()["quality"].clone();
    assert_eq!(
        (&quality["metric"], &quality["overlaid"]),
        (&"ppl".into(), &measured["overlaid"])
    );
    assert_eq!(quality["dataset_sha256"].as_str().map(str::len), Some(64));
    assert_eq!(described()["selection"], before["selection"], "the rest stays");
    let shown = run(&["skill", "list", model]).stdout;
    let ppl = ["backbone", "overlaid"].map(|member| quality[member].as_f64().unwrap());
    let wanted = format!(
        "  fitted after layer 2  ppl {:.4} without, {:.4} with it (task none)  ",
        ppl[0], ppl[1]
    );
    let lines: Vec<&str> = shown.lines().collect();
    assert!(
        lines[0].contains(&wanted) && lines[1].contains("  not measured  "),
        "{shown}"
    );
    assert!(!answer(model, &["--skill", "alpha"]).1.contains("not measured"));
    assert_eq!(run(&["verify", model]).code, Some(0));

    let fit = |id: &str, file: &str, flags: &[&str]| run(&[&["skill", "fit", model, id, "-f", file], flags].concat());
    fit("nobody", &law, &[]).fails(2, "Usage");
    fit("alpha", text, &[]).fails(2, "Usage");
    fit("alpha", &law, &["--phi-layer", "3"]).fails(2, "Usage");
    // Before the file is opened.
    let nowhere = ["skill", "fit", "/no/such.cmf", "a", "-f", "/no/such"];
    let message = run(&[&nowhere[..], &["--rank", "0"]].concat()).fails(2, "Usage");
    assert!(message.contains("--rank") && message.contains("from 1"), "{message}");
    let other = fit("beta", &numbers, &["--phi-layer", "1"]);
    let both = "alpha after 2, beta after 1";
    assert!(other.stderr.contains(both), "{}", other.stderr);
    assert!(other.stdout.starts_with("fitted beta in "), "{}", other.stdout);
    let route = [
        "skill",
        "route",
        model,
        "-p",
        "The licensor may copy the work",
        "--json",
    ];
    let routed = run(&route);
    assert!(routed.stderr.contains(both), "{}", routed.stderr);
    assert_eq!(
        [0, 1].map(|i| routed.json()["routes"][i]["phi_layer"].clone()),
        [2, 1].map(Value::from)
    );
    let (_, said) = answer(model, &["--skill", "auto"]);
    assert!(said.contains("are not comparable"), "{said}");
    run(&[&route[..5], &["--task", "none"]].concat()).fails(2, "Usage");
    for bad in ["{}", "[1]", "[[-1], [2]]", "["] {
        let bad = file(&dir, "bad.json", bad);
        fit("alpha", &bad, &[]).fails(1, "Parse");
    }
}

/// Writes a model with masks, a skill for one of them, and a skill for the full model.
fn masked(dir: &TempDir) -> String {
    let (model, source) = (file(dir, "model.cmf", ""), file(dir, "source.cmf", ""));
    std::fs::copy(interop("qwen2-q8_row-densemasks.cmf"), &model).unwrap();
    assert_eq!(
        run(&["convert", &model, "-o", &source, "--quant", "q4tp"]).code,
        Some(0)
    );
    let add = |id: &str, flags: &[&str]| run(&[&["skill", "add", &model, &source, "--id", id], flags].concat());
    let message = add("s", &["--mask-task", "wide"]).fails(2, "Usage");
    assert!(message.contains("general, narrow"), "{message}");
    for bad in ["-s", "a\u{200b}b"] {
        assert!(add(bad, &[]).fails(2, "Usage").contains("for a new skill"));
    }
    assert_eq!(add("s", &["--mask-task", "narrow"]).code, Some(0));
    assert_eq!(add("bare", &["--mask-task", "none"]).code, Some(0));
    let shown = run(&["skill", "list", &model]).stdout;
    assert!(shown.contains("  task narrow  not fitted  not measured\n"), "{shown}");
    assert_eq!(run(&["verify", &model]).code, Some(0));
    model
}

#[test]
fn applying_a_skill_names_its_mask() {
    let dir = tempfile::tempdir().unwrap();
    let model = &masked(&dir);
    let (base, cut, made) = (
        file(&dir, "base.cmf", ""),
        file(&dir, "cut.cmf", ""),
        file(&dir, "made.cmf", ""),
    );
    std::fs::copy(interop("qwen2-q8_row-densemasks.cmf"), &base).unwrap();
    run(&["skill", "export", model, "s", "--base", &base, "-o", &cut, "--json"]).json();
    let notes = run(&["skill", "apply", &base, &cut, "-o", &made, "--json"]).json()["notes"].to_string();
    assert!(notes.contains("uses the mask of task 'narrow'"), "{notes}");
}

const FLAGS: [&str; 6] = ["--prompt-tokens", "5,6,7,8,9,10", "--greedy", "-n", "6", "--json"];

#[test]
fn a_skill_runs_under_its_mask() {
    let dir = tempfile::tempdir().unwrap();
    let model = &masked(&dir);
    for device in ["auto", "cpu"] {
        let of = |flags: &[&str]| {
            let ran = run(&[&["run", model, "-c", "32", "--device", device], &FLAGS[..], flags].concat());
            let found = ran.json();
            ((found["tokens"].clone(), found["task"].clone()), ran.stderr)
        };
        assert_eq!(of(&[]).0.1, "general", "the file's default");
        let (own, said) = of(&["--skill", "s"]);
        assert!(
            own.1 == "narrow" && said.contains("task narrow") && !said.contains("was chosen"),
            "{said}"
        );
        assert_eq!(of(&["--skill", "s", "--task", "narrow"]).0, own);
        assert_eq!(of(&["--blend", "s:1"]).0, own);
        assert_eq!(of(&["--skill", "bare"]).0.1, Value::Null);
        for (task, wanted) in [("general", "general".into()), ("none", Value::Null)] {
            let (other, said) = of(&["--skill", "s", "--task", task]);
            assert_eq!(other.1, wanted);
            assert_ne!(other.0, own.0);
            let notice = format!("skill 's' was made for task 'narrow', but task '{task}' was chosen");
            assert_eq!(said.matches(&notice).count(), 1, "{said}");
        }
        let (mixed, said) = of(&["--blend", "s:0.5,bare:0.5"]);
        assert!(
            mixed.1 == "general" && said.contains("'s' for 'narrow', 'bare' for 'none'"),
            "{said}"
        );
    }
    let examples = file(
        &dir,
        "examples.json",
        r#"["You may copy", "The work is licensed", "copy the work"]"#,
    );
    let others = file(&dir, "others.json", r#"["1 2 3 4", "98 76 54", "3 1 4 1 5"]"#);
    for (id, examples) in [("s", &examples), ("bare", &others)] {
        let fitted = run(&["skill", "fit", model, id, "-f", examples]);
        assert!(
            fitted.code == Some(0) && !fitted.stderr.contains("task"),
            "{}",
            fitted.stderr
        );
    }
    let routed = run(&[
        "run",
        model,
        "--raw",
        "-p",
        "copy the work",
        "-n",
        "1",
        "-c",
        "32",
        "--skill",
        "auto",
        "--json",
    ]);
    assert!(routed.stderr.contains("\ntask narrow\n"), "{}", routed.stderr);
    assert!(!routed.stderr.contains("general"), "{}", routed.stderr);
    assert_eq!(
        (&routed.json()["skill"], &routed.json()["task"]),
        (&"s".into(), &"narrow".into())
    );

    let text = &file(&dir, "held-out", "You may copy the work if the licence applies to it.");
    let measure = |flags: &[&str]| {
        let measured = run(&[&["skill", "measure", model, "s", "-f", text, "-c", "16"], flags].concat());
        assert_eq!(measured.code, Some(0), "{}", measured.stderr);
        run(&["skill", "list", model, "--json"]).json()["skills"][0]["quality"].clone()
    };
    let (own, none) = (measure(&[]), measure(&["--task", "none"]));
    assert_eq!(
        (&own["backbone"], &own["overlaid"]),
        (&ppl(model, text, "none"), &ppl(model, text, "s"))
    );
    let tasks = |quality: &Value| ["backbone_task", "task"].map(|member| quality[member].clone());
    assert_eq!(tasks(&own), ["general", "narrow"].map(Value::from));
    assert_eq!(tasks(&none), ["none", "none"].map(Value::from));
    assert_ne!(own["overlaid"], none["overlaid"]);
    // The last measurement was made with task none.
    let said = |flags: &[&str]| run(&[&["run", model, "-c", "32"], &FLAGS[..], flags].concat()).stderr;
    let only = |task: &str| format!("skill s; its quality was measured with the task none, not with {task}");
    assert!(said(&["--skill", "s"]).contains(&only("narrow")));
    assert!(said(&["--skill", "s", "--task", "general"]).contains(&only("general")));
    assert!(said(&["--skill", "s", "--task", "none"]).contains("\nskill s\n"));
    measure(&[]);
    assert!(said(&["--skill", "s"]).contains("\nskill s\n"));
    assert!(said(&["--skill", "s", "--task", "none"]).contains("measured with the task narrow, not with none"));
    let parity = run(&["parity", model, "-c", "48", "--skill", "s", "--json"]).json();
    assert_eq!(parity["cases"], parity["passed"]);
}

/// Would fail: the cost of a plan differs from the counters of a run.
#[test]
fn plans_cost_what_runs_cost() {
    let dir = tempfile::tempdir().unwrap();
    let model = &masked(&dir);
    let mut costs = Vec::new();
    for flags in [
        &["--task", "none"][..],
        &[],
        &["--task", "narrow"],
        &["--skill", "s"],
        &["--skill", "s", "--task", "none"],
        &["--blend", "s:0.25,bare:0.75"],
        &["--blend", "s:0.25,bare:0.75", "--task", "none"],
    ] {
        let ran = run(&[&["run", model, "-c", "32"], &FLAGS[..], flags].concat()).json();
        let planned = run(&[&["bench", model, "--plan", "-c", "32", "--json"], flags].concat()).json();
        let programs = planned["programs"].as_array().unwrap();
        let decode = programs.iter().find(|program| program["program"] == "decode").unwrap();
        assert_eq!(decode["weight_bytes"], ran["counters"]["weight_bytes"], "{flags:?}");
        assert_eq!(decode["dispatches"], ran["counters"]["dispatches"], "{flags:?}");
        assert_eq!(planned["task"], ran["task"], "{flags:?}");
        costs.push(decode["weight_bytes"].as_u64().unwrap());
    }
    let [none, general, narrow, skill, unmasked, blend, unmasked_blend] = costs[..] else {
        panic!("{costs:?}")
    };
    assert!(none > general && general > narrow && narrow > skill, "{costs:?}");
    assert!(none > unmasked && unmasked > skill, "{costs:?}");
    // Blended weights are f32. The file's mask is active, because the two skills have different tasks.
    assert!(unmasked_blend > blend && blend > none, "{costs:?}");
    run(&["bench", "--plan", "--synthetic", "llama-8b", "--skill", "s"]).fails(2, "Usage");
    run(&["bench", "--plan", model, "--skill", "auto"]).fails(2, "Usage");
    run(&["bench", "--plan", model, "--task", "wide"]).fails(2, "Usage");
    let file = interop("qwen2-q4tp-gfx-skillfile.cmf");
    run(&["bench", "--plan", &file]).fails(1, "SkillFile");
}

#[test]
fn commands_without_a_prompt_do_not_offer_auto() {
    for (command, offers) in [
        ("bench", false),
        ("parity", false),
        ("run", true),
        ("ppl", true),
        ("logits", true),
    ] {
        let help = run(&[command, "--help"]).stdout;
        let skills: String = help.split("--skill <ID>").nth(1).unwrap().chars().take(600).collect();
        assert_eq!(skills.contains("auto"), offers, "{command}: {skills}");
    }
}

/// Would fail: the help lists fewer sources than are supported.
#[test]
fn help_names_every_source_of_a_skill() {
    let help = run(&["skill", "add", "--help"]).stdout;
    let source = help
        .lines()
        .find(|line| line.trim_start().starts_with("<SRC>"))
        .unwrap();
    for kind in [".cmf", ".gguf", ".safetensors", "Hugging Face directory"] {
        assert!(source.contains(kind), "{kind}: {source}");
    }
}

#[test]
fn missing_files_give_the_same_error_everywhere() {
    let dir = tempfile::tempdir().unwrap();
    let model = &file(&dir, "model.cmf", "");
    std::fs::copy(interop("qwen2-q4tp.cmf"), model).unwrap();
    let (gone, out) = (
        &file(&dir, "gone.cmf", ""),
        &dir.path().join("out.cmf").display().to_string(),
    );
    std::fs::remove_file(gone).unwrap();
    for arguments in [
        &["sign", gone, "--key", model][..],
        &["defrag", gone, "--task", "t", "-o", out],
        &["compact", gone, "-o", out],
        &["shard", gone, "--shard-max-gb", "1", "-o", out],
        &[
            "moe-mask", gone, "--task", "t", "--stats", model, "--cover", "0.5", "-o", out,
        ],
        &["skill", "add", gone, model, "--id", "a"],
        &["skill", "add", model, gone, "--id", "a"],
        &["skill", "remove", gone, "a"],
        &["skill", "export", model, "a", "--base", gone, "-o", out],
        &["skill", "apply", model, gone, "-o", out],
        &["skill", "list", gone],
    ] {
        let message = run(arguments).fails(1, "Io");
        assert!(
            message.starts_with(&format!("{gone}: no such file; ")) && message.contains(": model.cmf"),
            "{arguments:?}: {message}"
        );
    }
}
