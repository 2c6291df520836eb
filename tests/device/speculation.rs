//! Drafts change only the speed of an answer: tokens, ends and caches are the same, greedy and sampled, with draft heads that
//! are right, wrong and in between. And the draft head computes the recorded logits.

use crate::Place;
use crate::golden::{Recorded, drafted};
use cmf_gpu::Notice;
use cmf_gpu::dtype::Dtype;
use cmf_gpu::engine::planned;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::gpu::{Device, DeviceOptions};
use cmf_gpu::graph::{BatchShape, Executor, Measured};
use cmf_gpu::lm::run::{Cancel, DraftMode, Finish, Generation, Session};
use cmf_gpu::lm::{LowerOptions, Plan, ProgramKind, lower};
use cmf_gpu::model::{FeedForward, HeadInput, bind};
use cmf_gpu::op::{Kv, SlotState, batch_len};
use cmf_gpu::options::{LoadOptions, Speculation};
use cmf_gpu::sampling::Sampling;
use cmf_gpu::source::{Arch, Mask, MaskAxis, MaskShape, MemoryTensors, Mtp, MtpHidden, Tensors};
use cmf_gpu::synthetic::{ExpertShape, Shape, synthetic};
use std::ops::ControlFlow;
use std::sync::Arc;

/// The largest error of a draft head's logit.
const TOLERANCE: f32 = 1e-3;

struct Network {
    arch: Arch,
    tensors: Arc<dyn Tensors>,
    /// The selected mask, if there is one.
    mask: Option<Mask>,
    _dir: Option<tempfile::TempDir>,
}

impl Network {
    fn golden(name: &str) -> Network {
        let (container, dir): (Arc<CmfContainer>, _) = crate::golden(name, Dtype::F16);
        Network {
            arch: container.header().arch.clone(),
            tensors: container,
            mask: None,
            _dir: Some(dir),
        }
    }

    /// The same with a mask that leaves something out.
    fn masked(mut self, edit: impl FnOnce(&mut Mask)) -> Network {
        let mut mask = Mask::open(0, "task", MaskShape::of(&self.arch, true));
        edit(&mut mask);
        assert!(!mask.is_open());
        self.mask = Some(mask);
        self
    }

    /// The same with a draft head whose layer is a mixture of experts: a copy of the network's last layer. It reads mostly the
    /// token, and the output projection becomes the embedding, so that it often drafts the token that was sampled last.
    fn with_expert_head(mut self) -> Network {
        let last = format!("model.layers.{}.", self.arch.num_layers - 1);
        let hidden = self.arch.hidden_size;
        let mut all = Vec::new();
        for (id, info) in self.tensors.infos().iter().enumerate() {
            let payload = self.tensors.stored(id).unwrap().bytes.to_vec();
            let mut add = |name: String| all.push((name, info.dtype, info.shape.clone(), payload.clone()));
            if let Some(part) = info.name.strip_prefix(&last) {
                add(format!("model.mtp.layers.0.{part}"));
            }
            if info.name == "model.norm.weight" {
                for part in ["enorm", "hnorm", "norm"] {
                    add(format!("model.mtp.{part}.weight"));
                }
            }
            if info.name != "lm_head.weight" {
                add(info.name.clone());
            }
        }
        let weight = |row: usize, col: usize| match (row == col % hidden, col < hidden) {
            (true, true) => 24.0,
            (true, false) => 0.5,
            (false, _) => 0.0,
        };
        let weights = (0..hidden).flat_map(|row| (0..2 * hidden).map(move |col| weight(row, col)));
        let payload = weights.flat_map(|v| half::f16::from_f32(v).to_le_bytes()).collect();
        let shape = vec![hidden as u64, 2 * hidden as u64];
        all.push(("model.mtp.eh_proj.weight".into(), Dtype::F16, shape, payload));
        self.tensors = Arc::new(MemoryTensors::new(all).unwrap());
        self.arch.tie_word_embeddings = true;
        self.arch.mtp = Some(Mtp {
            num_layers: 1,
            share_lm_head: true,
            share_embed: true,
            hidden: Some(MtpHidden::PreNorm),
        });
        self
    }

