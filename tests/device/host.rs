//! The host executor refuses runs in which the device's kernels would read or write past the end of a buffer.

use cmf_gpu::Kind;
use cmf_gpu::dtype::Dtype;
use cmf_gpu::graph::{BatchShape, Executor};
use cmf_gpu::host::HostExecutor;
use cmf_gpu::lm::{LowerOptions, Plan, ProgramKind, sequence_words};
use cmf_gpu::op::{BATCH_HEADER, Kv, Token, batch_len};
use cmf_gpu::sampling::Sampling;

fn executor() -> (Plan, HostExecutor) {
    let (tensors, _guard) = crate::golden("llama_bias", Dtype::Q8Row);
    let options = LowerOptions {
        chunk: 8,
        kv: Kv::F16,
        max_binding: 1 << 30,
        ..crate::options(16)
    };
    let plan = crate::plan_of(&tensors, &options);
    let host = HostExecutor::new(plan.graph.clone(), plan.selection.clone(), tensors).unwrap();
    (plan, host)
}

/// The tokens of the batch.
fn batch(plan: &Plan, host: &mut HostExecutor) -> Vec<Token> {
    let count = host.read(plan.buffers.batch, 0, 1).unwrap()[0] as usize;
    let records = host.read(plan.buffers.batch, BATCH_HEADER, batch_len(count) - BATCH_HEADER);
    bytemuck::cast_slice(&records.unwrap()).to_vec()
}

#[test]
fn runs_past_the_context_are_refused_by_the_name_of_the_step() {
    let (plan, mut host) = executor();
    let mut run = |kind: ProgramKind, position: u32, tokens: usize| {
        let shape = crate::begin(&mut host, &plan, &vec![1; tokens], position);
        let state = crate::run(&mut host, &plan, kind, shape)?;
        Ok((state, batch(&plan, &mut host)))
    };
    let (state, next) = run(ProgramKind::Decode, 15, 1).unwrap();
    assert_eq!((state.step, state.stop), (1, 0));
    // The sampled token, at the next position.
    let next_token = Token {
        id: state.sampled()[0],
        position: 16,
        ..Token::default()
    };
    assert_eq!(next, [next_token]);
    let err: cmf_gpu::Error = run(ProgramKind::Decode, 16, 1).unwrap_err();
    assert_eq!(err.kind, Kind::Internal);
    assert!(err.message.contains("layer.00.attn.rope: position 16 of 16"), "{err}");
    let err = run(ProgramKind::Prefill, 12, 8).unwrap_err();
    assert!(err.message.contains("layer.00.attn.rope: position 16 of 16"), "{err}");
    // A run without tokens samples nothing.
    let (state, next) = run(ProgramKind::Head, 3, 0).unwrap();
    assert_eq!((state.step, state.sampled(), next.len()), (0, &[][..], 0));
}

#[test]
fn more_tokens_than_a_chunk_has_are_refused() {
    let (plan, mut host) = executor();
    // The batch fits into its buffer, which is padded, but the activations do not.
    let shape = crate::begin(&mut host, &plan, &[1; 9], 0);
    let err = crate::run(&mut host, &plan, ProgramKind::Prefill, shape).unwrap_err();
    assert_eq!(err.kind, Kind::Internal, "{err}");
    let words = sequence_words(&[1; 20], 0);
    let err = host.write(plan.buffers.batch, &words).unwrap_err();
    assert_eq!(err.kind, Kind::Internal, "{err}");
    // A count without its records.
    host.write(plan.buffers.batch, &words[..BATCH_HEADER]).unwrap();
    let shape = BatchShape { tokens: 20, end: 20 };
    let err = crate::run(&mut host, &plan, ProgramKind::Prefill, shape).unwrap_err();
    assert_eq!(err.kind, Kind::Internal, "{err}");
}

#[test]
fn reads_and_writes_past_a_buffer_are_refused() {
    let (plan, mut host) = executor();
    let batch = plan.buffers.batch;
    let words = plan.graph.buffers[batch].bytes as usize / 4;
    host.write(batch, &vec![7; words]).unwrap();
    assert_eq!(host.read(batch, words - 1, 1).unwrap(), [7]);
    let no_buffer = plan.graph.buffers.len();
    for refused in [
        host.write(batch, &vec![7; words + 1]).unwrap_err(),
        host.read(batch, 1, words).unwrap_err(),
        host.read(batch, usize::MAX, 2).unwrap_err(),
        host.read(no_buffer, 0, 1).unwrap_err(),
    ] {
        assert_eq!(refused.kind, Kind::Internal, "{refused}");
    }
}

#[test]
fn a_stop_ends_the_answer_and_later_runs_change_nothing() {
    let (plan, mut host) = executor();
    let greedy = Sampling::greedy();
    let mut run = |stops: Option<&[u32]>| {
        if let Some(stops) = stops {
            let settings = greedy.words(stops).unwrap();
            host.write(plan.buffers.settings, &settings).unwrap();
            crate::begin(&mut host, &plan, &[1], 0);
        }
        let shape = BatchShape { tokens: 1, end: 1 };
        let state = crate::run(&mut host, &plan, ProgramKind::Decode, shape).unwrap();
        (state, batch(&plan, &mut host))
    };
    let token = run(Some(&[])).0.sampled()[0];
    let stopped = run(Some(&[token]));
    let (state, next) = &stopped;
    assert_eq!((state.stop, state.sampled()), (1, &[token][..]));
    assert_eq!((next.len(), next[0].position), (1, 1));
    assert_eq!(run(None), stopped);
    // Tickets are waited for in order.
    let steps = 0..plan.program(ProgramKind::Decode).steps.len();
    let mut submit = || {
        let shape = BatchShape { tokens: 1, end: 2 };
        host.submit(ProgramKind::Decode as usize, steps.clone(), shape).unwrap()
    };
    let (_first, second) = (submit(), submit());
    assert_eq!(host.wait(second).unwrap_err().kind, Kind::Internal);
}
