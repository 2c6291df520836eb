//! Skills from outside: flags, what is said about them, and the commands that run a model for them.

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
    assert!(said.contains("skill alpha; how good") && none != alpha, "{said}");
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
        has(&ran.json(), &["out", "bytes"]);
        let said = &ran.stderr;
        assert!(said.contains("3 examples, 2 directions behind layer 2"), "{said}");
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
    assert!(!answer(model, &["--skill", "alpha"]).1.contains("not measured"));
    assert_eq!(run(&["verify", model]).code, Some(0));

    let fit = |id: &str, file: &str, flags: &[&str]| run(&[&["skill", "fit", model, id, "-f", file], flags].concat());
    fit("nobody", &law, &[]).fails(2, "Usage");
    fit("alpha", text, &[]).fails(2, "Usage");
    fit("alpha", &law, &["--phi-layer", "3"]).fails(2, "Usage");
    fit("alpha", &law, &["--rank", "0"]).fails(2, "Usage");
    for bad in ["{}", "[1]", "[[-1], [2]]", "["] {
        let bad = file(&dir, "bad.json", bad);
        fit("alpha", &bad, &[]).fails(1, "Parse");
    }
}
