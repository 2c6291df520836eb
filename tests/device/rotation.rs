//! The rotation at positions that short texts never reach.

use crate::goldens::Golden;
use cmf_gpu::gpu::GpuExecutor;
use cmf_gpu::kernel::Kv;
use cmf_gpu::program::{Executor, ExpertOptions, Fill, PlanOptions};

/// A table that is right for one position is not right for all.
#[test]
fn tables_hold_the_angles_of_near_and_far_positions() {
    let golden = Golden::of("llama_tied", crate::golden("llama_tied", cmf_gpu::dtype::Dtype::F16));
    let config = std::fs::read(crate::golden::fixture("llama_tied").join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    let (theta, pairs) = (config["rope_theta"].as_f64().unwrap(), 16);
    assert_eq!(
        config["hidden_size"].as_u64().unwrap() / config["num_attention_heads"].as_u64().unwrap(),
        32
    );
    let device = crate::device();
    let options = PlanOptions {
        ctx: 4096,
        chunk: 8,
        kv: Kv::F32,
        max_binding: device.max_binding(),
        all_logits: false,
        drafts: 0,
        experts: ExpertOptions::default(),
    };
    let plan = crate::plan_of(&golden.tensors, &options);
    let tables = plan.buffers.iter().enumerate();
    let tables: Vec<usize> = tables
        .filter(|(_, buffer)| matches!(buffer.fill, Fill::Rope { .. }))
        .map(|(id, _)| id)
        .collect();
    assert_eq!(tables.len(), 1);
    let mut executor = GpuExecutor::new(device, plan, &*golden.tensors, &mut |_, _| Ok(())).unwrap();
    for position in [0, 1, 17, 4095] {
        let words = executor.read(tables[0], position * pairs * 2, pairs * 2).unwrap();
        for (i, pair) in words.chunks(2).enumerate() {
            let angle = position as f64 * theta.powf(-(i as f64) / pairs as f64);
            let found = [f32::from_bits(pair[0]), f32::from_bits(pair[1])].map(f64::from);
            // The angle is rounded to f32, as in training: half a unit of 4096 is 0.00025, of its factor as much again.
            let near = 1e-6 + angle * 1.2e-7;
            assert!((found[0] - angle.cos()).abs() < near, "cos of pair {i} at {position}");
            assert!((found[1] - angle.sin()).abs() < near, "sin of pair {i} at {position}");
        }
    }
}
