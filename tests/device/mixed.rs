//! Models whose tensors have different types.

use crate::{PLACES, Place};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::dtype::encode::{encode, storage_dtype};
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::lm::{LowerOptions, Plan, ProgramKind};
use cmf_gpu::op::{Kernel, Kv};
use cmf_gpu::parity::Subject;
use cmf_gpu::source::MemoryTensors;
use std::sync::Arc;

/// A golden model's tensors, each matrix in the type that `choose` returns for its name, and their plan.
fn recoded(name: &str, choose: impl Fn(&str) -> Dtype, kv: Kv) -> Subject {
    let (container, _guard): (Arc<CmfContainer>, _) = crate::golden(name, Dtype::F16);
    let tensors = container.infos().iter().enumerate().map(|(id, info)| {
        let (rows, cols) = info.rows_cols();
        let decoder = info.dtype.decoder(container.bytes(id).unwrap(), rows, cols).unwrap();
        let dtype = storage_dtype(choose(&info.name), &info.shape);
        let payload = encode(dtype, rows, cols, &|first, out| {
            out.chunks_exact_mut(cols)
                .enumerate()
                .for_each(|(i, out)| decoder.row(first + i, out));
            Ok(())
        });
        (info.name.clone(), dtype, info.shape.clone(), payload.unwrap())
    });
    let tensors = Arc::new(MemoryTensors::new(tensors).unwrap());
    let options = LowerOptions {
        chunk: 8,
        kv,
        all_logits: true,
        ..crate::options(48)
    };
    let plan = crate::plan(&container.header().arch, &*tensors, &options).unwrap();
    crate::subject(&plan, tensors)
}

/// Different types for all siblings in the first layer, one type in the others.
fn apart(name: &str, types: [Dtype; 3]) -> Dtype {
    let [a, b, c] = types;
    match name.strip_prefix("model.layers.0.") {
        Some("self_attn.q_proj.weight" | "mlp.gate_proj.weight" | "self_attn.o_proj.weight") => a,
        Some("self_attn.k_proj.weight" | "mlp.up_proj.weight") => b,
        Some(_) => c,
        None if name.contains("embed") => b,
        None => a,
    }
}

fn steps(plan: &Plan, kind: ProgramKind, label: &str, kernel: Kernel) -> usize {
    let steps = plan.program(kind).steps.iter();
    steps
        .filter(|step| step.label == label && step.op.kernel() == kernel)
        .count()
}

#[test]
fn every_step_of_a_mixed_model_agrees_with_the_reference() {
    for (name, types) in [
        ("llama_bias", [Dtype::Q4tp, Dtype::Q8Row, Dtype::F16]),
        ("gemma3", [Dtype::Q82f, Dtype::Q4Tiled, Dtype::Q8Row]),
    ] {
        let subject = recoded(name, |tensor| apart(tensor, types), Kv::F16);
        let plan = &subject.plan;
        // Projections of three types take three products, a gated pair of two types two products and a gate.
        let [decode, prefill] = [ProgramKind::Decode, ProgramKind::Prefill];
        assert_eq!(steps(plan, decode, "layer.00.attn.qkv", Kernel::Matvec), 3);
        assert_eq!(steps(plan, prefill, "layer.00.attn.qkv", Kernel::Matmul), 3);
        assert_eq!(steps(plan, decode, "layer.00.ffn.glu", Kernel::Glu), 1);
        assert_eq!(steps(plan, prefill, "layer.00.ffn.glu", Kernel::Glu), 1);
        assert_eq!(steps(plan, decode, "layer.01.ffn.gate_up", Kernel::MatvecGlu), 1);
        crate::all_pass(&crate::compare_subjects(&subject, &subject));
    }
}

/// Tensors of two types with the same values make the same model, whichever of them has which type.
#[test]
fn a_mixed_model_computes_what_the_plain_one_computes() {
    let tokens: Vec<u32> = (0..20).map(|i| i * 25 % 512).collect();
    for name in ["llama_bias", "gemma3"] {
        let logits = |subject: &Subject, place: Place| {
            let mut session = crate::session(place, &subject.plan, subject.tensors.clone());
            let mut all = Vec::new();
            let mut sink = |_: usize, logits: &[f32], _: &[Vec<f32>]| {
                all.extend_from_slice(logits);
                Ok(())
            };
            // Twelve in a prefill, the others one by one.
            session.logits(&tokens, 12, false, &mut sink).unwrap();
            all
        };
        let plain = recoded(name, |_| Dtype::F16, Kv::F32);
        let mixed = recoded(
            name,
            |tensor| apart(tensor, [Dtype::F16, Dtype::F32, Dtype::F16]),
            Kv::F32,
        );
        assert_eq!(
            steps(&mixed.plan, ProgramKind::Decode, "layer.00.ffn.glu", Kernel::Glu),
            1
        );
        let wanted = logits(&plain, Place::Device);
        for place in PLACES {
            let found = logits(&mixed, place);
            assert_eq!(found.len(), wanted.len());
            for (i, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
                assert!(
                    (found - wanted).abs() <= 1e-3,
                    "{name}, {place:?}, logit {i}: {found}, expected {wanted}"
                );
            }
        }
    }
}
