//! Bind group layouts and compute pipelines of one device.

use super::module::module;
use super::scope::Scope;
use crate::error::{Result, bail};
use crate::op::{Access, Kernel};
use crate::shader::{Variant, compose};
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The layout of a kernel's bindings. All variants of an operator share it.
pub struct Layout {
    pub bindings: wgpu::BindGroupLayout,
    pub pipeline: wgpu::PipelineLayout,
}

/// The pipelines of a device, and the layouts of its kernels.
pub struct Pipelines {
    device: wgpu::Device,
    /// Whether bounds are checked.
    checked: bool,
    layouts: Mutex<HashMap<Kernel, Arc<Layout>>>,
    pipelines: Mutex<HashMap<Variant, Arc<wgpu::ComputePipeline>>>,
    compiled: AtomicU64,
    microseconds: AtomicU64,
}

impl Pipelines {
    pub fn new(device: wgpu::Device, checked: bool) -> Pipelines {
        Pipelines {
            device,
            checked,
            layouts: Mutex::default(),
            pipelines: Mutex::default(),
            compiled: AtomicU64::new(0),
            microseconds: AtomicU64::new(0),
        }
    }

    /// The number of pipelines compiled so far, and the microseconds that took, summed over threads.
    pub fn counters(&self) -> (u64, u64) {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (load(&self.compiled), load(&self.microseconds))
    }

    /// The layout of a kernel: its parameters, then its storage bindings.
    pub fn layout(&self, kernel: Kernel) -> Arc<Layout> {
        let make = || {
            let spec = kernel.spec();
            let storage = spec.storage().map(|(_, access, _)| storage(access));
            let bindings = std::iter::once(wgpu::BufferBindingType::Uniform).chain(storage);
            Arc::new(self.make_layout(spec.name, bindings))
        };
        lock(&self.layouts).entry(kernel).or_insert_with(make).clone()
    }

    /// A layout of these bindings, from 0 on.
    pub fn make_layout(&self, name: &str, bindings: impl Iterator<Item = wgpu::BufferBindingType>) -> Layout {
        let entry = |(binding, ty): (u32, wgpu::BufferBindingType)| wgpu::BindGroupLayoutEntry {
            binding,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer {
                ty,
                has_dynamic_offset: false,
                min_binding_size: None,
            },
            count: None,
        };
        let entries: Vec<_> = (0..).zip(bindings).map(entry).collect();
        let bindings = self.device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: Some(name),
            entries: &entries,
        });
        let pipeline = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(name),
            bind_group_layouts: &[Some(&bindings)],
            immediate_size: 0,
        });
        Layout { bindings, pipeline }
    }

    /// Compiles those of the variants that are missing, in order, on as many threads as there are cores.
    ///
    /// Errors: `DeviceError` with the kernel's name when the driver refuses one.
    pub fn compile(&self, variants: &[Variant]) -> Result<()> {
        let mut missing = variants.to_vec();
        missing.retain(|variant| !lock(&self.pipelines).contains_key(variant));
        let next = AtomicUsize::new(0);
        let work = || -> Result<()> {
            while let Some(&variant) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                let layout = self.layout(variant.kernel);
                let pipeline = self.make(&variant.name(), &compose(&variant), &layout)?;
                lock(&self.pipelines).insert(variant, Arc::new(pipeline));
            }
            Ok(())
        };
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..cores.min(missing.len())).map(|_| scope.spawn(work)).collect();
            workers.into_iter().try_for_each(|worker| match worker.join() {
                Ok(result) => result,
                Err(_) => bail!(DeviceError, "the driver's shader compiler crashed"),
            })
        })
    }

    /// A pipeline. Errors: `Internal` if [`Pipelines::compile`] did not compile it.
    pub fn get(&self, variant: &Variant) -> Result<Arc<wgpu::ComputePipeline>> {
        match lock(&self.pipelines).get(variant) {
            Some(pipeline) => Ok(pipeline.clone()),
            None => bail!(Internal, "pipeline {} was not compiled", variant.name()),
        }
    }

    /// Compiles the only entry point of a shader text. Errors: `DeviceError` with the name.
    pub fn make(&self, name: &str, text: &str, layout: &Layout) -> Result<wgpu::ComputePipeline> {
        let start = Instant::now();
        let scope = Scope::open(&self.device);
        let descriptor = wgpu::ShaderModuleDescriptor {
            label: Some(name),
            source: wgpu::ShaderSource::Naga(Cow::Owned(module(name, text)?)),
        };
        let module = match self.checked {
            true => self.device.create_shader_module(descriptor),
            false => self.trusted(descriptor),
        };
        let compilation_options = wgpu::PipelineCompilationOptions {
            zero_initialize_workgroup_memory: self.checked,
            ..Default::default()
        };
        let pipeline = self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(name),
            layout: Some(&layout.pipeline),
            module: &module,
            entry_point: Some("main"),
            compilation_options,
            cache: None,
        });
        scope.finish().map_err(|err| err.context(format!("kernel {name}")))?;
        self.compiled.fetch_add(1, Ordering::Relaxed);
        let elapsed = start.elapsed().as_micros() as u64;
        self.microseconds.fetch_add(elapsed, Ordering::Relaxed);
        Ok(pipeline)
    }

    #[expect(
        unsafe_code,
        reason = "bounds and loop checks cost up to a tenth of a kernel's speed"
    )]
    fn trusted(&self, descriptor: wgpu::ShaderModuleDescriptor<'_>) -> wgpu::ShaderModule {
        // SAFETY: every text comes from this crate's shader files. Loops are bounded by constants, by parameters, or by
        // sizes that the graph's builder derived from buffers of at least that size. Divisors are constants or checked
        // dimensions. The tests run every kernel with and without checks and compare the bits.
        unsafe {
            self.device
                .create_shader_module_trusted(descriptor, wgpu::ShaderRuntimeChecks::unchecked())
        }
    }
}

/// The binding type of a storage buffer.
pub fn storage(access: Access) -> wgpu::BufferBindingType {
    wgpu::BufferBindingType::Storage {
        read_only: access == Access::Read,
    }
}

/// Locks, even if another thread panicked while it held the lock: the maps are valid after every statement.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
