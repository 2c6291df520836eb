//! Experts whose gate and up projections have different types: they run at their size in the file, and the device agrees with
//! the host in decode, prefill, speculative steps and under masks. `paging_types` tests them paged.

use crate::paged::{Network, Projection, logits, prompt};
use crate::{PLACES, Place};
use cmf_gpu::convert::{Options, convert};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::dtype::planes::Planes;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::lm::{LowerOptions, Plan, ProgramKind};
use cmf_gpu::model::FeedForward;
use cmf_gpu::op::{Kernel, Kv};
use cmf_gpu::source::{MaskAxis, Tensors};
use std::ops::ControlFlow;
use std::sync::Arc;

/// The experts of a mixture whose gate and up projections have two types.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mixed {
    All,
    /// Every other one; the shared one is not mixed.
    Some,
    /// Only the shared expert.
    Shared,
}

const KINDS: [(&str, Mixed); 4] = [
    ("qwen2_moe", Mixed::All),
    ("qwen2_moe", Mixed::Some),
    ("qwen2_moe", Mixed::Shared),
    ("qwen3_moe", Mixed::All),
];

impl Mixed {
    fn is(self, projection: &Projection) -> bool {
        match (self, projection.expert) {
            (Mixed::All, _) => true,
            (Mixed::Some, expert) => expert.is_some_and(|expert| expert % 2 == 0),
            (Mixed::Shared, expert) => expert.is_none(),
        }
    }

    fn dtype(self, projection: Projection) -> Dtype {
        match projection.part {
            "gate_proj" if self.is(&projection) => Dtype::Q4Tiled,
            "down_proj" => Dtype::Q4tp,
            _ => Dtype::Q8Row,
        }
    }

    fn network(self, name: &str) -> Network {
        Network::of(name, |projection| self.dtype(projection))
    }
}

fn planned(network: &Network, drafts: u32) -> Plan {
    let options = LowerOptions {
        all_logits: drafts == 0,
        drafts,
        ..crate::options(96)
    };
    network.lowered(&options).unwrap()
}

/// The logits of every token, the first twelve in chunks.
fn all_logits(network: &Network, plan: &Plan, place: Place) -> Vec<f32> {
    let mut session = crate::session(place, plan, network.tensors.clone());
    let tokens: Vec<u32> = prompt("qwen3_moe").into_iter().take(20).collect();
    let bits = logits(&mut session, &tokens, 12).unwrap();
    bits.into_iter().map(f32::from_bits).collect()
}

/// The logits of tokens of which a program runs `width` at a time.
fn runs(network: &Network, plan: &Plan, kind: ProgramKind, width: usize, place: Place) -> Vec<f32> {
    let mut executor = crate::executor(place, plan, network.tensors.clone());
    crate::write_greedy(&mut *executor, plan);
    let stride = (plan.vocab as usize).next_multiple_of(32);
    let logits = plan.program(kind).output.unwrap();
    let tokens: Vec<u32> = prompt("qwen3_moe").into_iter().take(8).collect();
    let mut all = Vec::new();
    let mut end = 0;
    for tokens in tokens.chunks(width) {
        let shape = crate::begin(&mut *executor, plan, tokens, end);
        end = shape.end;
        crate::run(&mut *executor, plan, kind, shape).unwrap();
        let words = executor.read(logits, 0, stride * tokens.len()).unwrap();
        all.extend(words.into_iter().map(f32::from_bits));
    }
    all
}

fn assert_close(found: &[f32], wanted: &[f32], what: &str) {
    assert_eq!(found.len(), wanted.len());
    let largest = wanted.iter().fold(0f32, |most, value| most.max(value.abs()));
    assert!(largest > 0.5, "{what}: logits of at most {largest} show nothing");
    for (i, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        let close = (found - wanted).abs() <= 1e-5 * largest;
        assert!(close, "{what}, logit {i}: {found}, expected {wanted}");
    }
}

fn kernels(plan: &Plan, kind: ProgramKind) -> Vec<(&str, Kernel)> {
    let steps = plan.program(kind).steps.iter();
    steps.map(|step| (step.label.as_str(), step.op.kernel())).collect()
}