    /// The same, with a header that specifies the hidden state that the draft head reads, or does not.
    fn with_head_input(mut self, hidden: Option<MtpHidden>) -> Network {
        self.arch.mtp.as_mut().unwrap().hidden = hidden;
        self
    }

    fn lowered(&self, options: &LowerOptions) -> Plan {
        let mut model = bind(&self.arch, &*self.tensors).unwrap();
        model.masks.masks = self.mask.iter().cloned().collect();
        let plan = lower(&model, &*self.tensors, options, &Measured::default()).unwrap();
        plan.with_mask(self.mask.as_ref()).unwrap()
    }

    fn plan(&self, drafts: u32, ctx: u32) -> Plan {
        self.lowered(&LowerOptions {
            kv: Kv::F16,
            drafts,
            ..crate::options(ctx)
        })
    }

    fn session(&self, drafts: u32, ctx: u32) -> Session {
        crate::session(Place::Device, &self.plan(drafts, ctx), self.tensors.clone())
    }
}

/// An answer, and the state of the session after it.
#[derive(Debug, PartialEq)]
struct Answer {
    tokens: Vec<u32>,
    finish: Finish,
    /// Tokens of the prompt that were run.
    run: usize,
    cached: Vec<u32>,
}

/// Settings of an answer, and the number of tokens after which the caller ends it.
struct Ask {
    generation: Generation,
    enough: usize,
}

fn greedy(max_tokens: usize) -> Ask {
    sampled(Sampling::greedy(), max_tokens)
}

fn sampled(sampling: Sampling, max_tokens: usize) -> Ask {
    Ask {
        generation: Generation {
            sampling,
            stops: Vec::new(),
            max_tokens,
        },
        enough: usize::MAX,
    }
}

fn ask(session: &mut Session, prompt: &[u32], ask: &Ask) -> Answer {
    let (run, flow) = session.prefill(prompt, &Cancel::new()).unwrap();
    assert!(flow.is_continue());
    let mut tokens = Vec::new();
    let mut emit = |token| {
        tokens.push(token);
        match tokens.len() < ask.enough {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(Finish::Interrupted),
        }
    };
    let finish = session.generate(&ask.generation, &Cancel::new(), &mut emit).unwrap();
    Answer {
        tokens,
        finish,
        run,
        cached: session.cached().to_vec(),
    }
}

const PROMPT: [u32; 7] = [51, 457, 310, 294, 82, 262, 220];

/// A long answer with any number of drafts. Returns the share of accepted drafts.
fn long_answers_are_the_same(name: &str, drafts: &[u32], asked: &Ask) -> f64 {
    assert_eq!(asked.generation.max_tokens, 520);
    same_answers(name, &Network::golden(name), drafts, asked)
}

/// The same answer of a network with any number of drafts. Returns the share of accepted drafts.
fn same_answers(name: &str, network: &Network, drafts: &[u32], asked: &Ask) -> f64 {
    let tokens = asked.generation.max_tokens;
    let ctx = tokens as u32 + 120;
    let plain = ask(&mut network.session(0, ctx), &PROMPT, asked);
    assert_eq!((plain.tokens.len(), plain.finish), (tokens, Finish::Length));
    let (mut all, mut accepted) = (0, 0);
    for &k in drafts {
        let mut session = network.session(k, ctx);
        let found = ask(&mut session, &PROMPT, asked);
        assert!(found == plain, "{name} with {k} drafts");
        let speculated = session.speculated();
        assert_eq!(
            speculated.steps + speculated.accepted,
            tokens as u64 - 1,
            "{name} with {k} drafts"
        );
        all += speculated.drafted;
        accepted += speculated.accepted;
    }
    f64::from(accepted as u32) / f64::from(all.max(1) as u32)
}

#[test]
fn greedy_answers_with_a_head() {
    // The head was trained on the first tokens of this answer, of which it drafts half. Later it is rarely right.
    let share = long_answers_are_the_same("qwen3_mtp", &[1, 2, 3, 4, 5, 6, 7], &greedy(520));
    assert!(share > 0.0, "{share}");
}

