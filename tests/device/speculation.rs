//! Drafts change how fast an answer comes and nothing else: tokens, ends and caches, greedy and sampled, with heads that are
//! right, wrong and in between. And the draft head computes what was recorded.

use crate::golden::{Recorded, drafted};
use cmf_gpu::container::{Arch, Container, Mask, MaskShape, MemoryTensors, Mtp, MtpHidden, Tensors};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::engine::planned;
use cmf_gpu::gpu::{Device, DeviceOptions, GpuExecutor};
use cmf_gpu::host::HostExecutor;
use cmf_gpu::kernel::Kv;
use cmf_gpu::model::{FeedForward, bind};
use cmf_gpu::options::{LoadOptions, Speculation};
use cmf_gpu::parity::{self, Subject};
use cmf_gpu::program::{Ctl, Executor, ExpertOptions, Extent, Plan, PlanOptions, Which, plan};
use cmf_gpu::sampling::Sampling;
use cmf_gpu::session::{Cancel, DraftMode, Finish, Generation, Session};
use cmf_gpu::synthetic::{ExpertShape, Shape, synthetic};
use std::ops::ControlFlow;
use std::sync::Arc;

/// How far a draft's logit may be from what was recorded.
const TOLERANCE: f32 = 1e-3;

struct Network {
    arch: Arch,
    tensors: Arc<dyn Tensors>,
    /// In force, where there is one.
    mask: Option<Mask>,
    _dir: Option<tempfile::TempDir>,
}

impl Network {
    fn golden(name: &str) -> Network {
        let (container, dir): (Arc<Container>, _) = crate::golden(name, Dtype::F16);
        Network {
            arch: container.header().arch.clone(),
            tensors: container,
            mask: None,
            _dir: Some(dir),
        }
    }

    /// With a mask that leaves something out.
    fn masked(mut self, edit: impl FnOnce(&mut Mask)) -> Network {
        let mut mask = Mask::open(0, "task", MaskShape::of(&self.arch, true));
        edit(&mut mask);
        assert!(!mask.is_open());
        self.mask = Some(mask);
        self
    }

