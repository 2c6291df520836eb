//! What needs a device: kernels, programs and whole models. A test that finds no adapter fails; software Vulkan counts.

mod cuts;
mod experts;
mod fields;
#[path = "../golden/mod.rs"]
mod golden;
mod goldens;
mod host;
mod interop;
mod invariance;
mod masks;
mod mixed;
mod mixed_experts;
mod paged;
mod paging;
mod paging_masks;
mod paging_types;
mod parity;
mod pictures;
mod ragged;
mod recurrent;
mod rotation;
mod scale;
mod side_by_side;
mod skills;
mod speculation;
mod synthetic;
mod tokens;

use cmf_gpu::convert::{Options, convert};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::gpu::{Device, DeviceOptions, GpuExecutor, adapters};
use cmf_gpu::graph::{BatchShape, Executor, Measured, Resolved, Step};
use cmf_gpu::host::HostExecutor;
use cmf_gpu::lm::run::Session;
use cmf_gpu::lm::{ExpertOptions, LowerOptions, Plan, ProgramKind, lower, sequence_words, slot_words};
use cmf_gpu::model::{HeadInput, bind};
use cmf_gpu::op::{BufferId, Kv, SlotState};
use cmf_gpu::parity::{Case, Outcome, Subject, cases, programs};
use cmf_gpu::sampling::Sampling;
use cmf_gpu::source::{Arch, Tensors};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};

/// Where a plan runs.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Device,
    Host,
}

const PLACES: [Place; 2] = [Place::Device, Place::Host];

/// A new device on the best adapter of the machine, with these options.
fn open(options: DeviceOptions) -> Arc<Device> {
    let all = adapters();
    let Some(best) = all.first() else {
        panic!(
            "this test needs an adapter and found none: install a Vulkan driver, lavapipe (mesa-vulkan-drivers) will do"
        );
    };
    Arc::new(Device::open(best, options).unwrap_or_else(|err| panic!("adapter {}: {err}", best.name)))
}

/// Devices with default options that no test uses at the moment.
static IDLE: Mutex<Vec<Arc<Device>>> = Mutex::new(Vec::new());

/// The device of a test thread. It goes back to [`IDLE`] when the thread ends.
struct Borrowed(Arc<Device>);

impl Drop for Borrowed {
    fn drop(&mut self) {
        IDLE.lock().unwrap().push(self.0.clone());
    }
}

thread_local! {
    static BORROWED: Borrowed = {
        let idle = IDLE.lock().unwrap().pop();
        Borrowed(idle.unwrap_or_else(|| open(DeviceOptions::default())))
    };
}

/// A device with default options. Tests that run at the same time get different ones, because a software driver compiles all
/// shaders of a device on one thread. Later tests use the pipelines of earlier ones.
fn device() -> Arc<Device> {
    BORROWED.with(|borrowed| borrowed.0.clone())
}

/// A golden model converted to a type of weights. The directory goes with the guard.
fn golden(name: &str, quant: Dtype) -> (Arc<CmfContainer>, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.cmf");
    convert(&golden::dir(name), &file, &Options::new(quant), &mut |_| {
        ControlFlow::Continue(())
    })
    .unwrap();
    (Arc::new(CmfContainer::open(&file).unwrap()), dir)
}

/// Options for the default device: a cache of f32, chunks of 16 tokens, nothing optional.
fn options(ctx: u32) -> LowerOptions {
    LowerOptions {
        ctx,
        chunk: 16,
        kv: Kv::F32,
        max_binding: device().max_binding(),
        all_logits: false,
        drafts: 0,
        draft_input: HeadInput::Stream,
        experts: ExpertOptions::default(),
    }
}

/// The plan of a network.
fn plan(arch: &Arch, tensors: &dyn Tensors, options: &LowerOptions) -> cmf_gpu::Result<Plan> {
    lower(&bind(arch, tensors)?, tensors, options, &Measured::default())
}

/// The plan of a container.
fn plan_of(container: &CmfContainer, options: &LowerOptions) -> Plan {
    plan(&container.header().arch, container, options).unwrap()
}

