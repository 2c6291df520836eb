//! Container: opened, verified, bound, planned, and, where it is small, run on the CPU.
#![no_main]

use cmf_gpu::container::{Container, Tensors};
use cmf_gpu::host::HostExecutor;
use cmf_gpu::kernel::Kv;
use cmf_gpu::model::bind;
use cmf_gpu::program::{ExpertOptions, PlanOptions, plan};
use cmf_gpu::sampling::Sampling;
use cmf_gpu::session::{Cancel, Generation, Session};
use cmf_gpu_fuzz::{Counting, bounded, fix_container, on_disk, other_number, sections, splice};
use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};
use std::ops::ControlFlow;
use std::sync::Arc;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fuzz_target!(|input: &[u8]| {
    let mut file = input.to_vec();
    fix_container(&mut file);
    let path = on_disk("model.cmf", &file);
    bounded(file.len(), || use_container(&path));
});

fn use_container(path: &std::path::Path) {
    let Ok(container) = Container::open(path) else { return };
    let report = container.verify(&mut |_, _| {});
    for id in 0..container.infos().len() {
        let _ = container.bytes(id);
    }
    let container = Arc::new(container);
    let Ok(model) = bind(&container.header().arch, container.as_ref()) else {
        return;
    };
    let options = PlanOptions {
        ctx: 16,
        chunk: 8,
        kv: Kv::F16,
        max_binding: u64::MAX / 2,
        all_logits: false,
        drafts: 0,
        experts: ExpertOptions::default(),
    };
    let Ok(plan) = plan(&model, container.as_ref(), &options) else {
        return;
    };
    // A large network may be slow; it is no finding.
    if plan.buffer_bytes() > 16 << 20 || plan.weight_bytes() > 1 << 20 || model.layers.len() * model.loops > 16 {
        return;
    }
    // What a run may rely on is what opening checks.
    let _ = report;
    // The last mask, if there is one that can be run.
    let masked = model.masks.masks.last().and_then(|mask| plan.with_mask(Some(mask)).ok());
    let plan = Arc::new(masked.unwrap_or(plan));
    let Ok(executor) = HostExecutor::new(plan.clone(), container) else {
        return;
    };
    let mut session = Session::new(plan, Box::new(executor));
    for prompt in [&[1, 2, 3][..], &[1, 2]] {
        if session.prefill(prompt, &Cancel::new()).is_err() {
            return;
        }
        let generation = Generation {
            sampling: Sampling::default(),
            stops: vec![0],
            max_tokens: 3,
        };
        let _ = session.generate(&generation, &Cancel::new(), &mut |_| ControlFlow::Continue(()));
    }
}

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    // Half of the mutations stay within one section, whose new length is written down where it belongs.
    let part = sections(&data[..size]).into_iter().nth(seed as usize % 4).flatten();
    if let Some(part) = part.filter(|part| seed & 8 == 0 && !part.is_empty()) {
        let old = &data[part.clone()];
        let new = if seed.is_multiple_of(4) && seed & 16 == 0 {
            other_number(old, seed >> 5)
        } else {
            mutated(old, part.start >= 4096 && part.end < size)
        };
        if let Some(file) = splice(&data[..size], part, &new).filter(|file| file.len() <= max_size) {
            data[..file.len()].copy_from_slice(&file);
            return file.len();
        }
    }
    fuzzer_mutate(data, size, max_size)
});

/// Other bytes, as many if that is `fixed`.
fn mutated(old: &[u8], fixed: bool) -> Vec<u8> {
    let mut bytes = old.to_vec();
    let room = old.len() + if fixed { 0 } else { 256 };
    bytes.resize(room, 0);
    let len = fuzzer_mutate(&mut bytes, old.len(), room);
    bytes.truncate(if fixed { room } else { len });
    bytes
}
