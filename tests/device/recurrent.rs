//! Networks with recurrent layers: their states compared with recorded ones, for any chunks; going back to an earlier position;
//! the number of dispatches; both ways to store the inputs; a file of another writer.

use crate::golden::Recorded;
use crate::goldens::Golden;
use crate::{PLACES, Place};
use cmf_gpu::convert::{Options, convert};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::lm::run::{Cancel, Generation, Session};
use cmf_gpu::lm::{LowerOptions, ProgramKind};
use cmf_gpu::op::{Grid, Kv, Op};
use cmf_gpu::sampling::Sampling;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::ops::ControlFlow;
use std::sync::Arc;

/// The recurrent layers of that model.
const LAYERS: usize = 3;

fn prompt(p: usize) -> Vec<u32> {
    let json = crate::golden::described("qwen3_5");
    let ids = json["prompts"][p]["prompt"].as_array().unwrap();
    ids.iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn prefill(session: &mut Session, tokens: &[u32]) -> usize {
    let (run, flow) = session.prefill(tokens, &Cancel::new()).unwrap();
    assert!(flow.is_continue());
    run
}

fn generate(session: &mut Session, count: usize) -> Vec<u32> {
    let generation = Generation {
        sampling: Sampling::greedy(),
        stops: Vec::new(),
        max_tokens: count,
    };
    let mut found = Vec::new();
    let mut emit = |token| {
        found.push(token);
        ControlFlow::Continue(())
    };
    session.generate(&generation, &Cancel::new(), &mut emit).unwrap();
    found
}

/// The contents of a layer's buffer.
fn words(session: &mut Session, layer: usize, part: &str) -> Vec<u32> {
    let label = format!("layer.{layer:02}.gdn.{part}");
    let id = crate::buffer(session.plan(), &label);
    let count = session.plan().graph.buffers[id].bytes as usize / 4;
    session.read_buffer(id, 0, count).unwrap()
}

/// The state of every recurrent layer after the last position.
fn states(session: &mut Session) -> Vec<Vec<u32>> {
    let slots = session.plan().kept_states.unwrap() as usize;
    let last = session.cached().len() - 1;
    let size = 4 * 32 * 32;
    let of = |layer| words(session, layer, "state")[last % slots * size..][..size].to_vec();
    (0..LAYERS).map(of).collect()
}

fn states_are_the_recorded_ones(session: &mut Session) {
    let recorded = Recorded::of("qwen3_5");
    let tokens = prompt(2);
    session.clear();
    prefill(session, &tokens);
    let close = |what: &str, found: &[f32], wanted: &[f32]| {
        assert_eq!(found.len(), wanted.len());
        for (i, (f, w)) in found.iter().zip(wanted).enumerate() {
            assert!((f - w).abs() <= 1e-4, "{what}, element {i}: expected {w}, found {f}");
        }
    };
    for (layer, found) in states(session).iter().enumerate() {
        let flat = |name: &str| -> Vec<f32> {
            let rows = recorded.rows(&format!("gdn.p2.layer{layer}.{name}"));
            rows.into_iter().flat_map(|row| row.values).collect()
        };
        close(
            &format!("state of layer {layer}"),
            bytemuck::cast_slice(found),
            &flat("recurrent_state"),
        );
        // Four value heads, two per key head, each with the inputs of q, k and v: 32 channels per head.
        let ring = words(session, layer, "ring");
        let ring: &[f32] = bytemuck::cast_slice(&ring);
        let (inputs, positions) = (96, 5);
        let wanted = flat("conv_state");
        for head in 0..4 {
            let channels = [(0, head / 2 * 32), (32, 64 + head / 2 * 32), (64, 128 + head * 32)];
            for (within, channel) in channels {
                for e in 0..32 {
                    let at = |pos: usize| ring[(head * positions + pos % positions) * inputs + within + e];
                    let found: Vec<f32> = (tokens.len() - 4..tokens.len()).map(at).collect();
                    close("inputs", &found, &wanted[(channel + e) * 4..][..4]);
                }
            }
        }
    }
}

fn model() -> Golden {
    Golden::of("qwen3_5", crate::golden("qwen3_5", Dtype::F16))
}

#[test]
fn states_on_the_device_equal_the_recorded_ones() {
    let golden = model();
    states_are_the_recorded_ones(&mut golden.device(16));
}

#[test]
fn states_on_the_host_equal_the_recorded_ones() {
    let golden = model();
    states_are_the_recorded_ones(&mut golden.host(64));
}

#[test]
fn chunks_of_every_size_leave_the_same_bits() {
    let golden = model();
    let tokens = prompt(2);
    let run = |chunk| {
        let mut session = golden.device(chunk);
        prefill(&mut session, &tokens);
        states(&mut session)
    };
    let whole = run(40);
    assert!(whole.iter().flatten().any(|&word| word != 0));
    for chunk in [8, 16, 24] {
        assert!(run(chunk) == whole, "chunks of {chunk}");
    }
}

/// Guards against a cost that grows faster than the prompt, and against dispatches that take longer for longer prompts.
#[test]
fn the_cost_of_recurrent_layers_is_linear_in_the_length_of_the_prompt() {
    let golden = model();
    let plan = golden.plan(16, 1 << 30);
    let steps = &plan.program(ProgramKind::Decode).steps;
    let recurrent = steps
        .iter()
        .filter(|step| (0..LAYERS).any(|layer| step.label.starts_with(&format!("layer.{layer:02}."))));
    // None of their steps has more work at a later position.
    assert!(recurrent.clone().count() > LAYERS);
    recurrent.for_each(|step| assert!(!matches!(step.op.grid(), Grid::Blocks(_)), "{}", step.label));
    let dispatches = |tokens: usize| {
        let options = LowerOptions {
            kv: Kv::F16,
            ..crate::options(520)
        };
        let plan = crate::plan_of(&golden.tensors, &options);
        let mut session = crate::session(Place::Device, &plan, golden.tensors.clone());
        let before = session.counters().dispatches;
        prefill(
            &mut session,
            &prompt(2).into_iter().cycle().take(tokens).collect::<Vec<_>>(),
        );
        session.counters().dispatches - before
    };
    let [half, whole] = [256, 512].map(dispatches);
    assert!(half >= 16 * steps.len() as u64 / 2, "{half}");
    // Only the last chunk has the head.
    assert!(
        whole <= 2 * half && whole + 16 >= 2 * half,
        "{half} and {whole} dispatches"
    );
}

fn with_drafts(golden: &Golden, drafts: u32, place: Place) -> Session {
    let options = LowerOptions {
        drafts,
        ..crate::options(96)
    };
    let plan = crate::plan_of(&golden.tensors, &options);
    crate::session(place, &plan, golden.tensors.clone())
}

/// After other text a session computes what a fresh one computes, and reports how many tokens it ran again.
fn goes_back(place: Place) {
    let golden = model();
    let (first, second) = (prompt(2), prompt(1));
    for drafts in [0, 3] {
        let branch = |shared: usize| [&first[..shared], &second[..]].concat();
        let fresh = |tokens: &[u32]| {
            let mut session = with_drafts(&golden, drafts, place);
            prefill(&mut session, tokens);
            (states(&mut session), generate(&mut session, 6))
        };
        let mut session = with_drafts(&golden, drafts, place);
        // With `far` = 0 the bits are the same.
        let again = |session: &mut Session, tokens: &[u32], ran: usize, far: f32| {
            assert_eq!(
                prefill(session, tokens),
                ran,
                "{drafts} drafts, {} tokens",
                tokens.len()
            );
            let found = states(session);
            let answer = generate(session, 6);
            let (states, tokens) = fresh(tokens);
            for (found, wanted) in found.iter().flatten().zip(states.iter().flatten()) {
                let apart = (f32::from_bits(*found) - f32::from_bits(*wanted)).abs();
                assert!(found == wanted || apart <= far, "{drafts} drafts: {apart}");
            }
            assert_eq!(answer, tokens);
        };
        again(&mut session, &first, 40, 0.0);
        // Five tokens of an answer of six were run. A longer conversation runs only its new tokens.
        assert_eq!(session.cached().len(), 45);
        let longer = [session.cached(), &second].concat();
        // Decoding summed the answer's tokens in another order.
        again(&mut session, &longer, 7, 1e-4);
        // Another text from the middle on: all of it runs, because the states are past that position.
        again(&mut session, &branch(20), 27, 0.0);
        // Back by two, three and four positions: as far as states are kept.
        for back in [2, 3, 4] {
            session.clear();
            prefill(&mut session, &first);
            let shared = first.len() - back;
            let ran = if back <= drafts as usize { 7 } else { shared + 7 };
            again(&mut session, &branch(shared), ran, 0.0);
        }
    }
}

#[test]
fn going_back_never_uses_a_later_state_on_the_device() {
    goes_back(Place::Device);
}

#[test]
fn going_back_never_uses_a_later_state_on_the_host() {
    goes_back(Place::Host);
}

#[test]
fn a_layer_takes_at_most_six_dispatches() {
    for (quant, wanted) in [(Dtype::F16, 5), (Dtype::Q82f, 6), (Dtype::Q4tp, 6)] {
        let golden = Golden::of("qwen3_5", crate::golden("qwen3_5", quant));
        let plan = golden.plan(16, 1 << 30);
        let layer = |n: usize| {
            let steps = plan.program(ProgramKind::Decode).steps.iter();
            steps
                .filter(|step| step.label.starts_with(&format!("layer.{n:02}.")))
                .count()
        };
        assert_eq!([0, 1, 2, 3].map(layer), [wanted, wanted, wanted, 7], "{}", quant.name());
        let caches = plan
            .graph
            .buffers
            .iter()
            .filter(|buffer| buffer.label.ends_with("_cache"));
        assert_eq!(caches.count(), 2, "only attention has caches");
        let is_delta = |op: &Op| matches!(op, Op::DeltaNet(_));
        let prefill = plan.program(ProgramKind::Prefill).steps.iter();
        assert_eq!(prefill.filter(|step| is_delta(&step.op)).count(), LAYERS);
    }
}

/// The same weights in the order of a `qwen3_next` model: for each key head its q, k, v, z rows, and its b, a rows.
fn fused() -> Golden {
    let source = crate::golden::dir("qwen3_5");
    let dir = tempfile::tempdir().unwrap();
    let file = std::fs::read(source.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let mut all: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, view) in tensors.iter() {
        if !name.contains("linear_attn.in_proj_") {
            all.push((name.to_owned(), view.shape().to_vec(), view.data().to_vec()));
        }
    }
    for layer in 0..LAYERS {
        let part = |part: &str| {
            tensors
                .tensor(&format!("model.layers.{layer}.linear_attn.in_proj_{part}.weight"))
                .unwrap()
        };
        // Two key heads of 32 elements, each with two value heads of 32; rows of 64 columns of 2 bytes.
        let rows =
            |view: &TensorView, first: usize, count: usize| view.data()[first * 128..(first + count) * 128].to_vec();
        let (qkv, z, b, a) = (part("qkv"), part("z"), part("b"), part("a"));
        let (mut qkvz, mut ba) = (Vec::new(), Vec::new());
        for head in 0..2 {
            qkvz.extend(rows(&qkv, head * 32, 32));
            qkvz.extend(rows(&qkv, 64 + head * 32, 32));
            qkvz.extend(rows(&qkv, 128 + head * 64, 64));
            qkvz.extend(rows(&z, head * 64, 64));
            ba.extend(rows(&b, head * 2, 2));
            ba.extend(rows(&a, head * 2, 2));
        }
        let name = |part: &str| format!("model.layers.{layer}.linear_attn.in_proj_{part}.weight");
        all.push((name("qkvz"), vec![384, 64], qkvz));
        all.push((name("ba"), vec![8, 64], ba));
    }
    let views = all.iter().map(|(name, shape, data)| {
        (
            name,
            TensorView::new(safetensors::Dtype::BF16, shape.clone(), data).unwrap(),
        )
    });
    let file = safetensors::serialize(views, None).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
    std::fs::copy(source.join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    config["model_type"] = "qwen3_next".into();
    config["rope_theta"] = config["rope_parameters"]["rope_theta"].take();
    config["num_experts"] = 8.into();
    config["num_experts_per_tok"] = 3.into();
    config["moe_intermediate_size"] = 32.into();
    config["mlp_only_layers"] = json!([0, 1, 2, 3]);
    let object = config.as_object_mut().unwrap();
    object.remove("rope_parameters");
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let out = dir.path().join("model.cmf");
    let options = Options::new(Dtype::F16);
    convert(dir.path(), &out, &options, &mut |_| ControlFlow::Continue(())).unwrap();
    let container = CmfContainer::open(&out).unwrap();
    assert!(
        container
            .find("model.layers.0.linear_attn.in_proj_qkvz.weight")
            .is_some()
    );
    Golden::of("qwen3_5", (Arc::new(container), dir))
}

#[test]
fn inputs_that_are_stored_by_key_head_compute_the_same() {
    let golden = fused();
    golden.check(&mut golden.device(16));
    golden.check(&mut golden.host(64));
    states_are_the_recorded_ones(&mut golden.device(16));
}

#[test]
fn a_recurrent_model_of_another_program_gives_its_recorded_tokens() {
    let interop = crate::golden::fixture("../interop");
    let manifest: Value = serde_json::from_slice(&std::fs::read(interop.join("manifest.json")).unwrap()).unwrap();
    let mut entries = manifest["files"].as_array().unwrap().iter();
    let entry = entries.find(|entry| entry["name"] == "qwen3_5-q4tp").unwrap();
    let container = CmfContainer::open(&interop.join(entry["file"].as_str().unwrap())).unwrap();
    let golden = Golden::of("qwen3_5", (Arc::new(container), tempfile::tempdir().unwrap()));
    let mut runs = 0;
    for run in entry["runs"].as_array().unwrap() {
        let ids = |key: &str| -> Vec<u32> {
            let ids = run[key].as_array().unwrap();
            ids.iter().map(|id| id.as_u64().unwrap() as u32).collect()
        };
        for place in PLACES {
            let mut session = with_drafts(&golden, 0, place);
            prefill(&mut session, &ids("prompt"));
            assert_eq!(generate(&mut session, 32), ids("tokens"));
        }
        runs += 1;
    }
    assert_eq!(runs, 3);
}