/// A plan's graph on a device.
fn upload(device: Arc<Device>, plan: &Plan, tensors: Arc<dyn Tensors>) -> cmf_gpu::Result<GpuExecutor> {
    let (graph, selection) = (plan.graph.clone(), plan.selection.clone());
    GpuExecutor::new(device, graph, selection, tensors, &mut |_, _| Ok(()))
}

/// A plan's graph on the default device or the host.
fn executor(place: Place, plan: &Plan, tensors: Arc<dyn Tensors>) -> Box<dyn Executor> {
    match place {
        Place::Device => Box::new(upload(device(), plan, tensors).unwrap()),
        Place::Host => Box::new(HostExecutor::new(plan.graph.clone(), plan.selection.clone(), tensors).unwrap()),
    }
}

/// A session on the default device or the host.
fn session(place: Place, plan: &Plan, tensors: Arc<dyn Tensors>) -> Session {
    Session::new(plan.clone(), executor(place, plan, tensors))
}

/// Writes settings that choose the most probable token.
fn write_greedy(executor: &mut dyn Executor, plan: &Plan) {
    let settings = Sampling::greedy().words(&[]).unwrap();
    executor.write(plan.buffers.settings, &settings).unwrap();
}

/// Writes the batch of a run whose tokens follow each other from a position on, and the state of a sampler that has sampled
/// nothing. Returns the size of the run.
fn begin(executor: &mut dyn Executor, plan: &Plan, ids: &[u32], position: u32) -> BatchShape {
    let words = sequence_words(ids, position);
    executor.write(plan.buffers.batch, &words).unwrap();
    executor.write(plan.buffers.slots, &slot_words(plan.ctx)).unwrap();
    let tokens = ids.len() as u32;
    BatchShape {
        tokens,
        end: position + tokens,
    }
}

/// Runs a whole program as the buffers are.
fn run(executor: &mut dyn Executor, plan: &Plan, kind: ProgramKind, shape: BatchShape) -> cmf_gpu::Result<SlotState> {
    let ticket = executor.submit(kind as usize, 0..plan.program(kind).steps.len(), shape)?;
    Ok(SlotState::from_words(&executor.wait(ticket)?).unwrap())
}

/// The steps of a program that the plan's selection runs.
fn selected(plan: &Plan, kind: ProgramKind) -> Vec<(&Step, Resolved)> {
    let program = plan.program(kind);
    let resolved = program.resolve(&plan.selection).into_iter();
    resolved
        .map(|resolved| (&program.steps[resolved.step], resolved))
        .collect()
}

/// A buffer by its label.
fn buffer(plan: &Plan, label: &str) -> BufferId {
    let found = plan.graph.buffers.iter().position(|buffer| buffer.label == label);
    found.unwrap_or_else(|| panic!("no buffer {label}"))
}

/// Compares every step of a plan's programs on the device with the host.
fn compare_steps(plan: &Plan, tensors: Arc<dyn Tensors>) -> Outcome {
    compare_subjects(&subject(plan, tensors.clone()), &subject(plan, tensors))
}

/// The same, of `tried` on the device with `reference` on the host.
fn compare_subjects(tried: &Subject, reference: &Subject) -> Outcome {
    programs(&device(), tried, reference, &mut |_, _, _| Ok(())).unwrap()
}

fn subject(plan: &Plan, tensors: Arc<dyn Tensors>) -> Subject {
    let plan = Arc::new(plan.clone());
    Subject { plan, tensors }
}

/// Fails with the failures of an outcome, or if nothing was compared.
#[track_caller]
fn all_pass(outcome: &Outcome) {
    let failures: Vec<_> = outcome
        .failed
        .iter()
        .map(|f| format!("{}: {}", f.name, f.what))
        .collect();
    assert!(
        failures.is_empty(),
        "{} of {}:\n{}",
        failures.len(),
        outcome.cases,
        failures.join("\n")
    );
    assert!(outcome.cases > 0 && outcome.passed == outcome.cases);
}

/// The case of this name.
fn case(name: &str) -> Case {
    let found = cases().into_iter().find(|case| case.name() == name);
    found.unwrap_or_else(|| panic!("no case {name}"))
}