#[test]
fn greedy_answers_with_a_draft_head_and_recurrent_layers_are_the_same() {
    let share = long_answers_are_the_same("qwen3_5_hub", &[1, 3, 7], &greedy(520));
    assert!(share > 0.0, "{share}");
}

#[test]
fn answers_with_lookup_are_the_same() {
    long_answers_are_the_same("gemma2", &[2], &greedy(520));
    let share = long_answers_are_the_same("llama_tied", &[1, 3, 7], &repetitive(520));
    assert!(share > 0.9, "{share}");
}

/// A bonus for known tokens makes an answer repeat itself, so that many drafts are accepted.
fn repetitive(max_tokens: usize) -> Ask {
    let sampling = Sampling {
        frequency_penalty: -1.0,
        ..Sampling::greedy()
    };
    sampled(sampling, max_tokens)
}

#[test]
fn answers_of_mixtures_with_lookup_are_the_same() {
    for name in ["qwen3_moe", "qwen2_moe", "qwen3_5_moe_hub", "qwen3_next"] {
        let network = Network::golden(name);
        same_answers(name, &network, &[2, 7], &greedy(136));
        let share = same_answers(name, &network, &[1, 2, 3, 4, 5, 6, 7], &repetitive(160));
        assert!(share > 0.8, "{name}: {share}");
    }
}

#[test]
fn answers_with_a_mixture_as_draft_head_are_the_same() {
    for name in ["qwen3_moe", "qwen2_moe", "qwen3_5_moe"] {
        let network = Network::golden(name).with_expert_head();
        assert!(network.plan(3, 64).buffers.draft_batch.is_some(), "{name}");
        same_answers(name, &network, &[3], &greedy(136));
        let share = same_answers(name, &network, &[1, 2, 3, 5, 7], &repetitive(136));
        assert!(share > 0.5, "{name}: {share}");
    }
}

/// Networks with masks that leave out neurons, heads, layers and experts, as far as each has them.
fn masked_networks() -> Vec<(&'static str, Network)> {
    let every_third = |mask: &mut Mask, layer: usize, neurons: usize| {
        (0..neurons)
            .filter(|i| i % 3 == 1 || (32..96).contains(i))
            .for_each(|i| mask.set_unit(MaskAxis::Neurons, layer, i, false).unwrap());
    };
    let experts = |mask: &mut Mask| {
        // The last layer has fewer than a token takes.
        for (layer, expert) in [(2, 1), (2, 4), (2, 5)]
            .into_iter()
            .chain((1..8).map(|expert| (3, expert)))
        {
            mask.set_unit(MaskAxis::Experts, layer, expert, false).unwrap();
        }
        mask.set_unit(MaskAxis::Heads, 3, 1, false).unwrap();
    };
    let mut looped = Network::golden("qwen2");
    looped.arch.num_loops = 2;
    let looped = looped.masked(|mask| {
        every_third(mask, 0, 160);
        every_third(mask, 4, 64);
        mask.set_unit(MaskAxis::Heads, 5, 1, false).unwrap();
        mask.set_layer(1, false).unwrap();
    });
    let dense = |mask: &mut Mask| {
        every_third(mask, 0, 128);
        mask.set_unit(MaskAxis::Heads, 1, 0, false).unwrap();
        mask.set_layer(2, false).unwrap();
    };
    // The draft head was trained for the whole network, so the mask is small.
    let light = |mask: &mut Mask| {
        [3, 83]
            .iter()
            .for_each(|&i| mask.set_unit(MaskAxis::Neurons, 0, i, false).unwrap());
    };
    vec![
        ("qwen2, twice", looped),
        ("gemma2", Network::golden("gemma2").masked(dense)),
        ("qwen3_mtp", Network::golden("qwen3_mtp").masked(light)),
        ("qwen3_moe", Network::golden("qwen3_moe").masked(experts)),
        (
            "qwen3_moe with a head",
            Network::golden("qwen3_moe").with_expert_head().masked(experts),
        ),
    ]
}

