//! Networks with recurrent layers: their states against what was recorded, whatever the chunks; going back to an earlier
//! position; how many dispatches a layer takes; both ways to store the inputs; a file of another writer.

use crate::golden::Recorded;
use crate::goldens::Golden;
use cmf_gpu::container::{Container, Tensors};
use cmf_gpu::convert::{Options, convert};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::gpu::GpuExecutor;
use cmf_gpu::host::HostExecutor;
use cmf_gpu::kernel::{Kv, Op};
use cmf_gpu::program::{Executor, ExpertOptions, Grid, Plan, PlanOptions};
use cmf_gpu::sampling::Sampling;
use cmf_gpu::session::{Cancel, Generation, Session};
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

/// What a layer's buffer of this name holds.
fn words(session: &mut Session, layer: usize, part: &str) -> Vec<u32> {
    let label = format!("layer.{layer:02}.gdn.{part}");
    let buffers = &session.plan().buffers;
    let id = buffers.iter().position(|buffer| buffer.label == label).unwrap();
    let count = buffers[id].bytes as usize / 4;
    session.executor().read(id, 0, count).unwrap()
}

/// The state of every recurrent layer after the last position that was run.
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
            assert!((f - w).abs() <= 1e-4, "{what}, element {i}: wanted {w}, found {f}");
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
        // Four value heads, two to a key head, each with the inputs of q, k and v: 32 channels a head.
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
fn states_on_the_device() {
    let golden = model();
    states_are_the_recorded_ones(&mut golden.device(16));
}

