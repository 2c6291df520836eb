//! An application with a GPU device of its own shares it with the engine: load, stream an answer, stop it half-way.
//!
//! `cargo run --release --example embed -- model.cmf "Write a long story."`

use cmf_gpu::engine::Engine;
use cmf_gpu::gpu::{Device, DeviceOptions, wgpu};
use cmf_gpu::options::{AnswerOptions, LoadOptions};
use cmf_gpu::session::Cancel;
use serde_json::json;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, model, prompt] = arguments.as_slice() else {
        return Err("usage: embed MODEL PROMPT".into());
    };

    // The application's own device. It should have the adapter's limits and, where there is one, the feature SUBGROUP.
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    let adapter = pollster::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default()))?;
    let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
        required_limits: adapter.limits(),
        required_features: adapter.features() & wgpu::Features::SUBGROUP,
        ..Default::default()
    }))?;
    let shared = Arc::new(Device::from_wgpu(device, queue, DeviceOptions::default())?);

    let mut progress = |done: u64, total: u64| {
        eprint!("\rloading: {} %", done * 100 / total.max(1));
        ControlFlow::Continue(())
    };
    let mut engine = Engine::load_on(Path::new(model), shared, &LoadOptions::default(), &mut progress)?;
    eprintln!("\n{:?}", engine.placement());

    // A "Stop" button: any thread may press it.
    let cancel = Cancel::new();
    let button = cancel.clone();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(20));
        button.cancel();
    });
    let messages = [json!({"role": "user", "content": prompt})];
    let answer = engine.chat(&messages, &AnswerOptions::default(), &cancel, &mut |text| {
        print!("{text}");
        match std::io::stdout().flush() {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    })?;
    println!("\n[{} tokens, finish: {}]", answer.tokens.len(), answer.finish.name());
    Ok(())
}
