//! Counts of chosen experts, and expert groups that hold some of their experts at a time.

use crate::Place;
use crate::golden::Recorded;
use crate::goldens::Golden;
use cmf_gpu::Notice;
use cmf_gpu::dtype::Dtype;
use cmf_gpu::dtype::encode::encode;
use cmf_gpu::engine::LoadedModel;
use cmf_gpu::error::{Kind, Result};
use cmf_gpu::graph::Counters;
use cmf_gpu::lm::run::{Cancel, Generation, Session};
use cmf_gpu::lm::{ExpertOptions, LowerOptions, Plan, ProgramKind};
use cmf_gpu::model::{FeedForward, bind};
use cmf_gpu::options::LoadOptions;
use cmf_gpu::sampling::Sampling;
use cmf_gpu::source::{MemoryTensors, Tensors};
use cmf_gpu::synthetic::{ExpertShape, Shape, synthetic};
use std::ops::ControlFlow;
use std::sync::Arc;

const MIXTURES: [&str; 4] = ["qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe"];

fn golden(name: &'static str, quant: Dtype) -> Golden {
    Golden::of(name, crate::golden(name, quant))
}

fn planned(golden: &Golden, experts: ExpertOptions) -> Result<Plan> {
    let options = LowerOptions {
        all_logits: true,
        experts,
        ..crate::options(96)
    };
    crate::plan(&golden.tensors.header().arch, &*golden.tensors, &options)
}

fn session(place: Place, golden: &Golden, experts: ExpertOptions) -> Session {
    crate::session(place, &planned(golden, experts).unwrap(), golden.tensors.clone())
}

fn on_device(golden: &Golden, experts: ExpertOptions) -> Session {
    session(Place::Device, golden, experts)
}

fn slots(slots: usize) -> ExpertOptions {
    ExpertOptions {
        slots: Some(slots),
        ..ExpertOptions::default()
    }
}

