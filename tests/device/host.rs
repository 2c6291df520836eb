//! The host executor says no where the device's kernels would read or write past a buffer.

use cmf_gpu::Kind;
use cmf_gpu::dtype::Dtype;
use cmf_gpu::host::HostExecutor;
use cmf_gpu::kernel::Kv;
use cmf_gpu::program::{Ctl, Executor, ExpertOptions, Extent, Plan, PlanOptions, Which};
use std::sync::Arc;

fn executor() -> (Arc<Plan>, HostExecutor) {
    let (tensors, _guard) = crate::golden("llama_bias", Dtype::Q8Row);
    let options = PlanOptions {
        ctx: 16,
        chunk: 8,
        kv: Kv::F16,
        max_binding: 1 << 30,
        all_logits: false,
        drafts: 0,
        experts: ExpertOptions::default(),
    };
    let plan = crate::plan_of(&tensors, &options);
    (plan.clone(), HostExecutor::new(plan, tensors).unwrap())
}

fn run(plan: &Plan, host: &mut HostExecutor, which: Which, ctl: Ctl) -> cmf_gpu::Result<Ctl> {
    host.write(plan.fixed.ctl, bytemuck::cast_slice(&[ctl]))?;
    let extent = Extent {
        columns: ctl.columns,
        end: ctl.pos + ctl.columns,
    };
    let ticket = host.submit(which, extent)?;
    host.wait(ticket)
}

#[test]
fn runs_past_the_context_are_refused_by_the_name_of_the_step() {
    let (plan, mut host) = executor();
    let at = |pos, columns| Ctl {
        tokens: [1; 9],
        pos,
        columns,
        ..Ctl::default()
    };
    let after = run(&plan, &mut host, Which::Decode, at(15, 1)).unwrap();
    assert_eq!((after.pos, after.step, after.stop), (16, 1, 0));
    let err = run(&plan, &mut host, Which::Decode, at(16, 1)).unwrap_err();
    assert_eq!(err.kind, Kind::Usage);
    assert!(err.message.contains("layer.00.attn.rope: position 16 of 16"), "{err}");
    let err = run(&plan, &mut host, Which::Prefill, at(12, 8)).unwrap_err();
    assert!(err.message.contains("layer.00.attn.rope: position 16 of 16"), "{err}");
    let err = run(&plan, &mut host, Which::Prefill, at(0, 9)).unwrap_err();
    assert_eq!(err.kind, Kind::Usage);
    // A run of no columns samples nothing.
    let after = run(&plan, &mut host, Which::Head, at(3, 0)).unwrap();
    assert_eq!((after.pos, after.step, after.sampled()), (3, 0, &[][..]));
}

#[test]
fn reads_and_writes_past_a_buffer_are_refused() {
    let (plan, mut host) = executor();
    let words = plan.buffers[plan.fixed.tokens].bytes as usize / 4;
    host.write(plan.fixed.tokens, &vec![7; words]).unwrap();
    assert_eq!(host.read(plan.fixed.tokens, words - 1, 1).unwrap(), [7]);
    assert_eq!(
        host.write(plan.fixed.tokens, &vec![7; words + 1]).unwrap_err().kind,
        Kind::Usage
    );
    assert_eq!(host.read(plan.fixed.tokens, 1, words).unwrap_err().kind, Kind::Usage);
    assert_eq!(
        host.read(plan.fixed.tokens, usize::MAX, 2).unwrap_err().kind,
        Kind::Usage
    );
    assert_eq!(host.read(plan.buffers.len(), 0, 1).unwrap_err().kind, Kind::Usage);
}

#[test]
fn a_stop_ends_the_answer_and_later_runs_change_nothing() {
    let (plan, mut host) = executor();
    let ctl = Ctl {
        tokens: [1; 9],
        columns: 1,
        ..Ctl::default()
    };
    let greedy = cmf_gpu::sampling::Sampling::greedy();
    host.write(plan.fixed.settings, &greedy.words(&[]).unwrap()).unwrap();
    let token = run(&plan, &mut host, Which::Decode, ctl).unwrap().sampled()[0];
    host.write(plan.fixed.settings, &greedy.words(&[token]).unwrap())
        .unwrap();
    let stopped = run(&plan, &mut host, Which::Decode, ctl).unwrap();
    assert_eq!((stopped.stop, stopped.sampled(), stopped.pos), (1, &[token][..], 1));
    assert_eq!(run(&plan, &mut host, Which::Decode, stopped).unwrap(), stopped);
    // Tickets are waited for in order.
    let extent = Extent { columns: 1, end: 1 };
    let (_first, second) = (
        host.submit(Which::Decode, extent).unwrap(),
        host.submit(Which::Decode, extent).unwrap(),
    );
    assert_eq!(host.wait(second).unwrap_err().kind, Kind::Usage);
}
