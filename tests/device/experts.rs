//! Mixtures of experts: routes compared with recorded ones, the dispatches and bytes of a layer, banks in segments and of
//! several types, layers with different numbers of experts.

use crate::golden::Recorded;
use crate::goldens::Golden;
use crate::{PLACES, Place};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::dtype::encode::encode;
use cmf_gpu::gpu::{Device, DeviceOptions};
use cmf_gpu::graph::{Executor, Graph};
use cmf_gpu::lm::run::Session;
use cmf_gpu::lm::{LowerOptions, Plan, ProgramKind};
use cmf_gpu::model::{FeedForward, Model, bind};
use cmf_gpu::op::{Bind, Op};
use cmf_gpu::source::{MemoryTensors, Tensors};
use std::collections::BTreeMap;
use std::sync::Arc;

fn golden(name: &'static str) -> Golden {
    Golden::of(name, crate::golden(name, Dtype::F16))
}

fn options(max_binding: u64) -> LowerOptions {
    LowerOptions {
        max_binding,
        all_logits: true,
        ..crate::options(96)
    }
}

fn prompt(name: &str, p: usize) -> Vec<u32> {
    let json = crate::golden::described(name);
    let ids = json["prompts"][p]["prompt"].as_array().unwrap();
    ids.iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Chosen experts and weights of every token of prompt 2, by layer that is a mixture.
type Routes = BTreeMap<usize, Vec<(u32, f32)>>;

fn mixtures(model: &Model) -> Vec<(usize, usize)> {
    let layers = model.layers.iter().enumerate();
    let mixture = |(i, layer): (usize, &cmf_gpu::model::Layer)| match &layer.ffn {
        FeedForward::Moe(moe) => Some((i, moe.top_k)),
        FeedForward::Dense(_) => None,
    };
    layers.filter_map(mixture).collect()
}

/// Runs a prompt layer by layer, the first `prefill` tokens in chunks of 16. Returns the routes of each layer.
fn routes(model: &Model, plan: &Plan, executor: &mut dyn Executor, tokens: &[u32], prefill: usize) -> Routes {
    let pairs = |words: &[u32]| -> Vec<(u32, f32)> {
        let pairs = words.chunks_exact(2);
        pairs.map(|pair| (pair[0], f32::from_bits(pair[1]))).collect()
    };
    let mixtures = mixtures(model);
    let mut all = Routes::new();
    crate::write_greedy(executor, plan);
    let mut position = 0;
    let (first, rest) = tokens.split_at(prefill);
    let runs = first.chunks(16).map(|chunk| (ProgramKind::Prefill, chunk));
    for (kind, ids) in runs.chain(rest.chunks(1).map(|token| (ProgramKind::Decode, token))) {
        let shape = crate::begin(executor, plan, ids, position);
        position = shape.end;
        let program = plan.program(kind);
        let mut done = 0;
        for &(layer, top_k) in &mixtures {
            let (end, _) = program.taps[layer];
            executor.run(kind as usize, done..end, shape).unwrap();
            let found = match kind {
                ProgramKind::Decode => {
                    let at = program.steps[done..end].iter().find_map(|step| match &step.op {
                        Op::MoeGlu(p) if p.first_shared != 0 => Some(p.routes_at as usize),
                        _ => None,
                    });
                    let router = crate::buffer(plan, "decode.router");
                    pairs(&executor.read(router, at.unwrap(), 2 * top_k).unwrap())
                }
                _ => {
                    let words = ids.len() * (top_k + 1) * 2;
                    let words = executor.read(crate::buffer(plan, "prefill.routes"), 0, words).unwrap();
                    // The shared expert follows each token's experts.
                    let tokens = words.chunks_exact((top_k + 1) * 2);
                    tokens.flat_map(|token| pairs(&token[..2 * top_k])).collect()
                }
            };
            all.entry(layer).or_default().extend(found);
            done = end;
        }
        executor.run(kind as usize, done..program.steps.len(), shape).unwrap();
    }
    all
}

fn routes_are_the_recorded_ones(name: &'static str, place: Place) {
    let golden = golden(name);
    let model = bind(&golden.tensors.header().arch, &*golden.tensors).unwrap();
    let plan = crate::plan_of(&golden.tensors, &options(crate::device().max_binding()));
    let recorded = Recorded::of(name);
    let tokens = prompt(name, 2);
    for prefill in [40, 21] {
        let mut executor = crate::executor(place, &plan, golden.tensors.clone());
        let all = routes(&model, &plan, &mut *executor, &tokens, prefill);
        assert!(!all.is_empty());
        for (layer, found) in all {
            let wanted = recorded.integers(&format!("router.p2.layer{layer}.topk_index"));
            let ids: Vec<i32> = found.iter().map(|route| route.0 as i32).collect();
            assert_eq!(ids, wanted, "{name}, layer {layer}");
            let wanted = recorded.rows(&format!("router.p2.layer{layer}.topk_weight"));
            let wanted: Vec<f32> = wanted.into_iter().flat_map(|row| row.values).collect();
            assert_eq!(wanted.len(), found.len());
            for (i, ((_, found), wanted)) in found.iter().zip(wanted).enumerate() {
                let close = (found - wanted).abs() <= 2e-5;
                assert!(
                    close,
                    "{name}, layer {layer}, weight {i}: expected {wanted}, found {found}"
                );
            }
        }
    }
}

#[test]
fn routes_on_the_device_equal_the_recorded_ones() {
    for name in ["qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe"] {
        routes_are_the_recorded_ones(name, Place::Device);
    }
}

#[test]
fn routes_on_the_host_equal_the_recorded_ones() {
    for name in ["qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe"] {
        routes_are_the_recorded_ones(name, Place::Host);
    }
}

#[test]
fn a_mixture_takes_four_dispatches_and_reads_the_chosen_experts_only() {
    // Rows of weights: gate, up and down of each chosen expert and of the shared one, the router with its gate.
    let (hidden, qwen2, qwen3) = (64, 3 * 3 * 96 + 3 * 128 + 9, 2 * 3 * 64 + 8);
    for (name, layer, dispatches, rows) in [("qwen2_moe", 3, 4, qwen2), ("qwen3_moe", 1, 3, qwen3)] {
        let golden = golden(name);
        let plan = crate::plan_of(&golden.tensors, &options(1 << 30));
        let prefix = format!("layer.{layer:02}.ffn.");
        let mut layer: Graph = (*plan.graph).clone();
        let steps = &mut layer.programs[ProgramKind::Decode as usize].steps;
        steps.retain(|step| step.label.starts_with(&prefix));
        assert_eq!(steps.len(), dispatches, "{name}");
        let layer = Plan {
            graph: Arc::new(layer),
            ..plan.clone()
        };
        // Each product that adds to the stream also reads the next norm.
        let steps = layer.program(ProgramKind::Decode).steps.iter();
        let norms = steps.filter_map(|step| match step.bind("g") {
            Some(Bind::Vector(vector)) => Some(layer.graph.vectors[vector].padded_len() as u64 * 4),
            _ => None,
        });
        let weights = layer.weight_bytes_read(ProgramKind::Decode) - norms.sum::<u64>();
        let wanted = (rows * hidden * 2) as u64;
        assert!(
            weights.abs_diff(wanted) < 16,
            "{name}: {weights} bytes, expected {wanted}"
        );
        assert!(plan.weight_bytes_read(ProgramKind::Decode) < plan.graph.weight_bytes());
    }
}

fn logits(device: Arc<Device>, plan: Plan, golden: &Golden, tokens: &[u32], prefill: usize) -> Vec<u32> {
    let executor = crate::upload(device, &plan, golden.tensors.clone()).unwrap();
    let mut session = Session::new(plan, Box::new(executor));
    let mut all = Vec::new();
    let mut sink = |_: usize, logits: &[f32], _: &[Vec<f32>]| {
        all.extend(logits.iter().map(|v| v.to_bits()));
        Ok(())
    };
    session.logits(tokens, prefill, false, &mut sink).unwrap();
    all
}

#[test]
fn expert_groups_in_segments_give_the_same_bits() {
    for name in ["qwen2_moe", "qwen3_moe"] {
        let golden = golden(name);
        let tokens = prompt(name, 2);
        // Eight rows of all gates and ups take 16 KiB.
        let cut = crate::open(DeviceOptions {
            max_segment: Some(40 << 10),
            ..DeviceOptions::default()
        });
        let run = |device: Arc<Device>, segments: [usize; 2]| {
            let options = LowerOptions {
                chunk: 8,
                ..options(device.max_binding())
            };
            let plan = crate::plan_of(&golden.tensors, &options);
            for (part, segments) in ["gate_up", "down"].into_iter().zip(segments) {
                let label = format!("layer.03.ffn.experts.{part}");
                let bank = plan.graph.matrices.iter().find(|matrix| matrix.label == label).unwrap();
                assert_eq!(bank.segments.len(), segments, "{name} {label}");
            }
            logits(device, plan, &golden, &tokens, 27)
        };
        let segments = match name {
            "qwen2_moe" => [6, 3],
            _ => [4, 2],
        };
        assert!(run(crate::device(), [1, 1]) == run(cut, segments), "{name}");
    }
}

#[test]
fn results_do_not_depend_on_the_chunk() {
    let golden = golden("qwen2_moe");
    let tokens = prompt("qwen2_moe", 2);
    let run = |chunk: u32| {
        let device = crate::device();
        let options = LowerOptions {
            chunk,
            ..options(device.max_binding())
        };
        let plan = crate::plan_of(&golden.tensors, &options);
        logits(device, plan, &golden, &tokens, tokens.len())
    };
    let whole = run(40);
    assert!(whole == run(8) && whole == run(16));
}

/// The tensors of a golden model with some changes.
fn changed(
    golden: &Golden,
    change: impl Fn(&str, Dtype, &[u64], &[u8]) -> Option<(Dtype, Vec<u64>, Vec<u8>)>,
) -> Arc<MemoryTensors> {
    let infos = golden.tensors.infos().iter().enumerate();
    let all = infos.filter_map(|(id, info)| {
        let bytes = golden.tensors.bytes(id).unwrap();
        let (dtype, shape, payload) = change(&info.name, info.dtype, &info.shape, bytes)?;
        Some((info.name.clone(), dtype, shape, payload))
    });
    Arc::new(MemoryTensors::new(all).unwrap())
}

fn same(dtype: Dtype, shape: &[u64], bytes: &[u8]) -> Option<(Dtype, Vec<u64>, Vec<u8>)> {
    Some((dtype, shape.to_vec(), bytes.to_vec()))
}

/// The same values in another type.
fn recoded(to: Dtype, from: Dtype, shape: &[u64], bytes: &[u8]) -> Option<(Dtype, Vec<u64>, Vec<u8>)> {
    let (rows, cols) = (shape[0] as usize, shape[1] as usize);
    let decoder = from.decoder(bytes, rows, cols).unwrap();
    let read = |first: usize, out: &mut [f32]| {
        let rows = out.chunks_mut(cols).enumerate();
        rows.for_each(|(row, out)| decoder.row(first + row, out));
        Ok(())
    };
    Some((to, shape.to_vec(), encode(to, rows, cols, &read).unwrap()))
}

fn plan_of(golden: &Golden, tensors: &dyn Tensors, options: &LowerOptions) -> Plan {
    crate::plan(&golden.tensors.header().arch, tensors, options).unwrap()
}

/// Expert 1 is f32, expert 2 bf16, the gate of expert 3 f32, the shared expert f32. All of them are exact, so the network is the
/// same.
#[test]
fn experts_of_several_types_compute_the_same_as_one_type() {
    for name in ["qwen2_moe", "qwen3_moe"] {
        let golden = golden(name);
        let tensors = changed(&golden, |name, dtype, shape, bytes| {
            let is = |part: &str| name.contains(part);
            if is("experts.1.") || is("experts.3.gate_proj") || is("shared_expert") {
                recoded(Dtype::F32, dtype, shape, bytes)
            } else if is("experts.2.") {
                recoded(Dtype::Bf16, dtype, shape, bytes)
            } else {
                same(dtype, shape, bytes)
            }
        });
        let plan = plan_of(&golden, &*tensors, &options(crate::device().max_binding()));
        let banks = plan.graph.matrices.iter();
        let banks = banks.filter(|matrix| matrix.label.starts_with("layer.03.ffn.experts"));
        // Two matrices each for f16, f32 and bf16; three for a gate of f32 with up and down of f16.
        assert_eq!(banks.count(), 3 * 2 + 3);
        for place in PLACES {
            golden.check(&mut crate::session(place, &plan, tensors.clone()));
        }
    }
}

fn programs_agree(golden: &Golden, tensors: Arc<dyn Tensors>) {
    let options = LowerOptions {
        ctx: 60,
        ..options(crate::device().max_binding())
    };
    let outcome = crate::compare_steps(&plan_of(golden, &*tensors, &options), tensors);
    crate::all_pass(&outcome);
    let kinds: Vec<_> = outcome.worst.keys().map(String::as_str).collect();
    for kind in [
        "decode moe_glu",
        "decode moe_down",
        "prefill moe_lists",
        "prefill moe_combine",
    ] {
        assert!(kinds.contains(&kind), "{kind} was not compared");
    }
}

#[test]
fn layers_may_differ_in_the_number_of_experts() {
    let golden = golden("qwen3_moe");
    // Layer 1 keeps 5 experts, layer 2 one (fewer than a token takes), layer 3 seven; layer 3 ranks with biases.
    let kept = |name: &str| match name.split('.').nth(2).unwrap_or_default() {
        "1" => 5,
        "2" => 1,
        "3" => 7,
        _ => 8,
    };
    let tensors = changed(&golden, |name, dtype, shape, bytes| {
        if let Some((_, rest)) = name.split_once("mlp.experts.")
            && rest.split('.').next().unwrap().parse::<usize>().unwrap() >= kept(name)
        {
            return None;
        }
        if name.ends_with("mlp.gate.weight") {
            let rows = kept(name);
            return Some((
                dtype,
                vec![rows as u64, shape[1]],
                bytes[..rows * shape[1] as usize * 2].to_vec(),
            ));
        }
        same(dtype, shape, bytes)
    });
    let mut all: Vec<_> = tensors
        .infos()
        .iter()
        .enumerate()
        .map(|(id, info)| {
            (
                info.name.clone(),
                info.dtype,
                info.shape.clone(),
                tensors.stored(id).unwrap().bytes.to_vec(),
            )
        })
        .collect();
    let biases = [0.25f32, 0.0, -0.125, 0.5, 0.0, 0.0625, -1.0];
    let biases = biases
        .iter()
        .flat_map(|bias| half::f16::from_f32(*bias).to_le_bytes())
        .collect();
    all.push(("model.layers.3.mlp.expert_bias".into(), Dtype::F16, vec![7], biases));
    let tensors = Arc::new(MemoryTensors::new(all).unwrap());
    let model = bind(&golden.tensors.header().arch, &*tensors).unwrap();
    let counts: Vec<_> = model
        .layers
        .iter()
        .map(|layer| match &layer.ffn {
            FeedForward::Moe(moe) => (moe.experts.len(), moe.top_k, moe.expert_bias.is_some()),
            FeedForward::Dense(_) => (0, 0, false),
        })
        .collect();
    assert_eq!(counts, [(0, 0, false), (5, 2, false), (1, 1, false), (7, 2, true)]);
    programs_agree(&golden, tensors);
}

#[test]
fn quantised_experts_agree_with_the_reference_step_by_step() {
    let golden = golden("qwen2_moe");
    // The types of experts alternate.
    let tensors = changed(&golden, |name, dtype, shape, bytes| {
        let expert = name.split_once("mlp.experts.").map(|(_, rest)| rest.as_bytes()[0]);
        let to = match expert {
            Some(b'0' | b'4' | b'6') => Dtype::Q4tp,
            Some(b'1' | b'5') => Dtype::Q82f,
            Some(b'2') => Dtype::Q4Tiled,
            Some(_) => Dtype::Q8Row,
            None if name.contains("shared_expert.") => Dtype::Q4tp,
            None => return same(dtype, shape, bytes),
        };
        recoded(to, dtype, shape, bytes)
    });
    programs_agree(&golden, tensors);
}

/// The gate of the shared expert has its own column scales, and follows a router of 3, 4 or 5 outputs.
#[test]
fn a_router_of_any_size_has_its_own_column_scales() {
    let golden = golden("qwen2_moe");
    for left in [3, 4, 5] {
        let tensors = changed(&golden, |name, dtype, shape, bytes| {
            let expert = name.split_once("experts.").and_then(|(_, rest)| rest.split('.').next());
            if expert.is_some_and(|number| number.parse::<u32>().unwrap() >= left) {
                return None;
            }
            let is_router = name.ends_with("mlp.gate.weight");
            let rows = if is_router { u64::from(left) } else { shape[0] };
            if !is_router && !name.ends_with("shared_expert_gate.weight") {
                return same(dtype, shape, bytes);
            }
            let len = (rows * shape[1]) as usize * 2;
            recoded(Dtype::Q82f, dtype, &[rows, shape[1]], &bytes[..len])
        });
        let tokens = prompt("qwen2_moe", 2);
        let plan = plan_of(&golden, &*tensors, &options(crate::device().max_binding()));
        let [found, wanted] = PLACES.map(|place| {
            let mut session = crate::session(place, &plan, tensors.clone());
            crate::masks::logits(&mut session, &tokens, 20)
        });
        let apart = crate::masks::apart(&found, &wanted);
        assert!(apart < 1e-5, "{left} experts: they differ by {apart:e}");
    }
}
