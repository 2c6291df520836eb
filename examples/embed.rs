//! An application shares its own GPU device with the engine: load, stream an answer, and cancel it after 20 seconds.
//!
//! `cargo run --release --example embed -- model.cmf "Write a long story."`

use cmf_gpu::{AnswerOptions, Cancel, Device, DeviceOptions, Engine, LoadOptions, Message, wgpu};
use std::io::Write;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, model, prompt] = arguments.as_slice() else {
        return Err("usage: embed MODEL PROMPT".into());
    };

    // The application's own device, with the limits of the adapter and, if the adapter has it, the feature SUBGROUP.
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
    let mut engine = Engine::load_on(model, shared, &LoadOptions::default(), &mut progress)?;
    eprintln!("\n{:?}", engine.device_report());

    // A "Stop" button: any thread may cancel the answer.
    let cancel = Cancel::new();
    let button = cancel.clone();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(20));
        button.cancel();
    });
    let messages = [Message::user(prompt)];
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
