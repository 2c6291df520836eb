//! Models of another writer continue recorded prompts with the recorded tokens, on the device and on the host.

use crate::PLACES;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::lm::LowerOptions;
use cmf_gpu::lm::run::{Cancel, Generation, Session};
use cmf_gpu::sampling::Sampling;
use serde_json::Value;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

/// Another token may be chosen where the recorded token's logit is less than this above the next one.
const NEAR_TIE: f64 = 2e-3;

pub fn tokens(value: &Value) -> Vec<u32> {
    let ids = value.as_array().unwrap().iter();
    ids.map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Greedy tokens after a prompt, without stop tokens.
pub fn greedy(session: &mut Session, prompt: &[u32], count: usize) -> Vec<u32> {
    assert!(session.prefill(prompt, &Cancel::new()).unwrap().1.is_continue());
    let mut found = Vec::new();
    let generation = Generation {
        sampling: Sampling::greedy(),
        stops: Vec::new(),
        max_tokens: count,
    };
    let mut emit = |token| {
        found.push(token);
        ControlFlow::Continue(())
    };
    session.generate(&generation, &Cancel::new(), &mut emit).unwrap();
    found
}

/// Continues a recorded prompt and compares the tokens with the recorded ones.
pub fn compare(session: &mut Session, run: &Value, what: &str) {
    let (prompt, wanted) = (tokens(&run["prompt"]), tokens(&run["tokens"]));
    let found = greedy(session, &prompt, wanted.len());
    if let Some(at) = (0..wanted.len()).find(|&at| found.get(at) != Some(&wanted[at])) {
        let gap = run["gaps"][at].as_f64().unwrap();
        assert!(
            gap < NEAR_TIE,
            "{what}, prompt of {}: token {at} is {found:?}, expected {wanted:?}, the logits differ by {gap}",
            prompt.len()
        );
    }
}

/// Runs a file of the manifest. Returns the number of runs.
fn check(dir: &Path, entry: &Value) -> usize {
    let name = entry["name"].as_str().unwrap();
    let tensors = Arc::new(CmfContainer::open(&dir.join(entry["file"].as_str().unwrap())).unwrap());
    let mut compared = 0;
    // With drafts from a head, if there is one, the tokens are the same.
    let has_head = tensors.header().arch.mtp.is_some();
    let runs = [0, 3]
        .into_iter()
        .flat_map(|drafts| PLACES.map(|place| (place, drafts)));
    for (place, drafts) in runs.filter(|&(_, drafts)| has_head || drafts == 0) {
        let options = LowerOptions {
            drafts,
            ..crate::options(96)
        };
        let plan = crate::plan_of(&tensors, &options);
        let mut session = crate::session(place, &plan, tensors.clone());
        let masks = tensors.masks().cloned().unwrap_or_default();
        for run in entry["runs"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|run| run["kind"] != "skill")
        {
            let mask = match run["kind"].as_str() {
                Some("task") => Some(masks.find(run["task"].as_str().unwrap()).unwrap()),
                Some("default") => masks.default_mask(),
                _ => None,
            };
            let plan = session.plan().with_mask(mask).unwrap();
            session.select(plan).unwrap();
            let kind = run["kind"].as_str().unwrap();
            compare(
                &mut session,
                run,
                &format!("{name}, {kind}, {place:?}, {drafts} drafts"),
            );
            compared += 1;
        }
    }
    compared
}

#[test]
fn files_of_another_program_give_the_recorded_tokens() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/interop");
    let manifest: Value = serde_json::from_slice(&std::fs::read(dir.join("manifest.json")).unwrap()).unwrap();
    let mut compared = 0;
    for entry in manifest["files"].as_array().unwrap() {
        if entry["expect"] == "ok" {
            compared += check(&dir, entry);
        }
    }
    // Six files, three prompts each, on two executors; one file also with drafts, one with two masks and a default mask.
    assert_eq!(compared, 42 + 2 * 3 * 3);
}
