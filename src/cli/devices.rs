//! `devices`: what models can run on.

use super::output::size;
use super::{Context, Outcome, Result};
use cmf_gpu::gpu;
use serde_json::{Value, json};

pub fn run(context: &mut Context) -> Result {
    let adapters = gpu::adapters();
    if context.out.json {
        let mut devices: Vec<Value> = adapters
            .iter()
            .enumerate()
            .map(|(index, adapter)| {
                json!({
                    "index": index,
                    "name": adapter.name,
                    "backend": adapter.backend,
                    "kind": adapter.kind.name(),
                    "driver": adapter.driver,
                    // The graphics interface does not tell how much memory a device has.
                    "memory": null,
                    "limits": {
                        "max_buffer": adapter.max_buffer,
                        "max_binding": adapter.max_binding,
                        "max_workgroup_bytes": adapter.max_workgroup_bytes,
                        "subgroup": adapter.subgroup,
                    },
                    "features": adapter.features(),
                })
            })
            .collect();
        // Has no number: it is asked for by name.
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
            .note("note: no adapter was found; is a Vulkan, Metal or DirectX 12 driver installed?");
    }
    Ok(Outcome::Done)
}
