//! Shapes with random weights, made narrower so that they run in a test.

use cmf_gpu::dtype::Dtype;
use cmf_gpu::lm::LowerOptions;
use cmf_gpu::lm::run::{Cancel, Finish, Generation};
use cmf_gpu::op::Kv;
use cmf_gpu::sampling::Sampling;
use cmf_gpu::synthetic::{DeltaShape, ExpertShape, Shape, synthetic};
use std::ops::ControlFlow;
use std::sync::Arc;

#[test]
fn a_narrow_mixture_with_recurrent_layers_runs() {
    let real = Shape::named("qwen3.5-35b-a3b").unwrap();
    let shape = Shape {
        hidden: 64,
        heads: 4,
        head_dim: 32,
        vocab: 128,
        experts: real.experts.map(|experts| ExpertShape {
            count: 16,
            width: 32,
            shared: 32,
            ..experts
        }),
        delta: real.delta.map(|delta| DeltaShape {
            key_heads: 2,
            value_heads: 4,
            head_dim: 32,
            ..delta
        }),
        ..real.with_layers(4).unwrap()
    };
    let (arch, tensors) = synthetic(&shape, Dtype::Q82f).unwrap();
    let options = LowerOptions {
        kv: Kv::F16,
        ..crate::options(64)
    };
    let plan = crate::plan(&arch, &tensors, &options).unwrap();
    let mut session = crate::session(crate::Place::Device, &plan, Arc::new(tensors));
    let generation = Generation {
        sampling: Sampling::greedy(),
        stops: Vec::new(),
        max_tokens: 8,
    };
    let prompt: Vec<u32> = (0..20).collect();
    assert!(session.prefill(&prompt, &Cancel::new()).unwrap().1.is_continue());
    let mut tokens = Vec::new();
    let finish = session.generate(&generation, &Cancel::new(), &mut |token| {
        tokens.push(token);
        ControlFlow::Continue(())
    });
    assert_eq!(finish.unwrap(), Finish::Length);
    assert!(tokens.len() == 8 && tokens.iter().all(|&token| token < 128));
}
