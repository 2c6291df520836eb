//! What networks are lowered to, as text: no adapter and no model file is needed.
//!
//! A snapshot that differs shows what a change does to the programs. Accept it with `cargo insta review`.

use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::cmf::{Mask, MaskAxis, MaskShape};
use cmf_gpu::graph::Measured;
use cmf_gpu::lm::{ExpertOptions, LowerOptions, Plan, ProgramKind, lower};
use cmf_gpu::model::{self, HeadInput, Model};
use cmf_gpu::op::Kv;
use cmf_gpu::source::Tensors;
use cmf_gpu::synthetic::{DeltaShape, ExpertShape, Shape, synthetic};

const OPTIONS: LowerOptions = LowerOptions {
    ctx: 100,
    chunk: 16,
    kv: Kv::F16,
    max_binding: 1 << 20,
    all_logits: false,
    drafts: 0,
    draft_input: HeadInput::Stream,
    experts: ExpertOptions {
        counted: false,
        slots: None,
    },
};

/// Two small layers of a dense network.
fn dense() -> Shape {
    Shape {
        hidden: 64,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        width: 96,
        vocab: 40,
        ..Shape::named("smollm2-135m").unwrap()
    }
}

fn bound(shape: &Shape, quant: Dtype) -> (Model, impl Tensors + use<>) {
    let (arch, tensors) = synthetic(shape, quant).unwrap();
    (model::bind(&arch, &tensors).unwrap(), tensors)
}

fn plan(shape: &Shape, quant: Dtype, options: &LowerOptions) -> Plan {
    let (model, tensors) = bound(shape, quant);
    lower(&model, &tensors, options, &Measured::default()).unwrap()
}

/// The programs that have steps.
fn printed(plan: &Plan) -> String {
    let kinds = ProgramKind::ALL.iter().filter(|&&kind| plan.has(kind));
    kinds
        .map(|&kind| plan.graph.print(plan.program(kind), &plan.selection))
        .collect()
}

#[test]
fn a_dense_network() {
    insta::assert_snapshot!(printed(&plan(&dense(), Dtype::Q4Tiled, &OPTIONS)));
}

#[test]
fn a_dense_network_that_verifies_three_drafts() {
    let options = LowerOptions { drafts: 3, ..OPTIONS };
    let plan = plan(&dense(), Dtype::Q8Row, &options);
    insta::assert_snapshot!(plan.graph.print(plan.program(ProgramKind::Speculate), &plan.selection));
}

#[test]
fn a_mixture_with_a_shared_expert() {
    let shape = Shape {
        layers: 1,
        width: 0,
        experts: Some(ExpertShape {
            count: 6,
            top_k: 2,
            width: 32,
            shared: 64,
        }),
        ..dense()
    };
    insta::assert_snapshot!(printed(&plan(&shape, Dtype::Q4Tiled, &OPTIONS)));
}

#[test]
fn a_recurrent_layer_before_attention() {
    let shape = Shape {
        gated: true,
        qk_norm: true,
        delta: Some(DeltaShape {
            key_heads: 2,
            value_heads: 4,
            head_dim: 16,
            taps: 4,
            attends_every: 2,
        }),
        ..dense()
    };
    insta::assert_snapshot!(printed(&plan(&shape, Dtype::F16, &OPTIONS)));
}

#[test]
fn rotated_weights() {
    let shape = Shape {
        layers: 1,
        tied: false,
        hadamard: Some(32),
        ..dense()
    };
    insta::assert_snapshot!(printed(&plan(&shape, Dtype::F16, &OPTIONS)));
}

#[test]
fn weights_larger_than_a_binding_are_cut_into_segments() {
    let options = LowerOptions {
        max_binding: 8448,
        ..OPTIONS
    };
    let shape = Shape { layers: 1, ..dense() };
    let plan = plan(&shape, Dtype::F16, &options);
    insta::assert_snapshot!(plan.graph.print(plan.program(ProgramKind::Decode), &plan.selection));
}

/// A mask selects variants of the same steps, fills lists, and leaves out layers.
#[test]
fn a_mask_selects_variants_of_the_same_steps() {
    let (mut model, tensors) = bound(&dense(), Dtype::Q4Tiled);
    let shape = MaskShape {
        layers: 2,
        rows: 2,
        ffn: 96,
        heads: 4,
        experts: 0,
    };
    let mut mask = Mask::open(1, "narrow", shape);
    (0..40).for_each(|neuron| mask.set_unit(MaskAxis::Neurons, 0, neuron, false).unwrap());
    mask.set_unit(MaskAxis::Heads, 0, 1, false).unwrap();
    mask.set_layer(1, false).unwrap();
    model.masks.masks = vec![mask.clone()];
    let whole = lower(&model, &tensors, &OPTIONS, &Measured::default()).unwrap();
    let masked = whole.with_mask(Some(&mask)).unwrap();
    assert!(std::sync::Arc::ptr_eq(&whole.graph, &masked.graph));

    // Without a mask the steps that run are those of a model that has none.
    let steps = |plan: &Plan, kind| {
        let program = plan.program(kind);
        let runs = program.resolve(&plan.selection).into_iter();
        runs.map(|resolved| {
            (
                program.steps[resolved.step].label.clone(),
                resolved.masked,
                resolved.grid,
            )
        })
        .collect::<Vec<_>>()
    };
    let plain = plan(&dense(), Dtype::Q4Tiled, &OPTIONS);
    for kind in [ProgramKind::Decode, ProgramKind::Prefill] {
        assert_eq!(steps(&whole, kind), steps(&plain, kind));
    }
    insta::assert_snapshot!(printed(&masked));
}

#[test]
fn a_context_without_rotation_and_too_many_drafts_are_refused() {
    let (mut model, tensors) = bound(&dense(), Dtype::F16);
    let kind = |model: &Model, options: &LowerOptions| {
        let lowered = lower(model, &tensors, options, &Measured::default());
        lowered.map(|_| ()).unwrap_err().kind.name()
    };
    assert_eq!(kind(&model, &LowerOptions { drafts: 8, ..OPTIONS }), "Usage");
    let small = LowerOptions {
        max_binding: 512,
        ..OPTIONS
    };
    assert_eq!(kind(&model, &small), "OutOfMemory");
    model.rope_ends = Some(64);
    assert_eq!(kind(&model, &OPTIONS), "Usage");
}
