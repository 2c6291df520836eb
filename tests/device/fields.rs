//! Header fields and optional tensors that no golden model has: small networks, compared on the device and on the host with a
//! forward pass in float64 that was written from the text of the format.
//!
//! Each network has variants, without a field or with another value. Their logits are far from those of the network, so an
//! engine that ignores the field cannot agree with both.

use crate::Place;
use crate::golden::fields::Fixture;
use cmf_gpu::Kind;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::lm::LowerOptions;
use cmf_gpu::lm::run::{Cancel, Generation, Session};
use cmf_gpu::model::bind;
use cmf_gpu::sampling::Sampling;
use serde_json::{Value, json};
use std::ops::ControlFlow;
use std::sync::Arc;

const TOLERANCE: f32 = 1e-3;
/// How far variants are from their network at least.
const APART: f32 = 0.05;

struct Network {
    tensors: Arc<CmfContainer>,
    _dir: tempfile::TempDir,
}

impl Network {
    fn of(fixture: &Fixture, patch: &Value) -> Network {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("network.cmf");
        fixture.write(patch, &path);
        Network {
            tensors: Arc::new(CmfContainer::open(&path).unwrap()),
            _dir: dir,
        }
    }

    fn options(&self, place: Place) -> LowerOptions {
        LowerOptions {
            // Chunks that the tokens do not fill evenly.
            chunk: if place == Place::Device { 8 } else { 16 },
            all_logits: true,
            ..crate::options(32)
        }
    }

    fn on_device(&self, options: &LowerOptions) -> Session {
        crate::session(
            Place::Device,
            &crate::plan_of(&self.tensors, options),
            self.tensors.clone(),
        )
    }

    fn session(&self, place: Place) -> Session {
        let plan = crate::plan_of(&self.tensors, &self.options(place));
        crate::session(place, &plan, self.tensors.clone())
    }
}

/// The logits of every token: the first `prefill` tokens in chunks, the rest one by one.
fn logits(session: &mut Session, tokens: &[u32], prefill: usize) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    let mut sink = |_: usize, logits: &[f32], _: &[Vec<f32>]| {
        all.push(logits.to_vec());
        Ok(())
    };
    session.logits(tokens, prefill, false, &mut sink).unwrap();
    all
}

/// The largest difference of two rows; infinite for NaN.
fn apart(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |most, d| if d.is_nan() { f32::INFINITY } else { most.max(d) })
}

fn check(name: &str, place: Place) {
    let fixture = Fixture::open(name);
    let tokens = fixture.tokens();
    let (wanted, of_variants) = fixture.logits.split_at(tokens.len());
    let last = tokens.len() - 1;
    let network = Network::of(&fixture, &json!({}));
    let model = bind(&network.tensors.header().arch, &*network.tensors).unwrap();
    assert!(model.unused.is_empty(), "{name}: every tensor is used");
    let mut session = network.session(place);
    for prefill in [tokens.len(), tokens.len() / 2, 0] {
        let found = logits(&mut session, &tokens, prefill);
        assert_eq!(found.len(), tokens.len());
        for (row, (found, wanted)) in found.iter().zip(wanted).enumerate() {
            let apart = apart(found, wanted);
            assert!(
                apart <= TOLERANCE,
                "{name}, {prefill} in chunks, token {row}: they differ by {apart}"
            );
        }
    }
    for (variant, wanted_last) in fixture.variants().iter().zip(of_variants) {
        let about = &variant["about"];
        let far = apart(wanted_last, &wanted[last]);
        assert!(far >= APART, "{name}, {about}: only {far} from the network itself");
        let mut session = Network::of(&fixture, variant).session(place);
        for prefill in [tokens.len(), tokens.len() / 2] {
            let found = logits(&mut session, &tokens, prefill);
            let apart = apart(&found[last], wanted_last);
            assert!(
                apart <= TOLERANCE,
                "{name}, variant of {about}, {prefill} in chunks: they differ by {apart}"
            );
        }
    }
}