#[test]
fn answers_with_masks_and_drafts_are_the_same() {
    for (name, mut network) in masked_networks() {
        let mask = network.mask.take();
        let without = ask(&mut network.session(0, 256), &PROMPT, &greedy(136));
        network.mask = mask;
        let masked = ask(&mut network.session(0, 256), &PROMPT, &greedy(136));
        assert!(without.tokens != masked.tokens, "{name}: the mask changes nothing");
        let shares = [
            same_answers(name, &network, &[1, 2, 3, 4, 5, 6, 7], &greedy(136)),
            same_answers(name, &network, &[3], &repetitive(136)),
        ];
        assert!(shares.iter().any(|&share| share > 0.01), "{name}: {shares:?}");
    }
}

/// Guards against logits of tokens side by side that differ in a bit from those of the same tokens decoded one by one, with the
/// same plan. Later tokens also depend on what the earlier ones left in caches and states.
fn tokens_side_by_side_are_decoded_tokens(name: &str, network: &Network, device: &Arc<Device>, drafts: u32) {
    let plan = network.plan(drafts, 96);
    let stride = (plan.vocab as usize).next_multiple_of(32);
    let ids: Vec<u32> = (0..24).map(|i| i * 211 % plan.vocab).collect();
    let run = |kind: ProgramKind, width: usize| -> Vec<u32> {
        let mut executor = crate::upload(device.clone(), &plan, network.tensors.clone()).unwrap();
        crate::write_greedy(&mut executor, &plan);
        let logits = plan.program(kind).output.unwrap();
        let (mut all, mut position) = (Vec::new(), 0);
        for ids in ids.chunks(width) {
            let shape = crate::begin(&mut executor, &plan, ids, position);
            position = shape.end;
            crate::run(&mut executor, &plan, kind, shape).unwrap();
            all.extend(executor.read(logits, 0, stride * ids.len()).unwrap());
        }
        all
    };
    let single = run(ProgramKind::Decode, 1);
    let together = run(ProgramKind::Speculate, drafts as usize + 1);
    for (position, (a, b)) in single.chunks(stride).zip(together.chunks(stride)).enumerate() {
        assert!(
            a == b,
            "{name}, {drafts} drafts: the logits of position {position} differ"
        );
    }
}

#[test]
fn tokens_of_speculative_steps_are_decoded_tokens_to_the_bit() {
    let tree = crate::open(DeviceOptions {
        force_tree: true,
        ..DeviceOptions::default()
    });
    let mixtures = ["qwen3_moe", "qwen2_moe", "qwen3_next", "qwen3_5_moe"];
    let mixtures = mixtures.map(|name| (name, Network::golden(name)));
    // A draft head would draft in the speculative steps.
    let masked = masked_networks()
        .into_iter()
        .filter(|(_, network)| network.arch.mtp.is_none());
    for (name, network) in mixtures.into_iter().chain(masked) {
        for drafts in 1..=7 {
            tokens_side_by_side_are_decoded_tokens(name, &network, &crate::device(), drafts);
        }
        tokens_side_by_side_are_decoded_tokens(name, &network, &tree, 4);
    }
}

#[test]
fn every_speculative_step_of_mixtures_and_under_masks_is_right() {
    let mixtures = ["qwen2_moe", "qwen3_moe"].map(|name| (name, Network::golden(name).with_expert_head()));
    let recurrent = [("qwen3_next", Network::golden("qwen3_next"))];
    for (name, network) in mixtures.into_iter().chain(recurrent).chain(masked_networks()) {
        let outcome = crate::compare_steps(&network.plan(3, 48), network.tensors.clone());
        assert_eq!(outcome.passed, outcome.cases, "{name}: {:?}", outcome.failed);
        let kinds = outcome.worst.keys().map(String::as_str);
        let compared = kinds.filter(|kind| kind.starts_with("speculate ")).count();
        assert!(compared > 5, "{name}: {compared} kernels in speculative steps");
    }
}

