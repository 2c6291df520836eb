//! Memory of repeated loading, in a test program of its own so that only these loads are measured.
#![cfg(target_os = "linux")]

#[allow(dead_code, reason = "the other tests need more of it")]
#[path = "../robustness/permutation.rs"]
mod permutation;

use cmf_gpu::Cancel;
use cmf_gpu::engine::{Engine, open_device};
use cmf_gpu::options::{DeviceChoice, LoadOptions};
use permutation::{PROMPT, greedy, load, two_ways};
use std::ops::ControlFlow;
use std::path::Path;

fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
}

/// Loads a model file.
type Load<'a> = &'a dyn Fn(&Path) -> Engine;

/// Guards against memory leaks of repeated loading, and against state shared between models.
#[test]
fn loading_one_model_after_another_takes_no_more_memory() {
    let (a, b) = two_ways();
    let files = [a.file(), b.file()];
    let shared = LoadOptions::default().device(DeviceChoice::Index(0)).ctx(64);
    let device = open_device(&shared).unwrap().0.unwrap();
    let on_shared =
        |path: &Path| Engine::load_on(path, device.clone(), &shared, &mut |_, _| ControlFlow::Continue(())).unwrap();
    let loads: [(&str, Load); 2] = [
        ("host", &|path| load(path, DeviceChoice::Cpu, 64)),
        ("a device for all", &on_shared),
    ];
    for (name, load) in loads {
        let mut before = 0;
        for round in 0..30 {
            for i in [0, 1, 0] {
                let mut engine = load(&files[i].1);
                let reply = engine.continue_tokens(&[PROMPT], &greedy(12, &[]), &Cancel::new(), &mut |_| {
                    ControlFlow::Continue(())
                });
                assert_eq!(reply.unwrap().tokens, [&a, &b][i].path(PROMPT, 12));
            }
            // The memory of the allocator has stopped growing by then.
            if round == 9 {
                before = resident_mib();
            }
        }
        let now = resident_mib();
        assert!(
            now <= before + 10,
            "{name}: {before} MiB after 10 rounds, {now} MiB after 30"
        );
    }
}
