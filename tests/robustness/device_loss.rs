//! The device goes away while it works: driver resets, laptops that sleep, eGPUs that are unplugged.

use crate::permutation::{PROMPT, Permutation, greedy};
use cmf_gpu::engine::Engine;
use cmf_gpu::gpu::{Device, DeviceOptions};
use cmf_gpu::options::LoadOptions;
use cmf_gpu::session::Cancel;
use cmf_gpu::{Kind, Result};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

/// A device of the host application's own, so that it can be taken away, and the engine's view of it.
fn device() -> (wgpu::Device, Arc<Device>) {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.flags = wgpu::InstanceFlags::empty();
    let instance = wgpu::Instance::new(descriptor);
    let adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::VULKAN | wgpu::Backends::PRIMARY));
    let adapter = adapters.into_iter().next().expect("these tests need an adapter");
    let descriptor = wgpu::DeviceDescriptor {
        required_features: wgpu::Features::SUBGROUP & adapter.features(),
        required_limits: adapter.limits(),
        ..Default::default()
    };
    let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).unwrap();
    let shared = Device::from_wgpu(device.clone(), queue, DeviceOptions::default()).unwrap();
    (device, Arc::new(shared))
}

fn load(path: &Path, device: &Arc<Device>) -> Result<Engine> {
    let options = LoadOptions {
        ctx: Some(512),
        ..LoadOptions::default()
    };
    Engine::load_on(path, device.clone(), &options, &mut |_, _| ControlFlow::Continue(()))
}

fn lost<T>(result: Result<T>) {
    match result {
        Ok(_) => panic!("a device that is gone has an answer"),
        Err(err) => assert_eq!(err.kind, Kind::DeviceLost, "{err}"),
    }
}

/// A lost device panics, hangs, or takes what was said with it; later calls compute nonsense.
#[test]
fn a_device_lost_in_an_answer_keeps_the_text_and_stays_lost() {
    let (_dir, path) = Permutation::repeating(&[b"a", b"b"]).file();
    let (raw, shared) = device();
    let mut engine = load(&path, &shared).unwrap();
    let mut streamed = String::new();
    let told = engine.continue_tokens(&[PROMPT], &greedy(400, &[]), &Cancel::new(), &mut |text| {
        streamed.push_str(text);
        if streamed.len() == 5 {
            raw.destroy();
        }
        ControlFlow::Continue(())
    });
    lost(told);
    assert!(
        (5..400).contains(&streamed.len()) && "ab".repeat(200).starts_with(&streamed),
        "{streamed}"
    );
    for prompt in [&[PROMPT][..], &[PROMPT; 300]] {
        lost(
            engine.continue_tokens(prompt, &greedy(3, &[]), &Cancel::new(), &mut |_| {
                ControlFlow::Continue(())
            }),
        );
    }
    lost(engine.session().logits(&[PROMPT], 0, false, &mut |_, _, _| Ok(())));
    // Another engine on the same device.
    lost(load(&path, &shared));
}

/// A device that goes away in the middle of a load or of a prompt.
#[test]
fn a_device_lost_while_loading_or_reading_a_prompt_is_an_error() {
    let (_dir, path) = Permutation::repeating(&[b"a", b"b"]).file();
    let (raw, shared) = device();
    let options = LoadOptions::default();
    lost(Engine::load_on(&path, shared, &options, &mut |_, _| {
        raw.destroy();
        ControlFlow::Continue(())
    }));
    let (raw, shared) = device();
    let mut engine = load(&path, &shared).unwrap();
    raw.destroy();
    lost(
        engine.continue_tokens(&[PROMPT; 300], &greedy(3, &[]), &Cancel::new(), &mut |_| {
            ControlFlow::Continue(())
        }),
    );
}
