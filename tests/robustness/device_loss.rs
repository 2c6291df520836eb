//! Loss of the device while it works, as in driver resets, sleeping laptops or unplugged eGPUs.

use crate::permutation::{PROMPT, Permutation, greedy};
use cmf_gpu::Cancel;
use cmf_gpu::engine::Engine;
use cmf_gpu::gpu::{Device, DeviceOptions};
use cmf_gpu::options::LoadOptions;
use cmf_gpu::{Kind, Result};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A device of the host application, which a test can destroy, and the same device for the engine.
fn device() -> (wgpu::Device, Arc<Device>) {
    let (raw, _, shared) = with_timeout(None);
    (raw, shared)
}

/// The same with its queue, and with the engine's timeout.
fn with_timeout(timeout: Option<Duration>) -> (wgpu::Device, wgpu::Queue, Arc<Device>) {
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
    let options = DeviceOptions {
        timeout,
        ..DeviceOptions::default()
    };
    let shared = Device::from_wgpu(device.clone(), queue.clone(), options).unwrap();
    (device, queue, Arc::new(shared))
}

fn load(path: &Path, device: &Arc<Device>) -> Result<Engine> {
    let options = LoadOptions::default().ctx(512);
    Engine::load_on(path, device.clone(), &options, &mut |_, _| ControlFlow::Continue(()))
}

fn lost<T>(result: Result<T>) {
    match result {
        Ok(_) => panic!("a device that is gone has an answer"),
        Err(err) => assert_eq!(err.kind, Kind::DeviceLost, "{err}"),
    }
}

/// Guards against a panic, a hang or lost text when the device is lost, and against wrong results of later calls.
#[test]
fn a_device_lost_in_an_answer_keeps_the_text_and_stays_lost() {
    let (_dir, path) = Permutation::repeating(&[b"a", b"b"]).file();
    let (raw, shared) = device();
    let mut engine = load(&path, &shared).unwrap();
    let mut streamed = String::new();
    let reply = engine.continue_tokens(&[PROMPT], &greedy(400, &[]), &Cancel::new(), &mut |text| {
        streamed.push_str(text);
        if streamed.len() == 5 {
            raw.destroy();
        }
        ControlFlow::Continue(())
    });
    lost(reply);
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

/// Guards against a panic or hang when the device is lost while a model is loaded or a prompt is read.
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

/// Keeps the device busy for seconds with a serial loop.
fn occupy(device: &wgpu::Device, queue: &wgpu::Queue) {
    let source = "
        @group(0) @binding(0) var<storage, read_write> data: array<u32>;
        @compute @workgroup_size(1) fn main() {
            var x = data[0];
            for (var i = 0u; i < data[1]; i += 1u) { x = x * 1664525u + 1013904223u + (x >> 7u); }
            data[0] = x;
        }";
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
        label: None,
        source: wgpu::ShaderSource::Wgsl(source.into()),
    });
    let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: None,
        layout: None,
        module: &module,
        entry_point: Some("main"),
        compilation_options: wgpu::PipelineCompilationOptions::default(),
        cache: None,
    });
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST;
    let buffer = device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 8,
        usage,
        mapped_at_creation: false,
    });
    queue.write_buffer(&buffer, 4, &65_000u32.to_le_bytes());
    let entry = wgpu::BindGroupEntry {
        binding: 0,
        resource: buffer.as_entire_binding(),
    };
    let group = device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &pipeline.get_bind_group_layout(0),
        entries: &[entry],
    });
    let mut encoder = device.create_command_encoder(&Default::default());
    let mut pass = encoder.begin_compute_pass(&Default::default());
    pass.set_pipeline(&pipeline);
    pass.set_bind_group(0, &group, &[]);
    pass.dispatch_workgroups(800, 1, 1);
    drop(pass);
    queue.submit([encoder.finish()]);
}

/// Guards against a hang of the program when the device hangs.
///
/// Lavapipe is no help here: it computes during the submission.
#[test]
#[ignore = "needs a device that computes asynchronously; scripts/test-swiftshader runs it"]
fn a_device_that_makes_no_progress_is_an_error_and_the_text_so_far_stays() {
    let (_dir, path) = Permutation::repeating(&[b"a", b"b"]).file();
    let (raw, queue, shared) = with_timeout(Some(Duration::from_millis(400)));
    let mut engine = load(&path, &shared).unwrap();
    let mut streamed = String::new();
    let mut stuck = None;
    let reply = engine.continue_tokens(&[PROMPT], &greedy(400, &[]), &Cancel::new(), &mut |text| {
        streamed.push_str(text);
        if streamed.len() == 5 {
            occupy(&raw, &queue);
            stuck = Some(Instant::now());
        }
        ControlFlow::Continue(())
    });
    let waited = stuck.unwrap().elapsed();
    let err = reply.unwrap_err();
    assert_eq!(err.kind, Kind::DeviceLost, "{err}");
    assert!(
        err.message.contains("within 400ms") && err.message.contains("hung"),
        "{err}"
    );
    assert!((5..400).contains(&streamed.len()), "{streamed}");
    assert!(waited >= Duration::from_millis(400), "{waited:?}");
    // Later calls fail at once.
    let again = Instant::now();
    lost(
        engine.continue_tokens(&[PROMPT; 300], &greedy(3, &[]), &Cancel::new(), &mut |_| {
            ControlFlow::Continue(())
        }),
    );
    assert!(again.elapsed() < Duration::from_millis(300));
    // With a longer timeout the answer arrives.
    let (raw, queue, shared) = with_timeout(Some(Duration::from_secs(600)));
    let mut engine = load(&path, &shared).unwrap();
    occupy(&raw, &queue);
    let reply = engine.continue_tokens(&[PROMPT], &greedy(4, &[]), &Cancel::new(), &mut |_| {
        ControlFlow::Continue(())
    });
    assert_eq!(reply.unwrap().text, "abab");
}
