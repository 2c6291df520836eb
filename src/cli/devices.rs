//! `devices`: the devices that can run models.

use super::context::{Context, Outcome, Result};
use super::output::size;
use cmf_gpu::gpu::{self, Adapter};
use serde_json::{Value, json};

pub fn run(context: &mut Context) -> Result {
    let adapters = gpu::adapters();
    if context.out.json {
        let mut devices: Vec<Value> = adapters.iter().enumerate().map(json).collect();
        // No index: it is chosen by name.
        devices.push(json!({
            "index": null, "name": "CPU reference", "backend": "cpu", "kind": "cpu", "driver": "", "memory": null,
            "limits": {}, "features": [],
        }));
        context.out.json(&json!({"devices": devices}))?;
        return Ok(Outcome::Done);
    }
    for (index, adapter) in adapters.iter().enumerate() {
        context.out.line(format!(
            "{index}: {} ({}, {})\n   driver {}\n   buffers up to {}, bindings up to {}, workgroup memory {}, \
             subgroups {} to {}\n   features: {}",
            adapter.name,
            adapter.backend,
            adapter.kind.name(),
            adapter.driver,
            size(adapter.max_buffer),
            size(adapter.max_binding),
            size(adapter.max_workgroup_bytes.into()),
            adapter.subgroup[0],
            adapter.subgroup[1],
            adapter.features().join(", "),
        ))?;
    }
    context.out.line("cpu: CPU reference (cpu, cpu)")?;
    if adapters.is_empty() {
        context
            .out
            .note("note: no GPU adapter was found; is a Vulkan, Metal or DirectX 12 driver installed?");
    }
    Ok(Outcome::Done)
}

fn json((index, adapter): (usize, &Adapter)) -> Value {
    json!({
        "index": index,
        "name": adapter.name,
        "backend": adapter.backend,
        "kind": adapter.kind.name(),
        "driver": adapter.driver,
        // wgpu does not report the memory of a device.
        "memory": null,
        "limits": {
            "max_buffer": adapter.max_buffer,
            "max_binding": adapter.max_binding,
            "max_workgroup_bytes": adapter.max_workgroup_bytes,
            "subgroup": adapter.subgroup,
        },
        "features": adapter.features(),
    })
}
