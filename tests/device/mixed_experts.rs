//! Experts whose gate and up projections have different types: they run at the size that they have in the file, and say what
//! the host says, in decode, in prefill, in rounds with drafts and under masks. `paging_types` has them paged.

use crate::paged::{Network, Projection, logits, prompt};
use cmf_gpu::container::{Container, Tensors};
use cmf_gpu::convert::{Options, convert};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::dtype::planes::Planes;
use cmf_gpu::gpu::GpuExecutor;
use cmf_gpu::host::HostExecutor;
use cmf_gpu::kernel::{Kernel, Kv};
use cmf_gpu::model::{FeedForward, bind};
use cmf_gpu::parity::{self, Subject};
use cmf_gpu::program::{Ctl, Executor, ExpertOptions, Extent, Plan, PlanOptions, Which, plan};
use cmf_gpu::sampling::Sampling;
use cmf_gpu::session::Session;
use std::ops::ControlFlow;
use std::sync::Arc;

/// Which of a mixture's experts have gate and up projections of two types.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mixed {
    All,
    /// Every other one; the shared one lies with those that do not.
    Some,
    /// The shared one only.
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
    let options = PlanOptions {
        ctx: 96,
        chunk: 16,
        kv: Kv::F32,
        max_binding: crate::device().max_binding(),
        all_logits: drafts == 0,
        drafts,
        experts: ExpertOptions::default(),
    };
    plan(&network.model(), &*network.tensors, &options).unwrap()
}

fn executor(network: &Network, plan: &Arc<Plan>, on_host: bool) -> Box<dyn Executor> {
    match on_host {
        true => Box::new(HostExecutor::new(plan.clone(), network.tensors.clone()).unwrap()),
        false => {
            let executor = GpuExecutor::new(crate::device(), plan.clone(), &*network.tensors, &mut |_, _| Ok(()));
            Box::new(executor.unwrap())
        }
    }
}

/// Of every token, the first twelve in chunks.
fn said(network: &Network, plan: &Arc<Plan>, on_host: bool) -> Vec<f32> {
    let mut session = Session::new(plan.clone(), executor(network, plan, on_host));
    let tokens: Vec<u32> = prompt("qwen3_moe").into_iter().take(20).collect();
    let bits = logits(&mut session, &tokens, 12).unwrap();
    bits.into_iter().map(f32::from_bits).collect()
}

/// Logits of tokens that a program runs so many at a time.
fn runs(network: &Network, plan: &Arc<Plan>, which: Which, width: usize, on_host: bool) -> Vec<f32> {
    let mut executor = executor(network, plan, on_host);
    let settings = Sampling::greedy().words(&[]).unwrap();
    executor.write(plan.fixed.settings, &settings).unwrap();
    let stride = (plan.vocab as usize).next_multiple_of(32);
    let logits = plan.program(which).logits.unwrap();
    let tokens: Vec<u32> = prompt("qwen3_moe").into_iter().take(8).collect();
    let mut all = Vec::new();
    let mut end = 0;
    for tokens in tokens.chunks(width) {
        let columns = tokens.len() as u32;
        let mut ctl = Ctl {
            pos: end,
            columns,
            last: 96,
            ..Ctl::default()
        };
        ctl.tokens[..tokens.len()].copy_from_slice(tokens);
        executor.write(plan.fixed.ctl, bytemuck::cast_slice(&[ctl])).unwrap();
        end += columns;
        let ticket = executor.submit(which, Extent { columns, end }).unwrap();
        executor.wait(ticket).unwrap();
        let words = executor.read(logits, 0, stride * tokens.len()).unwrap();
        all.extend(words.into_iter().map(f32::from_bits));
    }
    all
}

fn assert_close(found: &[f32], wanted: &[f32], what: &str) {
    assert_eq!(found.len(), wanted.len());
    let largest = wanted.iter().fold(0f32, |most, value| most.max(value.abs()));
    assert!(largest > 0.5, "{what}: logits of at most {largest} say nothing");
    for (i, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        let close = (found - wanted).abs() <= 1e-5 * largest;
        assert!(close, "{what}, logit {i}: {found}, wanted {wanted}");
    }
}

fn kernels(plan: &Plan, which: Which) -> Vec<(&str, Kernel)> {
    let steps = plan.program(which).steps.iter();
    steps.map(|step| (step.label.as_str(), step.op.kernel())).collect()
}

#[test]
fn they_say_what_the_host_says() {
    for (name, mixed) in KINDS {
        let network = mixed.network(name);
        let plan = Arc::new(planned(&network, 0));
        let what = format!("{name}, {mixed:?}");
        let [found, wanted] = [false, true].map(|on_host| said(&network, &plan, on_host));
        assert_close(&found, &wanted, &what);
        // Three columns side by side, then two; each is to the bit what it is alone.
        let plan = Arc::new(planned(&network, 2));
        let run = |which, width, on_host| runs(&network, &plan, which, width, on_host);
        let round = run(Which::Round, 3, false);
        assert_close(&round, &run(Which::Round, 3, true), &format!("{what}, drafts"));
        assert!(round == run(Which::Decode, 1, false), "{what}, drafts");
    }
}

