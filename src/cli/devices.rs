//! `devices`: the devices that can run models.

use super::context::{Context, Result};
use super::output::size;
use cmf_gpu::gpu::{self, Adapter};
use serde_json::{Value, json};

pub fn run(context: &mut Context) -> Result {
    let adapters = gpu::adapters();
    let mut devices: Vec<Value> = adapters.iter().enumerate().map(json).collect();
    // No index: it is chosen by name.
    devices.push(json!({
        "index": null, "name": "CPU reference", "backend": "cpu", "kind": "cpu", "driver": "", "memory": null,
        "limits": {}, "features": [],
    }));
    let lines = adapters.iter().enumerate().map(text);
    let outcome = context.answer(
        json!({"devices": devices}),
        lines.chain(["cpu: CPU reference (cpu, cpu)".into()]),
    )?;
    if adapters.is_empty() && !context.out.json {
        let hint = "note: no GPU adapter was found; is a Vulkan, Metal or DirectX 12 driver installed?";
        context.out.note(hint);
    }
    Ok(outcome)
}

fn text((index, adapter): (usize, &Adapter)) -> String {
    format!(
        "{index}: {} ({}, {})\n   driver {}\n   buffers up to {}, bindings up to {}, workgroup memory {}, subgroups {} to {}\n   \
         features: {}",
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
    )
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