#[test]
fn a_speculative_step_reads_the_experts_of_every_token_and_takes_as_many_dispatches() {
    for name in ["qwen3_moe", "qwen2_moe", "qwen3_5_moe"] {
        let network = Network::golden(name);
        let model = bind(&network.arch, &*network.tensors).unwrap();
        let plan = network.plan(2, 64);
        let labels = |kind: ProgramKind| -> Vec<String> {
            let steps = plan.program(kind).steps.iter();
            steps.map(|step| step.label.clone()).collect()
        };
        assert_eq!(labels(ProgramKind::Speculate), labels(ProgramKind::Decode));
        // f16 weights of 2 bytes: the experts of a token, and the shared expert's gate and up projections.
        let mut bytes = 0;
        for layer in &model.layers {
            if let FeedForward::Moe(moe) = &layer.ffn {
                let width = moe.experts[0].down.cols;
                let shared = moe.shared.as_ref().map_or(0, |ffn| ffn.down.cols);
                bytes += 2 * model.hidden * (3 * width * moe.top_k + 2 * shared);
            }
        }
        assert!(bytes > 0);
        let more = plan.weight_bytes_read(ProgramKind::Speculate) - plan.weight_bytes_read(ProgramKind::Decode);
        assert_eq!(more, 2 * bytes as u64, "{name}");
    }
}

#[test]
fn what_cannot_be_combined_with_drafts_runs_without_them_and_reports_it() {
    let shape = Shape {
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
        ..Shape::named("qwen3.5-35b-a3b").unwrap().with_layers(4).unwrap()
    };
    let (arch, tensors) = synthetic(&shape, Dtype::Q8Row).unwrap();
    let options = LoadOptions::default().ctx(128).speculation(Speculation::Drafts(3));
    let free = planned(&arch, &tensors, &options).unwrap();
    assert_eq!((free.plan.drafts, free.notices), (3, Vec::new()));
    let counted = options.clone().count_routes(true);
    let counted = planned(&arch, &tensors, &counted).unwrap();
    assert!(counted.plan.drafts == 0 && !counted.plan.graph.routed.is_empty());
    assert_eq!(counted.notices, [Notice::NoDraftsWhileCounting]);
    let needs = free.plan.graph.weight_bytes() + free.plan.graph.buffer_bytes();
    let paged = options.vram_mb(needs / (1 << 20) - 2);
    let paged = planned(&arch, &tensors, &paged).unwrap();
    assert!(paged.plan.drafts == 0 && !paged.plan.graph.paged.is_empty());
    assert!(
        matches!(
            paged.notices[..],
            [Notice::NoDraftsWhilePaging, Notice::ExpertsPaged { experts: 64, .. }]
        ),
        "{:?}",
        paged.notices
    );
}

#[test]
fn sampled_answers_are_the_same() {
    for name in ["qwen3_mtp", "llama_tied", "qwen3_5_hub", "qwen3_moe"] {
        let network = Network::golden(name);
        for (seed, penalty) in [(1, 1.0), (2, 1.3)] {
            let sampling = Sampling {
                seed,
                temperature: 0.6,
                repeat_penalty: penalty,
                frequency_penalty: penalty - 1.0,
                ..Sampling::default()
            };
            let asked = sampled(sampling, 200);
            let plain = ask(&mut network.session(0, 256), &PROMPT, &asked);
            for k in [1, 3, 7] {
                let mut session = network.session(k, 256);
                let found = ask(&mut session, &PROMPT, &asked);
                assert!(found == plain, "{name}, seed {seed}, {k} drafts");
            }
        }
    }
}