#[test]
fn they_agree_with_the_host() {
    for (name, mixed) in KINDS {
        let network = mixed.network(name);
        let plan = planned(&network, 0);
        let what = format!("{name}, {mixed:?}");
        let [found, wanted] = PLACES.map(|place| all_logits(&network, &plan, place));
        assert_close(&found, &wanted, &what);
        // Three tokens side by side, then two: the same bits as alone.
        let plan = planned(&network, 2);
        let run = |kind, width, place| runs(&network, &plan, kind, width, place);
        let [together, on_host] = PLACES.map(|place| run(ProgramKind::Speculate, 3, place));
        assert_close(&together, &on_host, &format!("{what}, drafts"));
        assert!(together == run(ProgramKind::Decode, 1, Place::Device), "{what}, drafts");
    }
}

#[test]
fn every_step_of_experts_of_mixed_types_agrees_with_the_reference() {
    for (name, mixed) in KINDS {
        let network = mixed.network(name);
        for drafts in [0, 3] {
            let outcome = crate::compare_steps(&planned(&network, drafts), network.tensors.clone());
            crate::all_pass(&outcome);
            let compared = |kind: &str| outcome.worst.iter().any(|(found, _)| found == kind);
            let program = if drafts == 0 { "decode" } else { "speculate" };
            assert!(compared(&format!("{program} moe_matvec")), "{name}, {mixed:?}");
            // Plain products compute a shared expert of a chunk.
            let gated = match mixed {
                Mixed::Shared => "prefill glu",
                Mixed::All | Mixed::Some => "prefill moe_matmul_up",
            };
            assert!(compared(gated), "{name}, {mixed:?}");
        }
    }
}

#[test]
fn under_masks_they_agree_with_the_host() {
    for (name, mixed) in KINDS {
        // In the last mixture fewer are left than a token takes.
        let layers: Vec<usize> =
            mixed
                .network(name)
                .model()
                .layers
                .iter()
                .enumerate()
                .fold(Vec::new(), |mut layers, (i, layer)| {
                    layers.extend(matches!(layer.ffn, FeedForward::Moe(_)).then_some(i));
                    layers
                });
        let (&last, others) = layers.split_last().unwrap();
        let network = mixed.network(name).with("task", |mask| {
            for &layer in others {
                [1, 2, 6]
                    .iter()
                    .for_each(|&expert| mask.set_unit(MaskAxis::Experts, layer, expert, false).unwrap());
            }
            (1..8).for_each(|expert| mask.set_unit(MaskAxis::Experts, last, expert, false).unwrap());
        });
        let whole = planned(&network, 0);
        let masks = network.model().masks.masks;
        let [open, masked] = [None, masks.first()].map(|mask| whole.with_mask(mask).unwrap());
        let [found, wanted] = PLACES.map(|place| all_logits(&network, &masked, place));
        assert_close(&found, &wanted, &format!("{name}, {mixed:?}"));
        assert!(
            found != all_logits(&network, &open, Place::Device),
            "the mask changes nothing"
        );
    }
}

/// Bytes of the experts on the device and in the file.
fn sizes(network: &Network, plan: &Plan) -> [u64; 2] {
    let tensors = network.experts_tensors();
    let file = tensors.iter().map(|&id| network.tensors.infos()[id].nbytes).sum();
    let matrices = plan.graph.matrices.iter();
    let held = matrices.filter(|matrix| matrix.parts.iter().any(|part| tensors.contains(part)));
    let segments = held.flat_map(|matrix| {
        assert_ne!(matrix.planes, Planes::F32, "{}", matrix.label);
        &matrix.segments
    });
    [segments.map(|segment| segment.geometry.data_bytes()).sum(), file]
}

#[test]
fn experts_of_mixed_types_take_as_many_bytes_as_in_the_file() {
    for (name, mixed) in KINDS {
        let network = mixed.network(name);
        let [device, file] = sizes(&network, &planned(&network, 0));
        assert!(
            device as f64 <= 1.02 * file as f64,
            "{name}, {mixed:?}: {device} of {file}"
        );
        assert!(
            device as f64 >= 0.98 * file as f64,
            "{name}, {mixed:?}: {device} of {file}"
        );
    }
}