#[test]
fn states_on_the_host() {
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

/// A prompt that takes four times as long when it is twice as long, or one dispatch that takes as long as the prompt is.
#[test]
fn a_prompt_costs_recurrent_layers_as_much_as_it_is_long() {
    let golden = model();
    let plan = golden.plan(16, 1 << 30);
    let recurrent = plan.programs[0]
        .steps
        .iter()
        .filter(|step| (0..LAYERS).any(|layer| step.label.starts_with(&format!("layer.{layer:02}."))));
    // No step of them has more to do at a later position.
    assert!(recurrent.clone().count() > LAYERS);
    recurrent.for_each(|step| assert!(!matches!(step.grid, Grid::Blocks(_)), "{}", step.label));
    let dispatches = |tokens: usize| {
        let device = crate::device();
        let options = PlanOptions {
            ctx: 520,
            chunk: 16,
            kv: Kv::F16,
            max_binding: device.max_binding(),
            all_logits: false,
            drafts: 0,
            experts: ExpertOptions::default(),
        };
        let plan = crate::plan_of(&golden.tensors, &options);
        let executor = GpuExecutor::new(device, plan.clone(), &*golden.tensors, &mut |_, _| Ok(())).unwrap();
        let mut session = Session::new(plan, Box::new(executor));
        let before = session.counters().dispatches;
        prefill(
            &mut session,
            &prompt(2).into_iter().cycle().take(tokens).collect::<Vec<_>>(),
        );
        session.counters().dispatches - before
    };
    let [half, whole] = [256, 512].map(dispatches);
    assert!(half >= 16 * plan.programs[0].steps.len() as u64 / 2, "{half}");
    // The head, which only the last chunk has.
    assert!(
        whole <= 2 * half && whole + 16 >= 2 * half,
        "{half} and {whole} dispatches"
    );
}

fn with_drafts(golden: &Golden, drafts: u32, host: bool) -> Session {
    let device = crate::device();
    let options = PlanOptions {
        ctx: 96,
        chunk: 16,
        kv: Kv::F32,
        max_binding: device.max_binding(),
        all_logits: false,
        drafts,
        experts: ExpertOptions::default(),
    };
    let plan: Arc<Plan> = crate::plan_of(&golden.tensors, &options);
    let executor: Box<dyn Executor> = match host {
        true => Box::new(HostExecutor::new(plan.clone(), golden.tensors.clone()).unwrap()),
        false => Box::new(GpuExecutor::new(device, plan.clone(), &*golden.tensors, &mut |_, _| Ok(())).unwrap()),
    };
    Session::new(plan, executor)
}

/// After other text a session gives what a fresh one gives, and says how much it ran again.
fn goes_back(host: bool) {
    let golden = model();
    let (first, second) = (prompt(2), prompt(1));
    for drafts in [0, 3] {
        let branch = |shared: usize| [&first[..shared], &second[..]].concat();
        let fresh = |tokens: &[u32]| {
            let mut session = with_drafts(&golden, drafts, host);
            prefill(&mut session, tokens);
            (states(&mut session), generate(&mut session, 6))
        };
        let mut session = with_drafts(&golden, drafts, host);
        // `far`: 0 asks for the same bits.
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
        // An answer of six tokens, of which five were run; a conversation that goes on from there runs what is new.
        assert_eq!(session.cached().len(), 45);
        let longer = [session.cached(), &second].concat();
        // The answer's tokens were summed in the order of decoding.
        again(&mut session, &longer, 7, 1e-4);
        // Another text from the middle on: all of it, since the states are past that.
        again(&mut session, &branch(20), 27, 0.0);
        // Back by two positions, by three, by four: as far as states are kept.
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
    goes_back(false);
}

#[test]
fn going_back_never_uses_a_later_state_on_the_host() {
    goes_back(true);
}

#[test]
fn a_layer_takes_at_most_six_dispatches() {
    for (quant, wanted) in [(Dtype::F16, 5), (Dtype::Q82f, 6), (Dtype::Q4tp, 6)] {
        let golden = Golden::of("qwen3_5", crate::golden("qwen3_5", quant));
        let plan = golden.plan(16, 1 << 30);
        let layer = |n: usize| {
            let steps = plan.programs[0].steps.iter();
            steps
                .filter(|step| step.label.starts_with(&format!("layer.{n:02}.")))
                .count()
        };
        assert_eq!([0, 1, 2, 3].map(layer), [wanted, wanted, wanted, 7], "{}", quant.name());
        let caches = plan.buffers.iter().filter(|buffer| buffer.label.ends_with("_cache"));
        assert_eq!(caches.count(), 2, "only attention has caches");
        let is_delta = |op: &Op| matches!(op, Op::DeltaNet(_));
        assert_eq!(
            plan.programs[1].steps.iter().filter(|step| is_delta(&step.op)).count(),
            LAYERS
        );
    }
}

/// The same weights as a `qwen3_next` model stores them: for each key head its q, k, v, z rows, and its b, a rows.
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
        // Two key heads of 32, each with two value heads of 32; rows of 64 columns of 2 bytes.
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
    let container = Container::open(&out).unwrap();
    assert!(
        container
            .find("model.layers.0.linear_attn.in_proj_qkvz.weight")
            .is_some()
    );
    Golden::of("qwen3_5", (Arc::new(container), dir))
}

#[test]
fn inputs_stored_by_key_head_compute_the_same() {
    let golden = fused();
    golden.check(&mut golden.device(16));
    golden.check(&mut golden.host(64));
    states_are_the_recorded_ones(&mut golden.device(16));
}

#[test]
fn a_file_of_another_writer_gives_its_recorded_tokens() {
    let interop = crate::golden::fixture("../interop");
    let manifest: Value = serde_json::from_slice(&std::fs::read(interop.join("manifest.json")).unwrap()).unwrap();
    let mut entries = manifest["files"].as_array().unwrap().iter();
    let entry = entries.find(|entry| entry["name"] == "qwen3_5-q4tp").unwrap();
    let container = Container::open(&interop.join(entry["file"].as_str().unwrap())).unwrap();
    let golden = Golden::of("qwen3_5", (Arc::new(container), tempfile::tempdir().unwrap()));
    let mut runs = 0;
    for run in entry["runs"].as_array().unwrap() {
        let ids = |key: &str| -> Vec<u32> {
            let ids = run[key].as_array().unwrap();
            ids.iter().map(|id| id.as_u64().unwrap() as u32).collect()
        };
        for host in [false, true] {
            let mut session = with_drafts(&golden, 0, host);
            prefill(&mut session, &ids("prompt"));
            assert_eq!(generate(&mut session, 32), ids("tokens"));
        }
        runs += 1;
    }
    assert_eq!(runs, 3);
}
