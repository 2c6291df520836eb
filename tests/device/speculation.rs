//! Drafts change how fast an answer comes and nothing else: tokens, ends and caches, greedy and sampled, with heads that are
//! right, wrong and in between. And the draft head computes what was recorded.

use crate::golden::{Recorded, drafted};
use cmf_gpu::container::{Arch, Container, MemoryTensors, MtpHidden, Tensors};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::gpu::GpuExecutor;
use cmf_gpu::host::HostExecutor;
use cmf_gpu::kernel::Kv;
use cmf_gpu::model::bind;
use cmf_gpu::program::{Ctl, Executor, ExpertOptions, Extent, Plan, PlanOptions, Which, plan};
use cmf_gpu::sampling::Sampling;
use cmf_gpu::session::{Cancel, DraftMode, Finish, Generation, Session};
use std::ops::ControlFlow;
use std::sync::Arc;

/// How far a draft's logit may be from what was recorded.
const TOLERANCE: f32 = 1e-3;

struct Network {
    arch: Arch,
    tensors: Arc<dyn Tensors>,
    _dir: Option<tempfile::TempDir>,
}

impl Network {
    fn golden(name: &str) -> Network {
        let (container, dir): (Arc<Container>, _) = crate::golden(name, Dtype::F16);
        Network {
            arch: container.header().arch.clone(),
            tensors: container,
            _dir: Some(dir),
        }
    }

    fn plan(&self, drafts: u32, ctx: u32, kv: Kv) -> Arc<Plan> {
        let model = bind(&self.arch, &*self.tensors).unwrap();
        let options = PlanOptions {
            ctx,
            chunk: 16,
            kv,
            max_binding: crate::device().max_binding(),
            all_logits: false,
            drafts,
            experts: ExpertOptions::default(),
        };
        Arc::new(plan(&model, &*self.tensors, &options).unwrap())
    }

    fn executor(&self, plan: &Arc<Plan>, on_host: bool) -> Box<dyn Executor> {
        match on_host {
            true => Box::new(HostExecutor::new(plan.clone(), self.tensors.clone()).unwrap()),
            false => {
                let executor = GpuExecutor::new(crate::device(), plan.clone(), &*self.tensors, &mut |_, _| Ok(()));
                Box::new(executor.unwrap())
            }
        }
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

/// A long greedy answer with any number of drafts; the share of drafts that stood.
fn long_answers_are_the_same(name: &str, drafts: &[u32], asked: &Ask) -> f64 {
    let network = Network::golden(name);
    let plain = ask(&mut network.session(0, 640), &PROMPT, asked);
    assert_eq!((plain.tokens.len(), plain.finish), (520, Finish::Length));
    let (mut all, mut stood) = (0, 0);
    for &k in drafts {
        let mut session = network.session(k, 640);
        let found = ask(&mut session, &PROMPT, asked);
        assert!(found == plain, "{name} with {k} drafts");
        let speculated = session.speculated();
        assert_eq!(speculated.rounds + speculated.accepted, 519, "{name} with {k} drafts");
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
    // A bonus for what was said before makes an answer repeat itself, and then almost every draft stands.
    let sampling = Sampling {
        frequency_penalty: -1.0,
        ..Sampling::greedy()
    };
    let share = long_answers_are_the_same("llama_tied", &[1, 3, 7], &sampled(sampling, 520));
    assert!(share > 0.9, "{share}");
}

#[test]
fn a_mixture_of_experts_is_not_drafted_for() {
    let network = Network::golden("qwen3_moe");
    let model = bind(&network.arch, &*network.tensors).unwrap();
    let options = |drafts| PlanOptions {
        ctx: 64,
        chunk: 16,
        kv: Kv::F16,
        max_binding: 1 << 30,
        all_logits: false,
        drafts,
        experts: ExpertOptions::default(),
    };
    assert!(plan(&model, &*network.tensors, &options(0)).is_ok());
    let err = plan(&model, &*network.tensors, &options(1)).unwrap_err();
    assert_eq!(err.kind, cmf_gpu::Kind::UnsupportedModel);
}

#[test]
fn sampled_answers_are_the_same() {
    for name in ["qwen3_mtp", "llama_tied", "qwen3_5_hub"] {
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