/// A conversion with a type rule for one projection makes such experts.
#[test]
fn experts_that_a_conversion_rule_mixes_run_in_their_types() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.cmf");
    let options = Options {
        overrides: vec![("*up_proj*".into(), Dtype::Q8Row)],
        ..Options::new(Dtype::Q4Tiled)
    };
    let from = crate::golden::dir("qwen2_moe");
    convert(&from, &file, &options, &mut |_| ControlFlow::Continue(())).unwrap();
    let tensors = Arc::new(CmfContainer::open(&file).unwrap());
    let options = LowerOptions {
        kv: Kv::F16,
        ..crate::options(48)
    };
    let plan = crate::plan_of(&tensors, &options);
    for matrix in plan.graph.matrices.iter().filter(|matrix| matrix.planes == Planes::F32) {
        let is_f32 = |&part: &usize| tensors.infos()[part].dtype == Dtype::F32;
        assert!(matrix.parts.iter().all(is_f32), "{}", matrix.label);
    }
    for kind in [ProgramKind::Decode, ProgramKind::Prefill] {
        let mixed = kernels(&plan, kind)
            .into_iter()
            .filter(|(_, kernel)| matches!(kernel, Kernel::MoeMatvec | Kernel::MoeMatmulUp));
        // In two layers: gate and up of the experts and of the shared one, or up of the experts.
        assert_eq!(mixed.count(), if kind == ProgramKind::Decode { 8 } else { 2 });
    }
    crate::all_pass(&crate::compare_steps(&plan, tensors));
}

#[test]
fn they_take_one_more_dispatch_and_read_the_chosen_ones_only() {
    for (name, layer, mixed) in [("qwen3_moe", 1, Mixed::All), ("qwen2_moe", 3, Mixed::All)] {
        let network = mixed.network(name);
        let plan = planned(&network, 2);
        let prefix = format!("layer.{layer:02}.ffn.");
        let labels = |kind: ProgramKind| -> Vec<(String, Kernel)> {
            let of_layer = kernels(&plan, kind).into_iter().filter_map(|(label, kernel)| {
                let part = label.strip_prefix(&prefix)?;
                Some((part.to_string(), kernel))
            });
            of_layer.collect()
        };
        let shared = name == "qwen2_moe";
        let wanted = |parts: &[(&str, Kernel)]| -> Vec<(String, Kernel)> {
            let parts = parts.iter().filter(|(part, _)| shared || !part.starts_with("shared"));
            parts.map(|&(part, kernel)| (part.to_string(), kernel)).collect()
        };
        let decode = wanted(&[
            ("router", Kernel::Matvec),
            ("experts.gate", Kernel::MoeMatvec),
            ("experts.up", Kernel::MoeMatvec),
            ("shared.gate", Kernel::MoeMatvec),
            ("shared.up", Kernel::MoeMatvec),
            ("experts.down", Kernel::MoeDown),
            ("shared.down", Kernel::MatvecAdd),
        ]);
        assert_eq!(labels(ProgramKind::Decode), decode, "{name}");
        assert_eq!(labels(ProgramKind::Speculate), decode, "{name}");
        let prefill = wanted(&[
            ("norm", Kernel::Norm),
            ("router", Kernel::Matmul),
            ("route", Kernel::MoeRoute),
            ("lists", Kernel::MoeLists),
            ("experts.gate", Kernel::MoeMatmul),
            ("experts.up", Kernel::MoeMatmulUp),
            ("shared.gate", Kernel::Matmul),
            ("shared.up", Kernel::Matmul),
            ("shared.glu", Kernel::Glu),
            ("experts.down", Kernel::MoeMatmul),
            ("shared.down", Kernel::Matmul),
            ("combine", Kernel::MoeCombine),
        ]);
        assert_eq!(labels(ProgramKind::Prefill), prefill, "{name}");

        // One more draft reads in every mixture three products of each of its experts, and two of the shared one.
        let (_, top_k) = network.experts();
        let bytes = |expert: &str, part: &str| {
            let name = format!("model.layers.{layer}.mlp.{expert}.{part}.weight");
            let id = network.tensors.find(&name).unwrap();
            network.tensors.infos()[id].nbytes
        };
        let of_expert: u64 = ["gate_proj", "up_proj", "down_proj"]
            .map(|part| bytes("experts.0", part))
            .iter()
            .sum();
        let of_shared = match shared {
            true => bytes("shared_expert", "gate_proj") + bytes("shared_expert", "up_proj"),
            false => 0,
        };
        let layers = network.model().layers;
        let mixtures = layers.iter().filter(|layer| matches!(layer.ffn, FeedForward::Moe(_)));
        let wanted = mixtures.count() as u64 * (top_k as u64 * of_expert + of_shared);
        let more = plan.weight_bytes_read(ProgramKind::Speculate) - plan.weight_bytes_read(ProgramKind::Decode);
        assert!(
            more.abs_diff(2 * wanted) * 50 <= 2 * wanted,
            "{name}: {more}, expected {}",
            2 * wanted
        );
    }
}