macro_rules! networks {
    ($($name:ident)*) => {
        mod device {
            $(#[test] fn $name() { super::check(stringify!($name), crate::Place::Device); })*
        }
        mod host {
            $(#[test] fn $name() { super::check(stringify!($name), crate::Place::Host); })*
        }
    };
}
networks!(attention mixture passes);

#[test]
fn paged_experts_compute_the_same() {
    // The second network normalises the sum of its experts, and applies its layers twice.
    for (name, slots, paged) in [("mixture", 3, 3), ("passes", 2, 2)] {
        let fixture = Fixture::open(name);
        let tokens = fixture.tokens();
        let wanted = &fixture.logits[tokens.len() - 1];
        let network = Network::of(&fixture, &json!({}));
        let mut options = network.options(Place::Device);
        options.experts.slots = Some(slots);
        let mut session = network.on_device(&options);
        assert_eq!(session.plan().graph.paged.len(), paged, "{name}");
        for prefill in [tokens.len(), tokens.len() / 2] {
            let found = logits(&mut session, &tokens, prefill);
            let apart = apart(&found[tokens.len() - 1], wanted);
            assert!(
                apart <= TOLERANCE,
                "{name}, {prefill} in chunks: they differ by {apart}"
            );
        }
    }
}

/// Drafts are verified side by side; the answer is that of single tokens.
#[test]
fn answers_with_drafts_are_the_same() {
    for name in ["attention", "passes"] {
        let fixture = Fixture::open(name);
        let network = Network::of(&fixture, &json!({}));
        let prompt = fixture.tokens().repeat(2);
        let answer = |drafts| {
            let options = LowerOptions {
                ctx: 96,
                all_logits: false,
                drafts,
                ..network.options(Place::Device)
            };
            let mut session = network.on_device(&options);
            assert!(session.prefill(&prompt, &Cancel::new()).unwrap().1.is_continue());
            let generation = Generation {
                // The answer repeats itself, so that drafts are accepted.
                sampling: Sampling {
                    frequency_penalty: -1.0,
                    ..Sampling::greedy()
                },
                stops: Vec::new(),
                max_tokens: 40,
            };
            let mut tokens = Vec::new();
            let mut emit = |token| {
                tokens.push(token);
                ControlFlow::Continue(())
            };
            session.generate(&generation, &Cancel::new(), &mut emit).unwrap();
            (tokens, session.speculated().accepted)
        };
        let (plain, _) = answer(0);
        assert_eq!(plain.len(), 40);
        for drafts in [1, 3] {
            let (found, accepted) = answer(drafts);
            assert_eq!(found, plain, "{name} with {drafts} drafts");
            assert!(
                accepted > 10,
                "{name} with {drafts} drafts: only {accepted} were accepted"
            );
        }
    }
}

/// Header fields that contradict the tensors, or that no kernel supports, are errors of the right kind and text.
#[test]
fn impossible_headers_are_refused_by_name() {
    let cases = [
        (
            "attention",
            json!({"arch": {"attention_heads_per_layer": [4, 2, 3, 2]}}),
            Kind::Parse,
            "tensor 'model.layers.2.self_attn.q_proj.weight' has shape [192, 48], the header wants [48, 48]",
        ),
        (
            "attention",
            json!({"arch": {"kv_heads_per_layer": [2, 1, 1, 2]}}),
            Kind::Parse,
            "tensor 'model.layers.2.self_attn.k_proj.weight' has shape [48, 48], the header wants [16, 48]",
        ),
        (
            "attention",
            json!({"arch": {"partial_rotary_factor": 0}}),
            Kind::UnsupportedModel,
            "of which 0 elements are rotated",
        ),
        (
            "attention",
            json!({"arch": {"local_partial_rotary_factor": 0.25}}),
            Kind::UnsupportedModel,
            "of which 4 elements are rotated",
        ),
        (
            "attention",
            json!({"arch": {"sliding_window": null}}),
            Kind::Parse,
            "layer 1 has a sliding window, but arch.sliding_window is absent",
        ),
        (
            "mixture",
            json!({"arch": {"moe": {"num_experts": 7}}}),
            Kind::Parse,
            "'model.layers.5.mlp.gate.weight' has 8 rows, expected 1 to arch.moe.num_experts, which is 7",
        ),
        (
            "mixture",
            json!({"arch": {"moe": null}}),
            Kind::Parse,
            "is a router, but the header has no arch.moe",
        ),
        (
            "mixture",
            json!({"tensors": {"model.layers.1.mlp.gate.weight": [[4, 32], 0, -10]}}),
            Kind::Parse,
            "belongs to an expert without a row in 'model.layers.1.mlp.gate.weight', which has 4 rows",
        ),
        (
            "mixture",
            json!({"tensors": {"model.layers.3.mlp.experts.6.up_proj.weight": null}}),
            Kind::MissingTensor,
            "model.layers.3.mlp.experts.6.up_proj.weight",
        ),
        (
            "mixture",
            json!({"tensors": {"model.layers.5.mlp.shared_expert.gate_proj.weight": null}}),
            Kind::MissingTensor,
            "model.layers.5.mlp.shared_expert.gate_proj.weight",
        ),
        (
            "mixture",
            json!({"tensors": {"model.layers.4.mlp.shared_expert_gate.weight": [[1, 32], 0, -10]}}),
            Kind::MissingTensor,
            "model.layers.4.mlp.shared_expert.gate_proj.weight",
        ),
        (
            "passes",
            json!({"tensors": {"model.layers.0.pre_feedforward_layernorm.weight": null}}),
            Kind::MissingTensor,
            "model.layers.0.pre_feedforward_layernorm.weight",
        ),
        (
            "passes",
            json!({"tensors": {"model.layers.2.self_attn.k_norm.weight": null}}),
            Kind::UnsupportedModel,
            "layer 2 normalises only one of queries and keys",
        ),
        (
            "mixture",
            json!({"tensors": {"model.layers.3.mlp.expert_bias": [[8], 0, -10]}}),
            Kind::Parse,
            "tensor 'model.layers.3.mlp.expert_bias' has shape [8], the header wants [7]",
        ),
        (
            "mixture",
            json!({"tensors": {"model.layers.3.mlp.shared_expert_gate.weight": [[2, 32], 0, -10]}}),
            Kind::Parse,
            "shared_expert_gate.weight' has shape [2, 32], the header wants [1, 32]",
        ),
    ];
    for (name, patch, kind, says) in cases {
        let network = Network::of(&Fixture::open(name), &patch);
        let err = bind(&network.tensors.header().arch, &*network.tensors).unwrap_err();
        assert_eq!(err.kind, kind, "{patch}: {err}");
        assert!(err.to_string().contains(says), "{patch}: {err}");
    }
}