/// Every way in which an answer can end within a speculative step, and the prompt after it.
fn ends(name: &str, drafts: u32) {
    let network = Network::golden(name);
    let path = ask(&mut network.session(0, 64), &PROMPT, &greedy(24)).tokens;
    let mut asks: Vec<(String, u32, Ask)> = Vec::new();
    for n in [1, 2, 3, 5, 8, 9] {
        asks.push((format!("{n} tokens at most"), 64, greedy(n)));
        asks.push((format!("context of {}", 7 + n), 7 + n as u32, greedy(24)));
        let mut stops = greedy(24);
        stops.generation.stops = vec![path[n]];
        asks.push((format!("stop at {}", path[n]), 64, stops));
        let enough = Ask {
            enough: n,
            ..greedy(24)
        };
        asks.push((format!("enough after {n}"), 64, enough));
    }
    for (what, ctx, asked) in &asks {
        let (mut plain, mut speculative) = (network.session(0, *ctx), network.session(drafts, *ctx));
        let wanted = ask(&mut plain, &PROMPT, asked);
        let found = ask(&mut speculative, &PROMPT, asked);
        assert_eq!(found, wanted, "{name}, {drafts} drafts, {what}");
        // A second turn, after the whole answer and after a part of it.
        for keep in [wanted.tokens.len(), wanted.tokens.len() / 2] {
            let mut next = [&PROMPT[..], &wanted.tokens[..keep], &[9, 8]].concat();
            next.truncate(*ctx as usize);
            let (wanted, found) = (
                ask(&mut plain, &next, &greedy(8)),
                ask(&mut speculative, &next, &greedy(8)),
            );
            match plain.plan().kept_states {
                None => assert_eq!(found, wanted, "{name}, {drafts} drafts, {what}, then again"),
                // The number of kept states depends on the number of drafts, so other tokens are run again.
                Some(_) => assert_eq!(
                    found.tokens, wanted.tokens,
                    "{name}, {drafts} drafts, {what}, then again"
                ),
            }
        }
    }
}

#[test]
fn answers_with_a_draft_head_end_at_the_same_token() {
    ends("qwen3_mtp", 3);
}

#[test]
fn answers_with_lookup_end_at_the_same_token() {
    ends("llama_tied", 4);
}

#[test]
fn answers_with_recurrent_layers_end_at_the_same_token() {
    ends("qwen3_5_hub", 2);
}

#[test]
fn a_head_that_is_always_wrong_costs_steps_and_no_token() {
    let mut network = Network::golden("qwen3_mtp");
    let plain = ask(&mut network.session(0, 128), &PROMPT, &greedy(64));
    assert!(!plain.tokens.contains(&0));
    let all = network.tensors.infos().iter().enumerate().map(|(id, info)| {
        let mut payload = network.tensors.stored(id).unwrap().bytes.to_vec();
        // All logits are equal, so token 0 is drafted.
        if info.name == "model.mtp.norm.weight" {
            payload.fill(0);
        }
        (info.name.clone(), info.dtype, info.shape.clone(), payload)
    });
    network.tensors = Arc::new(MemoryTensors::new(all).unwrap());
    let mut session = network.session(3, 128);
    assert_eq!(ask(&mut session, &PROMPT, &greedy(64)), plain);
    let speculated = session.speculated();
    assert_eq!((speculated.mode, speculated.accepted), (DraftMode::Head, 0));
    assert_eq!(speculated.steps, 63);
    // The last steps need fewer than three.
    assert_eq!(speculated.drafted, 3 * 63 - (1 + 2 + 3));
}

#[test]
fn a_speculative_step_is_one_submit_and_reads_64_bytes() {
    let network = Network::golden("qwen3_mtp");
    let mut session = network.session(3, 256);
    ask(&mut session, &PROMPT, &greedy(100));
    let (steps, cost) = session.decode_cost();
    assert_eq!(session.speculated().steps, steps);
    assert!(steps < 100);
    assert_eq!(
        (cost.submits, cost.passes, cost.readback_bytes),
        (steps, steps, 64 * steps)
    );
    assert_eq!(
        (cost.bind_groups_created, cost.buffers_created, cost.write_buffer_calls),
        (0, 0, 0)
    );
}

