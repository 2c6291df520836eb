//! Paged experts under task masks: the same bits as with all experts on the device. Masked experts are not fetched.

use crate::paged::{Network, Projection, logits, prompt};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::engine::LoadedModel;
use cmf_gpu::lm::Plan;
use cmf_gpu::lm::run::Session;
use cmf_gpu::options::{LoadOptions, TaskChoice};
use cmf_gpu::source::{Mask, MaskAxis, TensorId, Tensors};
use std::collections::HashSet;
use std::ops::ControlFlow;

const PREFILLS: [usize; 2] = [40, 21];
/// The experts of each mixture that each task leaves. In the last mixture of the first task a token gets fewer than its two.
const KEPT: [(&str, [&[usize]; 3]); 2] = [
    ("few", [&[2, 3, 5, 6], &[0, 3, 4, 6], &[5]]),
    ("late", [&[3, 4, 5, 6, 7], &[1, 2], &[0, 2, 4, 6, 7]]),
];
/// The layer of the first mixture.
const FIRST: usize = 1;

fn keep(mask: &mut Mask, kept: &[&[usize]; 3]) {
    for (layer, kept) in kept.iter().enumerate() {
        for expert in (0..8).filter(|expert| !kept.contains(expert)) {
            mask.set_unit(MaskAxis::Experts, FIRST + layer, expert, false).unwrap();
        }
    }
}

fn network(dtype: impl Fn(Projection) -> Dtype) -> Network {
    let network = Network::of("qwen3_moe", dtype);
    KEPT.iter().fold(network, |network, (name, kept)| {
        network.with(name, |mask| keep(mask, kept))
    })
}

/// The plan under a task's mask, or none.
fn tasked(network: &Network, plan: &Plan, task: Option<usize>) -> Plan {
    let masks = network.model().masks;
    plan.with_mask(task.map(|task| &masks.masks[task])).unwrap()
}

/// The experts' tensors that a task leaves out.
fn left_out(network: &Network, task: usize) -> HashSet<TensorId> {
    let mut all = HashSet::new();
    for (layer, kept) in KEPT[task].1.iter().enumerate() {
        for expert in (0..8).filter(|expert| !kept.contains(expert)) {
            for part in ["gate_proj", "up_proj", "down_proj"] {
                let layer = FIRST + layer;
                let name = format!("model.layers.{layer}.mlp.experts.{expert}.{part}.weight");
                all.insert(network.tensors.find(&name).unwrap());
            }
        }
    }
    all
}

fn all_logits(session: &mut Session, tokens: &[u32]) -> Vec<Vec<u32>> {
    let mut one = |prefill| {
        session.clear();
        logits(session, tokens, prefill).unwrap()
    };
    PREFILLS.map(&mut one).to_vec()
}

#[test]
fn masks_decide_which_experts_are_fetched() {
    let tokens = prompt("qwen3_moe");
    // One type; a type whose rows vary; two banks, of which a mask may leave one without experts; gates in a matrix of their
    // own.
    let types: [fn(Projection) -> Dtype; 4] = [
        |_| Dtype::F16,
        |_| Dtype::Q1t,
        |of| match of.expert.is_some_and(|expert| expert % 2 == 0) {
            true => Dtype::Q8Row,
            false => Dtype::Vbit,
        },
        |of| match of.part {
            "gate_proj" => Dtype::Q4Tiled,
            _ => Dtype::Q8Row,
        },
    ];
    for (number, dtype) in types.into_iter().enumerate() {
        let network = network(dtype);
        let whole = network.plan(None, 1 << 30).unwrap();
        let mut resident = network.session(whole.clone());
        let tasks = [None, Some(0), Some(1)];
        let wanted = tasks.map(|task| {
            resident.select(tasked(&network, &whole, task)).unwrap();
            all_logits(&mut resident, &tokens)
        });
        assert!(wanted[0] != wanted[1] && wanted[1] != wanted[2] && wanted[0] != wanted[2]);
        let counts = if number == 2 { &[2, 3][..] } else { &[2, 4, 7] };
        for &slots in counts {
            let plan = network.plan(Some(slots), 1 << 30).unwrap();
            assert!(!plan.graph.paged.is_empty());
            // A mask is selected at first, and after every other one.
            let mut session = network.session(tasked(&network, &plan, Some(1)));
            for task in [1, 0, 2, 0, 1, 2, 1] {
                let mask = [None, Some(0), Some(1)][task];
                session.select(tasked(&network, &plan, mask)).unwrap();
                network.tensors.read.lock().unwrap().clear();
                let before = session.counters();
                let found = all_logits(&mut session, &tokens);
                assert!(found == wanted[task], "types {number}, {slots} slots, task {task}");
                let counters = session.counters().since(&before);
                let read = network.tensors.read.lock().unwrap();
                assert_eq!(counters.expert_misses == 0, read.is_empty());
                if let Some(mask) = mask {
                    assert_eq!(read.intersection(&left_out(&network, mask)).count(), 0);
                }
            }
        }
    }
}

/// Experts are fetched once if a mask leaves no more than there are slots.
#[test]
fn experts_that_fit_under_a_mask_stay() {
    let network = network(|_| Dtype::Q4Block);
    let plan = network.plan(Some(5), 1 << 30).unwrap();
    let mut session = network.session(plan.clone());
    let tokens = prompt("qwen3_moe");
    session.select(tasked(&network, &plan, Some(1))).unwrap();
    all_logits(&mut session, &tokens);
    let warm = session.counters();
    all_logits(&mut session, &tokens);
    let counters = session.counters().since(&warm);
    assert_eq!((counters.expert_misses, counters.paged_bytes), (0, 0));
    assert!(counters.expert_hits > 0 && warm.expert_misses > 0);
}

#[test]
fn tasks_change_on_a_paged_engine() {
    let network = network(|_| Dtype::VbitRo);
    let tokens = prompt("qwen3_moe");
    let placed = |vram_mb| {
        let options = LoadOptions::default()
            .ctx(64)
            .vram_mb(vram_mb)
            .all_logits(true)
            .task(TaskChoice::Named("few".into()));
        let device = Some(crate::device());
        let tensors = network.tensors.clone();
        let mut silent = |_, _| ControlFlow::Continue(());
        LoadedModel::new(&network.arch, tensors, device, &options, &mut silent)
    };
    let mut whole = placed(None).unwrap();
    let bytes = whole.report.weight_bytes + whole.report.buffer_bytes;
    assert_eq!(whole.report.expert_slots, None);
    // It does not fit into whole MiB, rounded down.
    assert!(!bytes.is_multiple_of(1 << 20));
    let mut paged = placed(Some(bytes / (1 << 20))).unwrap();
    assert!(paged.report.expert_slots.is_some_and(|slots| (2..8).contains(&slots)));
    let choices = ["few", "late", "few"].map(|name| TaskChoice::Named(name.into()));
    for choice in [&choices[..], &[TaskChoice::Full]].concat() {
        whole.set_task(&choice).unwrap();
        paged.set_task(&choice).unwrap();
        let [found, wanted] = [&mut paged, &mut whole].map(|placed| all_logits(&mut placed.session, &tokens));
        assert!(found == wanted, "{choice:?}");
    }
    assert!(paged.session.counters().expert_misses > 0);
}
