//! Rotary embedding at positions that short texts do not reach.

use crate::Place;
use cmf_gpu::dtype::Dtype;
use cmf_gpu::graph::Fill;

/// Short prompts do not test the angles of far positions.
#[test]
fn tables_hold_the_angles_of_near_and_far_positions() {
    let (tensors, _guard) = crate::golden("llama_tied", Dtype::F16);
    let config = std::fs::read(crate::golden::fixture("llama_tied").join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    let (theta, pairs) = (config["rope_theta"].as_f64().unwrap(), 16);
    assert_eq!(
        config["hidden_size"].as_u64().unwrap() / config["num_attention_heads"].as_u64().unwrap(),
        32
    );
    let plan = crate::plan_of(&tensors, &crate::options(4096));
    let tables = plan.graph.buffers.iter().enumerate();
    let tables: Vec<usize> = tables
        .filter(|(_, buffer)| matches!(buffer.fill, Fill::Rope { .. }))
        .map(|(id, _)| id)
        .collect();
    assert_eq!(tables.len(), 1);
    let mut executor = crate::executor(Place::Device, &plan, tensors);
    for position in [0, 1, 17, 4095] {
        let words = executor.read(tables[0], position * pairs * 2, pairs * 2).unwrap();
        for (i, pair) in words.chunks(2).enumerate() {
            let angle = position as f64 * theta.powf(-(i as f64) / pairs as f64);
            let found = [f32::from_bits(pair[0]), f32::from_bits(pair[1])].map(f64::from);
            // The angle is rounded to f32, as in training: half an ulp at 4096 is 0.00025, and the same again for its factor.
            let near = 1e-6 + angle * 1.2e-7;
            assert!((found[0] - angle.cos()).abs() < near, "cos of pair {i} at {position}");
            assert!((found[1] - angle.sin()).abs() < near, "sin of pair {i} at {position}");
        }
    }
}
