//! What needs a device: kernels, programs and whole models. A test that finds no adapter fails; software Vulkan counts.

mod columns;
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
mod ragged;
mod recurrent;
mod rotation;
mod scale;
mod skills;
mod speculation;
mod synthetic;

use cmf_gpu::container::Container;
use cmf_gpu::convert::{Options, convert};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::gpu::{Device, DeviceOptions, adapters};
use cmf_gpu::model::bind;
use cmf_gpu::parity::{Case, cases};
use cmf_gpu::program::{Plan, PlanOptions, plan};
use std::ops::ControlFlow;
use std::sync::{Arc, LazyLock};

/// The machine's best adapter, opened anew with these options.
fn open(options: DeviceOptions) -> Arc<Device> {
    let all = adapters();
    let Some(best) = all.first() else {
        panic!(
            "this test needs an adapter and found none: install a Vulkan driver, lavapipe (mesa-vulkan-drivers) will do"
        );
    };
    Arc::new(Device::open(best, options).unwrap_or_else(|err| panic!("adapter {}: {err}", best.name)))
}

static DEFAULT: LazyLock<Arc<Device>> = LazyLock::new(|| open(DeviceOptions::default()));

/// The device with default options, shared by all tests: pipelines are made once.
fn device() -> Arc<Device> {
    DEFAULT.clone()
}

/// A golden model converted to a type of weights. The directory goes with the guard.
fn golden(name: &str, quant: Dtype) -> (Arc<Container>, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.cmf");
    convert(&golden::dir(name), &file, &Options::new(quant), &mut |_| {
        ControlFlow::Continue(())
    })
    .unwrap();
    (Arc::new(Container::open(&file).unwrap()), dir)
}

/// The plan of a container.
fn plan_of(container: &Container, options: &PlanOptions) -> Arc<Plan> {
    let model = bind(&container.header().arch, container).unwrap();
    Arc::new(plan(&model, container, options).unwrap())
}

/// The case of this name.
fn case(name: &str) -> Case {
    let found = cases().into_iter().find(|case| case.name() == name);
    found.unwrap_or_else(|| panic!("no case {name}"))
}