#[test]
fn every_step_agrees_with_the_reference() {
    for (name, mixed) in KINDS {
        let network = mixed.network(name);
        for drafts in [0, 3] {
            let subject = Subject {
                plan: Arc::new(planned(&network, drafts)),
                tensors: network.tensors.clone(),
            };
            let outcome = parity::programs(&crate::device(), &subject, &subject, &mut |_, _, _| Ok(())).unwrap();
            assert!(outcome.failed.is_empty(), "{name}, {mixed:?}: {:?}", outcome.failed);
            let compared = |kind: &str| outcome.worst.iter().any(|(found, _)| found == kind);
            let program = if drafts == 0 { "decode" } else { "round" };
            assert!(compared(&format!("{program} moe_matvec")), "{name}, {mixed:?}");
            // Of a shared expert a chunk's are plain products.
            let gated = match mixed {
                Mixed::Shared => "prefill glu",
                Mixed::All | Mixed::Some => "prefill moe_matmul_up",
            };
            assert!(compared(gated), "{name}, {mixed:?}");
        }
    }
}

#[test]
fn under_masks_they_say_what_the_host_says() {
    for (name, mixed) in KINDS {
        // Of the last mixture fewer are left than a token takes.
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
                    .for_each(|&expert| mask.set_expert(layer, expert, false).unwrap());
            }
            (1..8).for_each(|expert| mask.set_expert(last, expert, false).unwrap());
        });
        let whole = planned(&network, 0);
        let masks = network.model().masks.masks;
        let [open, masked] = [None, masks.first()].map(|mask| Arc::new(whole.with_mask(mask).unwrap()));
        let [found, wanted] = [false, true].map(|on_host| said(&network, &masked, on_host));
        assert_close(&found, &wanted, &format!("{name}, {mixed:?}"));
        assert!(found != said(&network, &open, false), "the mask changes nothing");
    }
}

/// Bytes that a plan has for some tensors, as it has them, and bytes of the file.
fn sizes(network: &Network, plan: &Plan) -> [u64; 2] {
    let tensors = network.experts_tensors();
    let file = tensors.iter().map(|&id| network.tensors.infos()[id].nbytes).sum();
    let matrices = plan.matrices.iter();
    let held = matrices.filter(|matrix| matrix.parts.iter().any(|part| tensors.contains(part)));
    let segments = held.flat_map(|matrix| {
        assert_ne!(matrix.planes, Planes::F32, "{}", matrix.label);
        &matrix.segments
    });
    [segments.map(|segment| segment.geometry.data_bytes()).sum(), file]
}

#[test]
fn they_take_the_bytes_of_the_file() {
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

/// A conversion with a rule for one projection makes such experts.
#[test]
fn what_a_rule_of_a_conversion_makes_runs_in_its_types() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.cmf");
    let options = Options {
        overrides: vec![("*up_proj*".into(), Dtype::Q8Row)],
        ..Options::new(Dtype::Q4Tiled)
    };
    let from = crate::golden::dir("qwen2_moe");
    convert(&from, &file, &options, &mut |_| ControlFlow::Continue(())).unwrap();
    let tensors = Arc::new(Container::open(&file).unwrap());
    let options = PlanOptions {
        ctx: 48,
        chunk: 16,
        kv: Kv::F16,
        max_binding: crate::device().max_binding(),
        all_logits: false,
        drafts: 0,
        experts: ExpertOptions::default(),
    };
    let plan = plan(&bind(&tensors.header().arch, &*tensors).unwrap(), &*tensors, &options).unwrap();
    for matrix in plan.matrices.iter().filter(|matrix| matrix.planes == Planes::F32) {
        let is_f32 = |&part: &usize| tensors.infos()[part].dtype == Dtype::F32;
        assert!(matrix.parts.iter().all(is_f32), "{}", matrix.label);
    }
    for program in [Which::Decode, Which::Prefill] {
        let mixed = kernels(&plan, program)
            .into_iter()
            .filter(|(_, kernel)| matches!(kernel, Kernel::MoeMatvec | Kernel::MoeMatmulUp));
        // Gate and up of the experts and of the shared one, or up of the experts, in two layers.
        assert_eq!(mixed.count(), if program == Which::Decode { 8 } else { 2 });
    }
    let plan = Arc::new(plan);
    let subject = Subject { plan, tensors };
    let outcome = parity::programs(&crate::device(), &subject, &subject, &mut |_, _, _| Ok(())).unwrap();
    assert!(outcome.failed.is_empty() && outcome.passed > 0, "{:?}", outcome.failed);
}

#[test]
fn they_take_a_dispatch_more_and_read_the_chosen_ones_only() {
    for (name, layer, mixed) in [("qwen3_moe", 1, Mixed::All), ("qwen2_moe", 3, Mixed::All)] {
        let network = mixed.network(name);
        let plan = planned(&network, 2);
        let prefix = format!("layer.{layer:02}.ffn.");
        let labels = |which: Which| -> Vec<(String, Kernel)> {
            let of_layer = kernels(&plan, which).into_iter().filter_map(|(label, kernel)| {
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
        assert_eq!(labels(Which::Decode), decode, "{name}");
        assert_eq!(labels(Which::Round), decode, "{name}");
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
        assert_eq!(labels(Which::Prefill), prefill, "{name}");

        // What a draft more reads, in every mixture: three products of each expert that it takes, two of the shared one.
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
        let more = plan.weight_bytes_read(Which::Round) - plan.weight_bytes_read(Which::Decode);
        assert!(
            more.abs_diff(2 * wanted) * 50 <= 2 * wanted,
            "{name}: {more}, wanted {}",
            2 * wanted
        );
    }
}