fn prompt(name: &str) -> Vec<u32> {
    let json = crate::golden::described(name);
    let ids = json["prompts"][2]["prompt"].as_array().unwrap();
    ids.iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// The number of experts of a layer, and top_k.
fn experts(golden: &Golden) -> (usize, usize) {
    let model = bind(&golden.tensors.header().arch, &*golden.tensors).unwrap();
    let mut mixtures = model.layers.iter().filter_map(|layer| match &layer.ffn {
        FeedForward::Moe(moe) => Some((moe.experts.len(), moe.top_k)),
        FeedForward::Dense(_) => None,
    });
    mixtures.next().unwrap()
}

/// Logits of every token: the first `prefill` tokens in chunks, the rest one by one.
fn logits(session: &mut Session, tokens: &[u32], prefill: usize) -> Vec<u32> {
    let mut all = Vec::new();
    let mut sink = |_: usize, logits: &[f32], _: &[Vec<f32>]| {
        all.extend(logits.iter().map(|value| value.to_bits()));
        Ok(())
    };
    session.logits(tokens, prefill, false, &mut sink).unwrap();
    all
}

#[test]
fn counts_of_chosen_experts_equal_the_recorded_routes() {
    let counted = ExpertOptions {
        counted: true,
        slots: None,
    };
    for name in MIXTURES {
        let golden = golden(name, Dtype::F16);
        let tokens = prompt(name);
        let recorded = Recorded::of(name);
        for place in crate::PLACES {
            let mut session = session(place, &golden, counted);
            for (runs, prefill) in [(1, 40), (2, 21)] {
                logits(&mut session, &tokens, prefill);
                let counts = session.route_counts().unwrap();
                assert!(!counts.is_empty());
                for (layer, counts) in counts {
                    let chosen = recorded.integers(&format!("router.p2.layer{layer}.topk_index"));
                    let mut wanted = vec![0; counts.len()];
                    chosen.iter().for_each(|&expert| wanted[expert as usize] += runs);
                    assert_eq!(counts, wanted, "{name}, layer {layer}");
                }
            }
        }
    }
}

#[test]
fn plans_without_counting_have_no_counting_steps() {
    let golden = golden("qwen3_moe", Dtype::F16);
    let steps = |experts| {
        let plan = planned(&golden, experts).unwrap();
        let steps = plan.program(ProgramKind::Decode).steps.iter();
        steps.map(|step| step.label.clone()).collect::<Vec<_>>()
    };
    let plain = steps(ExpertOptions::default());
    assert!(plain.iter().all(|label| !label.ends_with(".count")));
    let counted = ExpertOptions {
        counted: true,
        slots: None,
    };
    let counting = steps(counted);
    assert_eq!(
        counting
            .iter()
            .filter(|label| !label.ends_with(".count"))
            .collect::<Vec<_>>(),
        plain.iter().collect::<Vec<_>>()
    );
    assert!(counting.len() > plain.len());
}

/// Every number of slots, types with and without scales, chunks that need more experts than there are slots.
#[test]
fn paged_experts_give_the_same_bits() {
    for (name, quant) in [
        ("qwen3_moe", Dtype::F16),
        ("qwen3_moe", Dtype::Q82f),
        ("qwen3_moe", Dtype::Q4tp),
        ("qwen3_5_moe", Dtype::F16),
        ("qwen3_5_moe", Dtype::Q4Block),
        ("qwen2_moe", Dtype::Q8Row),
    ] {
        let golden = golden(name, quant);
        let tokens = prompt(name);
        let mut resident = on_device(&golden, ExpertOptions::default());
        let wanted = [40, 21].map(|prefill| logits(&mut resident, &tokens, prefill));
        let whole = resident.counters();
        assert_eq!((whole.expert_hits, whole.expert_misses, whole.paged_bytes), (0, 0, 0));
        let (experts, top_k) = experts(&golden);
        for count in top_k..experts {
            let mut session = on_device(&golden, slots(count));
            assert!(!session.plan().graph.paged.is_empty());
            assert!(session.plan().graph.weight_bytes() < resident.plan().graph.weight_bytes());
            for (prefill, wanted) in [40, 21].into_iter().zip(&wanted) {
                assert!(
                    logits(&mut session, &tokens, prefill) == *wanted,
                    "{name} {}, {count} slots, {prefill} in chunks",
                    quant.name()
                );
            }
            let Counters {
                expert_hits,
                expert_misses,
                paged_bytes,
                ..
            } = session.counters();
            assert!(expert_misses > 0 && expert_hits > 0, "{name}, {count} slots");
            assert!(
                paged_bytes > expert_misses * 1000,
                "{paged_bytes} bytes of {expert_misses}"
            );
        }
    }
}

#[test]
fn fewer_slots_than_top_k_are_out_of_memory() {
    let golden = golden("qwen3_moe", Dtype::F16);
    let (_, top_k) = experts(&golden);
    assert_eq!(planned(&golden, slots(top_k - 1)).unwrap_err().kind, Kind::OutOfMemory);
}

fn narrow(layers: usize) -> Shape {
    let real = Shape::named("qwen3.5-35b-a3b").unwrap();
    Shape {
        hidden: 128,
        heads: 4,
        head_dim: 32,
        vocab: 128,
        experts: Some(ExpertShape {
            count: 64,
            top_k: 4,
            width: 128,
            shared: 64,
        }),
        delta: None,
        hadamard: None,
        ..real.with_layers(layers).unwrap()
    }
}

fn placed(tensors: &Arc<dyn Tensors>, shape: &Shape, vram_mb: Option<u64>) -> Result<LoadedModel> {
    let (arch, _) = synthetic(shape, Dtype::Q8Row).unwrap();
    let options = LoadOptions::default().ctx(128).vram_mb(vram_mb).all_logits(true);
    LoadedModel::new(&arch, tensors.clone(), Some(crate::device()), &options, &mut |_, _| {
        ControlFlow::Continue(())
    })
}

fn answer(session: &mut Session) -> Vec<u32> {
    let generation = Generation {
        sampling: Sampling::greedy(),
        stops: Vec::new(),
        max_tokens: 24,
    };
    let prompt: Vec<u32> = (0..100).map(|i| i * 37 % 128).collect();
    assert!(session.prefill(&prompt, &Cancel::new()).unwrap().1.is_continue());
    let mut tokens = Vec::new();
    session
        .generate(&generation, &Cancel::new(), &mut |token| {
            tokens.push(token);
            ControlFlow::Continue(())
        })
        .unwrap();
    tokens
}

#[test]
fn a_model_larger_than_the_memory_allowed_is_paged() {
    let shape = narrow(4);
    let (_, plain) = synthetic(&shape, Dtype::Q8Row).unwrap();
    // The gates have another type than the rest of the experts.
    let recoded = plain.infos().iter().enumerate().map(|(id, info)| {
        let (bytes, shape) = (plain.stored(id).unwrap().bytes, info.shape.clone());
        if !(info.name.contains(".experts.") && info.name.contains("gate_proj")) {
            return (info.name.clone(), info.dtype, shape, bytes.to_vec());
        }
        let (rows, cols) = info.rows_cols();
        let decoder = info.dtype.decoder(&bytes, rows, cols).unwrap();
        let read = |first: usize, out: &mut [f32]| {
            let rows = out.chunks_mut(cols).enumerate();
            rows.for_each(|(row, out)| decoder.row(first + row, out));
            Ok(())
        };
        let payload = encode(Dtype::Q4Tiled, rows, cols, &read).unwrap();
        (info.name.clone(), Dtype::Q4Tiled, shape, payload)
    });
    let recoded = MemoryTensors::new(recoded).unwrap();
    let row = 128 + 2;
    larger_than_the_memory_allowed(&shape, Arc::new(plain), 3 * 128 * row);
    larger_than_the_memory_allowed(&shape, Arc::new(recoded), 128 * (2 * row + 128 / 32 * 18));
}

/// A model with experts of this many bytes.
fn larger_than_the_memory_allowed(shape: &Shape, tensors: Arc<dyn Tensors>, expert: u64) {
    let mut whole = placed(&tensors, shape, None).unwrap();
    assert_eq!(whole.report.notices, []);
    let needs = |placed: &LoadedModel| placed.report.weight_bytes + placed.report.buffer_bytes;
    let limit = needs(&whole) / (1 << 20) - 2;
    let mut paged = placed(&tensors, shape, Some(limit)).unwrap();
    assert!(needs(&paged) <= limit << 20, "{}", needs(&paged));
    assert_eq!(paged.session.counters().gpu_bytes, needs(&paged));
    // As many slots as fit: one more in each layer would not fit.
    assert!(needs(&paged) + 4 * expert > limit << 20);
    let paging = &paged.report.notices;
    assert!(
        matches!(paging[..], [Notice::ExpertsPaged { experts: 64, .. }]),
        "{paging:?}"
    );
    assert_eq!(answer(&mut paged.session), answer(&mut whole.session));
    let tokens: Vec<u32> = (0..100).map(|i| i * 41 % 128).collect();
    let [found, wanted] = [&mut paged, &mut whole].map(|placed| logits(&mut placed.session, &tokens, 80));
    assert!(found == wanted);
    assert!(paged.session.counters().expert_misses > 0);

    let err = placed(&tensors, shape, Some(1)).err().unwrap();
    assert_eq!(err.kind, Kind::OutOfMemory);
    for part in ["the memory limit is 1 MiB", "4 of 64 experts"] {
        assert!(err.message.contains(part), "{}", err.message);
    }
}