/// The recorded sequence: tokens, and for each position the draft and whether it is accepted.
fn sequence(name: &str, number: usize, hidden: &str) -> (Vec<u32>, Vec<u32>, Vec<bool>) {
    let all = drafted(name);
    let one = &all["sequences"][number];
    let ids = |value: &serde_json::Value| -> Vec<u32> {
        let ids = value.as_array().unwrap().iter();
        ids.map(|id| id.as_u64().unwrap() as u32).collect()
    };
    let stands = one[hidden]["accepted"].as_array().unwrap().iter();
    (
        ids(&one["tokens"]),
        ids(&one[hidden]["draft"]),
        stands.map(|stands| stands.as_bool().unwrap()).collect(),
    )
}

const READINGS: [(&str, MtpHidden, HeadInput); 2] = [
    ("pre_norm", MtpHidden::PreNorm, HeadInput::Stream),
    ("post_norm", MtpHidden::PostNorm, HeadInput::Normed),
];

/// The first draft after every position of a recorded sequence, with both readings of the hidden state. The file does not
/// specify one, so the option decides.
fn drafts_are_the_recorded_ones(name: &str, place: Place) {
    let network = Network::golden(name).with_head_input(None);
    let recorded = Recorded::of_head(name);
    for (hidden, _, draft_input) in READINGS {
        let plan = network.lowered(&LowerOptions {
            drafts: 3,
            draft_input,
            ..crate::options(96)
        });
        let (tokens, drafts, _) = sequence(name, 0, hidden);
        let wanted = recorded.rows(&format!("seq0.{hidden}.draft_logits"));
        assert_eq!((wanted.len(), drafts.len(), tokens.len()), (12, 38, 40));
        let mut executor = crate::executor(place, &plan, network.tensors.clone());
        let executor = &mut *executor;
        crate::write_greedy(executor, &plan);
        let steps = &plan.program(ProgramKind::Speculate).steps;
        let first = steps.iter().position(|step| step.label == "draft").unwrap();
        for p in 0..drafts.len() {
            let position = p as u32;
            let shape = crate::begin(executor, &plan, &tokens[p..=p], position);
            crate::run(executor, &plan, ProgramKind::Decode, shape).unwrap();
            // As if the sequence's next token had been sampled.
            let next = tokens[p + 1];
            crate::begin(executor, &plan, &[next], position + 1);
            let mut state = SlotState {
                count: 1,
                last: 96,
                ..SlotState::default()
            };
            state.sampled[0] = next;
            executor.write(plan.buffers.slots, state.words()).unwrap();
            // The draft head runs one token.
            let shape = BatchShape {
                tokens: 1,
                end: position + 1,
            };
            executor
                .run(ProgramKind::Speculate as usize, 0..first + 1, shape)
                .unwrap();
            let logits = plan.program(ProgramKind::Decode).output.unwrap();
            let found = executor.read(logits, 0, plan.vocab as usize).unwrap();
            let found: &[f32] = bytemuck::cast_slice(&found);
            // Logits were recorded for the last positions, drafts for all.
            let wanted = p.checked_sub(drafts.len() - wanted.len()).map(|row| &wanted[row]);
            if let Some(wanted) = wanted {
                assert_eq!(found.len(), wanted.values.len());
                for (k, (f, w)) in found.iter().zip(&wanted.values).enumerate() {
                    let close = (f - w).abs() <= TOLERANCE - wanted.slack;
                    assert!(
                        close,
                        "{name}, {hidden}, position {p}, token {k}: expected {w}, found {f}"
                    );
                }
            }
            // The draft is the second token to verify.
            let draft = executor.read(plan.buffers.batch, batch_len(1), 1).unwrap();
            assert_eq!(draft, [drafts[p]], "{name}, {hidden}, position {p}");
        }
    }
}