    /// With a draft head whose layer is a mixture of experts: the network's last layer once more. It reads the token and little
    /// else, and the output projection becomes the embedding, so that mostly it drafts the token that was sampled last.
    fn with_expert_head(mut self) -> Network {
        let last = format!("model.layers.{}.", self.arch.num_layers - 1);
        let hidden = self.arch.hidden_size;
        let mut all = Vec::new();
        for (id, info) in self.tensors.infos().iter().enumerate() {
            let payload = self.tensors.bytes(id).unwrap().to_vec();
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

    fn plan(&self, drafts: u32, ctx: u32, kv: Kv) -> Arc<Plan> {
        let mut model = bind(&self.arch, &*self.tensors).unwrap();
        model.masks.masks = self.mask.iter().cloned().collect();
        let options = PlanOptions {
            ctx,
            chunk: 16,
            kv,
            max_binding: crate::device().max_binding(),
            all_logits: false,
            drafts,
            experts: ExpertOptions::default(),
        };
        let plan = plan(&model, &*self.tensors, &options).unwrap();
        Arc::new(plan.with_mask(self.mask.as_ref()).unwrap())
    }

    fn executor(&self, plan: &Arc<Plan>, on_host: bool) -> Box<dyn Executor> {
        match on_host {
            true => Box::new(HostExecutor::new(plan.clone(), self.tensors.clone()).unwrap()),
            false => self.on(crate::device(), plan),
        }
    }

    fn on(&self, device: Arc<Device>, plan: &Arc<Plan>) -> Box<dyn Executor> {
        let executor = GpuExecutor::new(device, plan.clone(), &*self.tensors, &mut |_, _| Ok(()));
        Box::new(executor.unwrap())
    }

    fn session(&self, drafts: u32, ctx: u32) -> Session {
        let plan = self.plan(drafts, ctx, Kv::F16);
        let executor = self.executor(&plan, false);
        Session::new(plan, executor)
    }
}

/// What an answer was, and what it left behind.
#[derive(Debug, PartialEq)]
struct Answer {
    tokens: Vec<u32>,
    finish: Finish,
    /// Of the prompt.
    run: usize,
    cached: Vec<u32>,
}

/// Settings of an answer, and the token at which who listens has heard enough.
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
            false => ControlFlow::Break(()),
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

/// A long answer with any number of drafts; the share of drafts that stood.
fn long_answers_are_the_same(name: &str, drafts: &[u32], asked: &Ask) -> f64 {
    assert_eq!(asked.generation.max_tokens, 520);
    same_answers(name, &Network::golden(name), drafts, asked)
}

/// The answer of a network without drafts, with any number of them; the share of drafts that stood.
fn same_answers(name: &str, network: &Network, drafts: &[u32], asked: &Ask) -> f64 {
    let tokens = asked.generation.max_tokens;
    let ctx = tokens as u32 + 120;
    let plain = ask(&mut network.session(0, ctx), &PROMPT, asked);
    assert_eq!((plain.tokens.len(), plain.finish), (tokens, Finish::Length));
    let (mut all, mut stood) = (0, 0);
    for &k in drafts {
        let mut session = network.session(k, ctx);
        let found = ask(&mut session, &PROMPT, asked);
        assert!(found == plain, "{name} with {k} drafts");
        let speculated = session.speculated();
        assert_eq!(
            speculated.rounds + speculated.accepted,
            tokens as u64 - 1,
            "{name} with {k} drafts"
        );
        all += speculated.drafted;
        stood += speculated.accepted;
    }
    f64::from(stood as u32) / f64::from(all.max(1) as u32)
}

#[test]
fn greedy_answers_with_a_head() {
    // The head was trained on the first tokens of this answer, of which it drafts half; later it is right now and then.
    let share = long_answers_are_the_same("qwen3_mtp", &[1, 2, 3, 4, 5, 6, 7], &greedy(520));
    assert!(share > 0.0, "{share}");
}

#[test]
fn greedy_answers_with_a_head_and_recurrent_layers() {
    let share = long_answers_are_the_same("qwen3_5_hub", &[1, 3, 7], &greedy(520));
    assert!(share > 0.0, "{share}");
}

#[test]
fn answers_by_lookup() {
    long_answers_are_the_same("gemma2", &[2], &greedy(520));
    let share = long_answers_are_the_same("llama_tied", &[1, 3, 7], &repetitive(520));
    assert!(share > 0.9, "{share}");
}

/// A bonus for what was said before makes an answer repeat itself, so that many drafts stand.
fn repetitive(max_tokens: usize) -> Ask {
    let sampling = Sampling {
        frequency_penalty: -1.0,
        ..Sampling::greedy()
    };
    sampled(sampling, max_tokens)
}

#[test]
fn answers_of_mixtures_by_lookup() {
    for name in ["qwen3_moe", "qwen2_moe", "qwen3_5_moe_hub", "qwen3_next"] {
        let network = Network::golden(name);
        same_answers(name, &network, &[2, 7], &greedy(136));
        let share = same_answers(name, &network, &[1, 2, 3, 4, 5, 6, 7], &repetitive(160));
        assert!(share > 0.8, "{name}: {share}");
    }
}

#[test]
fn answers_with_a_head_that_is_a_mixture() {
    for name in ["qwen3_moe", "qwen2_moe", "qwen3_5_moe"] {
        let network = Network::golden(name).with_expert_head();
        let plan = network.plan(3, 64, Kv::F16);
        assert!(plan.fixed.head.is_some(), "{name}");
        same_answers(name, &network, &[3], &greedy(136));
        let share = same_answers(name, &network, &[1, 2, 3, 5, 7], &repetitive(136));
        assert!(share > 0.5, "{name}: {share}");
    }
}

/// Networks of which a mask leaves out neurons, heads, layers and experts, as far as each has them.
fn masked_networks() -> Vec<(&'static str, Network)> {
    let every_third = |mask: &mut Mask, layer: usize, neurons: usize| {
        (0..neurons)
            .filter(|i| i % 3 == 1 || (32..96).contains(i))
            .for_each(|i| mask.set_ffn(layer, i, false).unwrap());
    };
    let experts = |mask: &mut Mask| {
        // In the last layer fewer than a token takes.
        for (layer, expert) in [(2, 1), (2, 4), (2, 5)]
            .into_iter()
            .chain((1..8).map(|expert| (3, expert)))
        {
            mask.set_expert(layer, expert, false).unwrap();
        }
        mask.set_head(3, 1, false).unwrap();
    };
    let mut looped = Network::golden("qwen2");
    looped.arch.num_loops = 2;
    let looped = looped.masked(|mask| {
        every_third(mask, 0, 160);
        every_third(mask, 4, 64);
        mask.set_head(5, 1, false).unwrap();
        mask.set_layer(1, false).unwrap();
    });
    let dense = |mask: &mut Mask| {
        every_third(mask, 0, 128);
        mask.set_head(1, 0, false).unwrap();
        mask.set_layer(2, false).unwrap();
    };
    // The head was trained for the whole network.
    let light = |mask: &mut Mask| {
        [3, 83].iter().for_each(|&i| mask.set_ffn(0, i, false).unwrap());
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
fn answers_under_masks() {
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

/// Every column of rounds of so many against decoding the same tokens one by one, with the same plan: logits to the bit, the
/// later ones with what the earlier ones left in caches and states.
fn columns_are_decoded_tokens(name: &str, network: &Network, device: &Arc<Device>, drafts: u32) {
    let plan = network.plan(drafts, 96, Kv::F16);
    let logits = plan.program(Which::Decode).logits.unwrap();
    let stride = (plan.vocab as usize).next_multiple_of(32);
    let tokens: Vec<u32> = (0..24).map(|i| i * 211 % plan.vocab).collect();
    let run = |which: Which, width: usize| -> Vec<u32> {
        let mut executor = network.on(device.clone(), &plan);
        let settings = Sampling::greedy().words(&[]).unwrap();
        executor.write(plan.fixed.settings, &settings).unwrap();
        let mut all = Vec::new();
        for (round, tokens) in tokens.chunks(width).enumerate() {
            let mut ctl = Ctl {
                pos: (round * width) as u32,
                columns: tokens.len() as u32,
                last: 96,
                ..Ctl::default()
            };
            ctl.tokens[..tokens.len()].copy_from_slice(tokens);
            executor.write(plan.fixed.ctl, bytemuck::cast_slice(&[ctl])).unwrap();
            let extent = Extent {
                columns: tokens.len() as u32,
                end: (round * width + tokens.len()) as u32,
            };
            let ticket = executor.submit(which, extent).unwrap();
            executor.wait(ticket).unwrap();
            all.extend(executor.read(logits, 0, stride * tokens.len()).unwrap());
        }
        all
    };
    let single = run(Which::Decode, 1);
    let together = run(Which::Round, drafts as usize + 1);
    for (position, (a, b)) in single.chunks(stride).zip(together.chunks(stride)).enumerate() {
        assert!(
            a == b,
            "{name}, {drafts} drafts: the logits of position {position} differ"
        );
    }
}

#[test]
fn columns_of_rounds_are_decoded_tokens_to_the_bit() {
    let tree = crate::open(DeviceOptions {
        force_tree: true,
        ..DeviceOptions::default()
    });
    let mixtures = ["qwen3_moe", "qwen2_moe", "qwen3_next", "qwen3_5_moe"];
    let mixtures = mixtures.map(|name| (name, Network::golden(name)));
    // Heads would draft in the rounds.
    let masked = masked_networks()
        .into_iter()
        .filter(|(_, network)| network.arch.mtp.is_none());
    for (name, network) in mixtures.into_iter().chain(masked) {
        for drafts in 1..=7 {
            columns_are_decoded_tokens(name, &network, &crate::device(), drafts);
        }
        columns_are_decoded_tokens(name, &network, &tree, 4);
    }
}

#[test]
fn every_step_of_rounds_of_mixtures_and_under_masks_is_right() {
    let mixtures = ["qwen2_moe", "qwen3_moe"].map(|name| (name, Network::golden(name).with_expert_head()));
    let recurrent = [("qwen3_next", Network::golden("qwen3_next"))];
    for (name, network) in mixtures.into_iter().chain(recurrent).chain(masked_networks()) {
        let plan = network.plan(3, 48, Kv::F16);
        let subject = Subject {
            plan,
            tensors: network.tensors.clone(),
        };
        let outcome = parity::programs(&crate::device(), &subject, &subject, &mut |_, _, _| Ok(())).unwrap();
        assert_eq!(outcome.passed, outcome.cases, "{name}: {:?}", outcome.failed);
        let kinds = outcome.worst.iter().map(|kind| kind.0.as_str());
        let judged = kinds.filter(|kind| kind.starts_with("round ")).count();
        assert!(judged > 5, "{name}: {judged} kernels in rounds");
    }
}

#[test]
fn a_round_reads_the_experts_of_every_column_and_takes_as_many_dispatches() {
    for name in ["qwen3_moe", "qwen2_moe", "qwen3_5_moe"] {
        let network = Network::golden(name);
        let model = bind(&network.arch, &*network.tensors).unwrap();
        let plan = network.plan(2, 64, Kv::F16);
        let labels = |which: Which| -> Vec<String> {
            let steps = plan.program(which).steps.iter();
            steps.map(|step| step.label.clone()).collect()
        };
        assert_eq!(labels(Which::Round), labels(Which::Decode));
        // Of f16 weights, two bytes each: what a token takes, and the shared expert's gate and up projections with it.
        let mut bytes = 0;
        for layer in &model.layers {
            if let FeedForward::Moe(moe) = &layer.ffn {
                let width = moe.experts[0].down.cols;
                let shared = moe.shared.as_ref().map_or(0, |ffn| ffn.down.cols);
                bytes += 2 * model.hidden * (3 * width * moe.top_k + 2 * shared);
            }
        }
        assert!(bytes > 0);
        let more = plan.weight_bytes_read(Which::Round) - plan.weight_bytes_read(Which::Decode);
        assert_eq!(more, 2 * bytes as u64, "{name}");
    }
}

#[test]
fn what_cannot_be_combined_with_drafts_goes_without_and_says_so() {
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
        ..Shape::named("qwen3.5-35b-a3b").unwrap().with_layers(4).unwrap()
    };
    let (arch, tensors) = synthetic(&shape, Dtype::Q8Row).unwrap();
    let options = LoadOptions {
        ctx: Some(128),
        speculation: Speculation::Drafts(3),
        ..LoadOptions::default()
    };
    let free = planned(&arch, &tensors, &options).unwrap();
    assert_eq!((free.plan.drafts, free.notice), (3, None));
    let counted = LoadOptions {
        count_routes: true,
        ..options.clone()
    };
    let counted = planned(&arch, &tensors, &counted).unwrap();
    assert!(counted.plan.drafts == 0 && !counted.plan.routed.is_empty());
    assert!(
        counted
            .notice
            .unwrap()
            .contains("nothing is drafted while it is counted")
    );
    let needs = free.plan.weight_bytes() + free.plan.buffer_bytes();
    let paged = LoadOptions {
        vram_mb: Some(needs / (1 << 20) - 2),
        ..options
    };
    let paged = planned(&arch, &tensors, &paged).unwrap();
    assert!(paged.plan.drafts == 0 && !paged.plan.paged.is_empty());
    let said = paged.notice.unwrap();
    assert!(
        said.contains("nothing is drafted while experts are fetched; ") && said.contains("of 64 experts"),
        "{said}"
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

/// Every way in which an answer can end within a round, and what the next prompt finds.
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
        let (mut plain, mut rounds) = (network.session(0, *ctx), network.session(drafts, *ctx));
        let wanted = ask(&mut plain, &PROMPT, asked);
        let found = ask(&mut rounds, &PROMPT, asked);
        assert_eq!(found, wanted, "{name}, {drafts} drafts, {what}");
        // A second turn, after all that was handed out and after a part of it.
        for keep in [wanted.tokens.len(), wanted.tokens.len() / 2] {
            let mut next = [&PROMPT[..], &wanted.tokens[..keep], &[9, 8]].concat();
            next.truncate(*ctx as usize);
            let (wanted, found) = (ask(&mut plain, &next, &greedy(8)), ask(&mut rounds, &next, &greedy(8)));
            match plain.plan().kept_states {
                None => assert_eq!(found, wanted, "{name}, {drafts} drafts, {what}, then again"),
                // States are kept for as many positions as there are columns; what is run again differs.
                Some(_) => assert_eq!(
                    found.tokens, wanted.tokens,
                    "{name}, {drafts} drafts, {what}, then again"
                ),
            }
        }
    }
}

#[test]
fn answers_with_a_head_end_alike() {
    ends("qwen3_mtp", 3);
}

#[test]
fn answers_by_lookup_end_alike() {
    ends("llama_tied", 4);
}

#[test]
fn answers_with_recurrent_layers_end_alike() {
    ends("qwen3_5_hub", 2);
}

#[test]
fn a_head_that_is_always_wrong_costs_rounds_and_no_token() {
    let mut network = Network::golden("qwen3_mtp");
    let plain = ask(&mut network.session(0, 128), &PROMPT, &greedy(64));
    assert!(!plain.tokens.contains(&0));
    let all = network.tensors.infos().iter().enumerate().map(|(id, info)| {
        let mut payload = network.tensors.bytes(id).unwrap().to_vec();
        // No logit is larger than another, so that token 0 is drafted.
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
    assert_eq!(speculated.rounds, 63);
    // The last rounds have no use for all three.
    assert_eq!(speculated.drafted, 3 * 63 - (1 + 2 + 3));
}

#[test]
fn a_round_is_one_submit_and_reads_64_bytes() {
    let network = Network::golden("qwen3_mtp");
    let mut session = network.session(3, 256);
    ask(&mut session, &PROMPT, &greedy(100));
    let (rounds, cost) = session.decode_cost();
    assert_eq!(session.speculated().rounds, rounds);
    assert!(rounds < 100);
    assert_eq!(
        (cost.submits, cost.passes, cost.readback_bytes),
        (rounds, rounds, 64 * rounds)
    );
    assert_eq!(
        (cost.bind_groups_created, cost.buffers_created, cost.write_buffer_calls),
        (0, 0, 0)
    );
}

/// The recorded sequence: tokens, then for each position the draft and whether it stands.
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

/// The first draft after every position of a recorded sequence, with both readings of the hidden state.
fn drafts_are_the_recorded_ones(name: &str, on_host: bool) {
    let network = Network::golden(name);
    let plan = network.plan(3, 96, Kv::F32);
    let recorded = Recorded::of_head(name);
    for (which, hidden) in [(Which::Round, "pre_norm"), (Which::OtherRound, "post_norm")] {
        let (tokens, drafts, _) = sequence(name, 0, hidden);
        let wanted = recorded.rows(&format!("seq0.{hidden}.draft_logits"));
        assert_eq!((wanted.len(), drafts.len(), tokens.len()), (12, 38, 40));
        let mut executor = network.executor(&plan, on_host);
        let settings = Sampling::greedy().words(&[]).unwrap();
        executor.write(plan.fixed.settings, &settings).unwrap();
        let steps = &plan.program(which).steps;
        let first = steps.iter().position(|step| step.label == "draft").unwrap();
        for p in 0..drafts.len() {
            let mut ctl = Ctl {
                pos: p as u32,
                columns: 1,
                ..Ctl::default()
            };
            ctl.tokens[0] = tokens[p];
            let extent = Extent {
                columns: 1,
                end: p as u32 + 1,
            };
            executor.write(plan.fixed.ctl, bytemuck::cast_slice(&[ctl])).unwrap();
            let ticket = executor.submit(Which::Decode, extent).unwrap();
            executor.wait(ticket).unwrap();
            // As if the sequence's next token had been sampled.
            ctl = Ctl {
                pos: p as u32 + 1,
                count: 1,
                last: 96,
                ..ctl
            };
            ctl.tokens[1] = tokens[p + 1];
            executor.write(plan.fixed.ctl, bytemuck::cast_slice(&[ctl])).unwrap();
            executor.run(which, 0..first + 1, extent).unwrap();
            let logits = plan.program(Which::Decode).logits.unwrap();
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
                        "{name}, {hidden}, position {p}, token {k}: wanted {w}, found {f}"
                    );
                }
            }
            let after = executor.read(plan.fixed.ctl, 0, 16).unwrap();
            assert_eq!(after[1], drafts[p], "{name}, {hidden}, position {p}");
        }
    }
}

/// One draft a round along the recorded greedy path: as many stand as were recorded at the positions that are drafted from.
fn acceptance_is_the_recorded_one(name: &str, on_host: bool) {
    for (hidden, said) in [("pre_norm", MtpHidden::PreNorm), ("post_norm", MtpHidden::PostNorm)] {
        let mut network = Network::golden(name);
        network.arch.mtp.as_mut().unwrap().hidden = Some(said);
        let plan = network.plan(1, 96, Kv::F32);
        let executor = network.executor(&plan, on_host);
        let mut session = Session::new(plan, executor);
        for (number, prompt) in [7, 40].into_iter().enumerate() {
            let (tokens, _, stands) = sequence(name, number, hidden);
            session.clear();
            let found = ask(&mut session, &tokens[..prompt], &greedy(32));
            assert_eq!(found.tokens[..], tokens[prompt..prompt + 32]);
            let (mut p, mut rounds, mut accepted) = (prompt - 1, 0, 0);
            // Rounds that have room for a draft: the last token is at prompt + 31.
            while p + 1 < prompt + 31 {
                rounds += 1;
                // The last round before the end judges no draft.
                let judged = p + 2 <= prompt + 31;
                accepted += u64::from(judged && stands[p]);
                p += if judged && stands[p] { 2 } else { 1 };
            }
            let speculated = session.speculated();
            assert_eq!(
                (speculated.rounds, speculated.accepted),
                (rounds, accepted),
                "{name}, {hidden}, {number}"
            );
            assert!(accepted * 3 > rounds, "{accepted} of {rounds}");
        }
    }
}

mod device {
    #[test]
    fn drafts_of_qwen3_mtp() {
        super::drafts_are_the_recorded_ones("qwen3_mtp", false);
        super::acceptance_is_the_recorded_one("qwen3_mtp", false);
    }

    #[test]
    fn drafts_of_qwen3_5_hub() {
        super::drafts_are_the_recorded_ones("qwen3_5_hub", false);
        super::acceptance_is_the_recorded_one("qwen3_5_hub", false);
    }
}

mod host {
    #[test]
    fn drafts_of_qwen3_mtp() {
        super::drafts_are_the_recorded_ones("qwen3_mtp", true);
        super::acceptance_is_the_recorded_one("qwen3_mtp", true);
    }

    #[test]
    fn drafts_of_qwen3_5_hub() {
        super::drafts_are_the_recorded_ones("qwen3_5_hub", true);
        super::acceptance_is_the_recorded_one("qwen3_5_hub", true);
    }
}
