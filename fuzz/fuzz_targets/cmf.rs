//! Opens, verifies, binds and plans a CMF file, and runs small networks on the CPU.
#![no_main]

use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::graph::Measured;
use cmf_gpu::host::HostExecutor;
use cmf_gpu::lm::run::{Cancel, Generation, Session};
use cmf_gpu::lm::{ExpertOptions, LowerOptions, lower};
use cmf_gpu::model::{HeadInput, bind};
use cmf_gpu::op::Kv;
use cmf_gpu::sampling::Sampling;
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
    let Ok(container) = CmfContainer::open(path) else {
        return;
    };
    let _ = container.verify(&mut |_, _| {});
    for id in 0..container.infos().len() {
        let _ = container.bytes(id);
    }
    let container = Arc::new(container);
    let Ok(model) = bind(&container.header().arch, container.as_ref()) else {
        return;
    };
    let options = LowerOptions {
        ctx: 16,
        chunk: 8,
        kv: Kv::F16,
        max_binding: u64::MAX / 2,
        all_logits: false,
        drafts: 0,
        draft_input: HeadInput::Stream,
        experts: ExpertOptions::default(),
    };
    let Ok(plan) = lower(&model, container.as_ref(), &options, &Measured::default()) else {
        return;
    };
    // A large network is slow; that is no finding.
    let graph = &plan.graph;
    if graph.buffer_bytes() > 16 << 20 || graph.weight_bytes() > 1 << 20 || model.layers.len() * model.loops > 16 {
        return;
    }
    // Use the last mask if the network can run it.
    let masked = model
        .masks
        .masks
        .last()
        .and_then(|mask| plan.with_mask(Some(mask)).ok());
    let plan = masked.unwrap_or(plan);
    let Ok(executor) = HostExecutor::new(plan.graph.clone(), plan.selection.clone(), container) else {
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
    // Half of the mutations change one section and update its length in the envelope.
    let section = sections(&data[..size]).into_iter().nth(seed as usize % 4).flatten();
    if let Some(section) = section.filter(|section| seed & 8 == 0 && !section.is_empty()) {
        let old = &data[section.clone()];
        let new = if seed.is_multiple_of(4) && seed & 16 == 0 {
            other_number(old, seed >> 5)
        } else {
            mutated(old, section.start >= 4096 && section.end < size)
        };
        if let Some(file) = splice(&data[..size], section, &new).filter(|file| file.len() <= max_size) {
            data[..file.len()].copy_from_slice(&file);
            return file.len();
        }
    }
    fuzzer_mutate(data, size, max_size)
});

/// Mutates bytes; keeps their number if the length is `fixed`.
fn mutated(old: &[u8], fixed: bool) -> Vec<u8> {
    let mut bytes = old.to_vec();
    let max_len = old.len() + if fixed { 0 } else { 256 };
    bytes.resize(max_len, 0);
    let len = fuzzer_mutate(&mut bytes, old.len(), max_len);
    bytes.truncate(if fixed { max_len } else { len });
    bytes
}
