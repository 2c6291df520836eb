//! Models of another writer continue their recorded prompts with the recorded tokens, on the device and on the host.

use cmf_gpu::container::Container;
use cmf_gpu::gpu::GpuExecutor;
use cmf_gpu::host::HostExecutor;
use cmf_gpu::kernel::Kv;
use cmf_gpu::program::{Executor, ExpertOptions, PlanOptions};
use cmf_gpu::sampling::Sampling;
use cmf_gpu::session::{Cancel, Generation, Session};
use serde_json::Value;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

/// A recorded token may be missed where its logit is less than this above the next one's.
const NEAR_TIE: f64 = 2e-3;

pub fn tokens(value: &Value) -> Vec<u32> {
    let ids = value.as_array().unwrap().iter();
    ids.map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Greedy tokens after a prompt, none of which ends the answer.
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

/// Continues a recorded prompt and holds the tokens against those recorded.
pub fn compare(session: &mut Session, run: &Value, what: &str) {
    let (prompt, wanted) = (tokens(&run["prompt"]), tokens(&run["tokens"]));
    let found = greedy(session, &prompt, wanted.len());
    if let Some(at) = (0..wanted.len()).find(|&at| found.get(at) != Some(&wanted[at])) {
        let gap = run["gaps"][at].as_f64().unwrap();
        assert!(
            gap < NEAR_TIE,
            "{what}, prompt of {}: token {at} is {found:?}, wanted {wanted:?}, {gap} apart",
            prompt.len()
        );
    }
}

/// Runs a file of the manifest; how many runs were compared.
fn check(dir: &Path, entry: &Value) -> usize {
    let name = entry["name"].as_str().unwrap();
    let tensors = Arc::new(Container::open(&dir.join(entry["file"].as_str().unwrap())).unwrap());
    let device = crate::device();
    let mut compared = 0;
    // With drafts where there is a head to make them: the same tokens.
    let head = tensors.header().arch.mtp.is_some();
    let runs = [(false, 0), (true, 0), (false, 3), (true, 3)];
    for (on_host, drafts) in runs.into_iter().filter(|&(_, drafts)| head || drafts == 0) {
        let options = PlanOptions {
            ctx: 96,
            chunk: 16,
            // As exact as the recorded runs.
            kv: Kv::F32,
            max_binding: device.max_binding(),
            all_logits: false,
            drafts,
            experts: ExpertOptions::default(),
        };
        let plan = crate::plan_of(&tensors, &options);
        let executor: Box<dyn Executor> = match on_host {
            true => Box::new(HostExecutor::new(plan.clone(), tensors.clone()).unwrap()),
            false => Box::new(GpuExecutor::new(device.clone(), plan.clone(), &*tensors, &mut |_, _| Ok(())).unwrap()),
        };
        let mut session = Session::new(plan, executor);
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
                &format!("{name}, {kind}, host {on_host}, {drafts} drafts"),
            );
            compared += 1;
        }
    }
    compared
}

#[test]
fn models_of_another_writer_say_what_it_recorded() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/interop");
    let manifest: Value = serde_json::from_slice(&std::fs::read(dir.join("manifest.json")).unwrap()).unwrap();
    let mut compared = 0;
    for entry in manifest["files"].as_array().unwrap() {
        if entry["expect"] == "ok" {
            compared += check(&dir, entry);
        }
    }
    // Six files, three prompts each, on two executors; one of them with drafts too, one with two masks and a default one.
    assert_eq!(compared, 42 + 2 * 3 * 3);
}
