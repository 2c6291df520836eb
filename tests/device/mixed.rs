//! Models whose tensors have different types.

use cmf_gpu::container::{Container, MemoryTensors, Tensors};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::dtype::encode::{encode, storage_dtype};
use cmf_gpu::gpu::GpuExecutor;
use cmf_gpu::host::HostExecutor;
use cmf_gpu::kernel::{Kernel, Kv};
use cmf_gpu::model::bind;
use cmf_gpu::parity::{self, Subject};
use cmf_gpu::program::{Executor, ExpertOptions, Plan, PlanOptions, Which, plan};
use cmf_gpu::session::Session;
use std::sync::Arc;

/// A golden model's tensors, each matrix in the type that `choose` gives for its name, and their plan.
fn recoded(name: &str, choose: impl Fn(&str) -> Dtype, kv: Kv) -> Subject {
    let (container, _guard): (Arc<Container>, _) = crate::golden(name, Dtype::F16);
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
    let options = PlanOptions {
        ctx: 48,
        chunk: 8,
        kv,
        max_binding: crate::device().max_binding(),
        all_logits: true,
        drafts: 0,
        experts: ExpertOptions::default(),
    };
    let model = bind(&container.header().arch, &*tensors).unwrap();
    let plan = Arc::new(plan(&model, &*tensors, &options).unwrap());
    Subject { plan, tensors }
}

/// No two siblings alike in the first layer, all alike in the others.
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

fn steps(plan: &Plan, which: Which, label: &str, kernel: Kernel) -> usize {
    let steps = plan.program(which).steps.iter();
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
        // Projections of three types take three products, the gated pair two and a gate.
        let [decode, prefill] = [Which::Decode, Which::Prefill];
        assert_eq!(steps(plan, decode, "layer.00.attn.qkv", Kernel::Matvec), 3);
        assert_eq!(steps(plan, prefill, "layer.00.attn.qkv", Kernel::Matmul), 3);
        assert_eq!(steps(plan, decode, "layer.00.ffn.glu", Kernel::Glu), 1);
        assert_eq!(steps(plan, prefill, "layer.00.ffn.glu", Kernel::Glu), 1);
        assert_eq!(steps(plan, decode, "layer.01.ffn.gate_up", Kernel::MatvecGlu), 1);
        let outcome = parity::programs(&crate::device(), &subject, &subject, &mut |_, _, _| Ok(())).unwrap();
        assert!(
            outcome.failed.is_empty() && outcome.passed > 0,
            "{name}: {:?}",
            outcome.failed
        );
    }
}

/// Two types that hold the same values make the same model, however its tensors are split between them.
#[test]
fn a_mixed_model_says_what_the_plain_one_says() {
    let tokens: Vec<u32> = (0..20).map(|i| i * 25 % 512).collect();
    for name in ["llama_bias", "gemma3"] {
        let logits = |subject: &Subject, on_host: bool| {
            let Subject { plan, tensors } = subject.clone();
            let executor: Box<dyn Executor> = match on_host {
                true => Box::new(HostExecutor::new(plan.clone(), tensors).unwrap()),
                false => {
                    Box::new(GpuExecutor::new(crate::device(), plan.clone(), &*tensors, &mut |_, _| Ok(())).unwrap())
                }
            };
            let mut session = Session::new(plan, executor);
            let mut all = Vec::new();
            let mut sink = |_: usize, logits: &[f32], _: &[Vec<f32>]| {
                all.extend_from_slice(logits);
                Ok(())
            };
            // Twelve in prefill, the others one by one.
            session.logits(&tokens, 12, false, &mut sink).unwrap();
            all
        };
        let plain = recoded(name, |_| Dtype::F16, Kv::F32);
        let mixed = recoded(
            name,
            |tensor| apart(tensor, [Dtype::F16, Dtype::F32, Dtype::F16]),
            Kv::F32,
        );
        assert_eq!(steps(&mixed.plan, Which::Decode, "layer.00.ffn.glu", Kernel::Glu), 1);
        let wanted = logits(&plain, false);
        for on_host in [false, true] {
            let found = logits(&mixed, on_host);
            assert_eq!(found.len(), wanted.len());
            for (i, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
                assert!(
                    (found - wanted).abs() <= 1e-3,
                    "{name}, host {on_host}, logit {i}: {found}, wanted {wanted}"
                );
            }
        }
    }
}