/// One draft in each step along the recorded greedy path: as many are accepted as were recorded at the positions of the drafts.
/// The file specifies the reading, so the option has no effect.
fn acceptance_is_the_recorded_one(name: &str, place: Place) {
    let other = [HeadInput::Normed, HeadInput::Stream];
    for ((hidden, specified, _), draft_input) in READINGS.into_iter().zip(other) {
        let network = Network::golden(name).with_head_input(Some(specified));
        let plan = network.lowered(&LowerOptions {
            drafts: 1,
            draft_input,
            ..crate::options(96)
        });
        let mut session = crate::session(place, &plan, network.tensors.clone());
        for (number, prompt) in [7, 40].into_iter().enumerate() {
            let (tokens, _, stands) = sequence(name, number, hidden);
            session.clear();
            let found = ask(&mut session, &tokens[..prompt], &greedy(32));
            assert_eq!(found.tokens[..], tokens[prompt..prompt + 32]);
            let (mut p, mut steps, mut accepted) = (prompt - 1, 0, 0);
            // The last token is at prompt + 31.
            while p + 1 < prompt + 31 {
                steps += 1;
                // The last step before the end verifies no draft.
                let verified = p + 2 <= prompt + 31;
                accepted += u64::from(verified && stands[p]);
                p += if verified && stands[p] { 2 } else { 1 };
            }
            let speculated = session.speculated();
            assert_eq!(
                (speculated.steps, speculated.accepted),
                (steps, accepted),
                "{name}, {hidden}, {number}"
            );
            assert!(accepted * 3 > steps, "{accepted} of {steps}");
        }
    }
}

/// Guards against an option of loading that has no effect, or that overrides the file.
#[test]
fn the_option_selects_the_reading_unless_the_file_does() {
    let normalises = |network: &Network, draft_input: HeadInput| {
        let options = LoadOptions::default().ctx(96).draft_input(draft_input);
        let plan = planned(&network.arch, &*network.tensors, &options).unwrap().plan;
        let mut steps = plan.program(ProgramKind::Speculate).steps.iter();
        steps.any(|step| step.label == "draft.hidden")
    };
    let network = Network::golden("qwen3_mtp").with_head_input(None);
    assert!(!normalises(&network, HeadInput::Stream) && normalises(&network, HeadInput::Normed));
    for (_, specified, reading) in READINGS {
        let network = Network::golden("qwen3_mtp").with_head_input(Some(specified));
        for option in [HeadInput::Stream, HeadInput::Normed] {
            assert_eq!(
                normalises(&network, option),
                reading == HeadInput::Normed,
                "{specified:?}"
            );
        }
    }
}

/// The reading decides which drafts are accepted, and not the answer.
#[test]
fn both_readings_give_the_same_answer() {
    let speculated = ["qwen3_mtp", "qwen3_5_hub"].map(|name| {
        let network = Network::golden(name).with_head_input(None);
        let plain = ask(&mut network.session(0, 256), &PROMPT, &greedy(136));
        READINGS.map(|(hidden, _, draft_input)| {
            let plan = network.lowered(&LowerOptions {
                kv: Kv::F16,
                drafts: 3,
                draft_input,
                ..crate::options(256)
            });
            let mut session = crate::session(Place::Device, &plan, network.tensors.clone());
            let found = ask(&mut session, &PROMPT, &greedy(136));
            assert!(found == plain, "{name}, {hidden}");
            session.speculated()
        })
    });
    let differ = speculated.iter().any(|[stream, normed]| stream != normed);
    assert!(differ, "both readings give the same drafts: {speculated:?}");
}

mod device {
    #[test]
    fn drafts_of_qwen3_mtp() {
        super::drafts_are_the_recorded_ones("qwen3_mtp", crate::Place::Device);
        super::acceptance_is_the_recorded_one("qwen3_mtp", crate::Place::Device);
    }

    #[test]
    fn drafts_of_qwen3_5_hub() {
        super::drafts_are_the_recorded_ones("qwen3_5_hub", crate::Place::Device);
        super::acceptance_is_the_recorded_one("qwen3_5_hub", crate::Place::Device);
    }
}

mod host {
    #[test]
    fn drafts_of_qwen3_mtp() {
        super::drafts_are_the_recorded_ones("qwen3_mtp", crate::Place::Host);
        super::acceptance_is_the_recorded_one("qwen3_mtp", crate::Place::Host);
    }

    #[test]
    fn drafts_of_qwen3_5_hub() {
        super::drafts_are_the_recorded_ones("qwen3_5_hub", crate::Place::Host);
        super::acceptance_is_the_recorded_one("qwen3_5_hub", crate::Place::Host);
    }
}
