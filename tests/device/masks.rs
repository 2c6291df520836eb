//! Task masks and looped networks, compared with networks without the masked parts, and with networks that contain each layer
//! twice.

use crate::goldens::Golden;
use crate::{PLACES, Place};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::graph::Measured;
use cmf_gpu::lm::run::{Cancel, Generation, Session};
use cmf_gpu::lm::{LowerOptions, Plan, ProgramKind, lower};
use cmf_gpu::model::{Model, bind};
use cmf_gpu::op::{Kernel, Kv};
use cmf_gpu::sampling::Sampling;
use cmf_gpu::source::{Arch, Mask, MaskAxis, MaskShape, Masks, MemoryTensors, Tensors};
use std::ops::ControlFlow;
use std::sync::Arc;

/// A tensor of a network in memory.
pub(super) type Tensor = (String, Dtype, Vec<u64>, Vec<u8>);

/// A network in memory, with masks.
pub(super) struct Network {
    pub(super) arch: Arch,
    pub(super) tensors: Arc<MemoryTensors>,
    pub(super) masks: Masks,
}

impl Network {
    pub(super) fn same(golden: &Golden) -> Network {
        let infos = golden.tensors.infos().iter().enumerate();
        let all = infos.map(|(id, info)| {
            let bytes = golden.tensors.stored(id).unwrap().bytes.to_vec();
            (info.name.clone(), info.dtype, info.shape.clone(), bytes)
        });
        Network {
            arch: golden.tensors.header().arch.clone(),
            tensors: Arc::new(MemoryTensors::new(all).unwrap()),
            masks: Masks::default(),
        }
    }

    /// A golden model with changed f16 tensors.
    pub(super) fn of(golden: &Golden, change: &dyn Fn(Tensor) -> Vec<Tensor>) -> Network {
        Network::same(golden).changed(change)
    }

    /// This network with changed f16 tensors.
    pub(super) fn changed(&self, change: &dyn Fn(Tensor) -> Vec<Tensor>) -> Network {
        let infos = self.tensors.infos().iter().enumerate();
        let all = infos.flat_map(|(id, info)| {
            let bytes = self.tensors.stored(id).unwrap().bytes.to_vec();
            change((info.name.clone(), info.dtype, info.shape.clone(), bytes))
        });
        Network {
            arch: self.arch.clone(),
            tensors: Arc::new(MemoryTensors::new(all).unwrap()),
            masks: self.masks.clone(),
        }
    }

    /// This network with a mask named `task`.
    pub(super) fn with(mut self, edit: impl FnOnce(&mut Mask), by_pass: bool) -> Network {
        let mut mask = Mask::open(0, "task", MaskShape::of(&self.arch, by_pass));
        edit(&mut mask);
        self.masks.masks = vec![mask];
        self
    }

    pub(super) fn model(&self) -> Model {
        let mut model = bind(&self.arch, &*self.tensors).unwrap();
        model.masks = self.masks.clone();
        model
    }

    /// The plan without a mask.
    pub(super) fn whole(&self, options: &LowerOptions) -> Plan {
        lower(&self.model(), &*self.tensors, options, &Measured::default()).unwrap()
    }

    /// The plan under the first mask, if there is one.
    pub(super) fn plan(&self, max_binding: u64) -> Plan {
        let options = LowerOptions {
            max_binding,
            all_logits: true,
            ..crate::options(96)
        };
        self.whole(&options).with_mask(self.masks.masks.first()).unwrap()
    }

    pub(super) fn session(&self, place: Place) -> Session {
        let plan = self.plan(crate::device().max_binding());
        crate::session(place, &plan, self.tensors.clone())
    }
}

pub(super) fn golden(name: &'static str) -> Golden {
    Golden::of(name, crate::golden(name, Dtype::F16))
}

/// The longest recorded prompt.
pub(super) fn prompt(name: &str) -> Vec<u32> {
    let json = crate::golden::described(name);
    let ids = json["prompts"][2]["prompt"].as_array().unwrap();
    ids.iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Logits of every position: the first `prefill` tokens in chunks, the rest one by one.
pub(super) fn logits(session: &mut Session, tokens: &[u32], prefill: usize) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    let mut sink = |_: usize, logits: &[f32], _: &[Vec<f32>]| {
        all.push(logits.to_vec());
        Ok(())
    };
    session.logits(tokens, prefill, false, &mut sink).unwrap();
    all
}

pub(super) fn greedy(session: &mut Session, tokens: &[u32]) -> Vec<u32> {
    session.clear();
    assert!(session.prefill(tokens, &Cancel::new()).unwrap().1.is_continue());
    let mut found = Vec::new();
    let generation = Generation {
        sampling: Sampling::greedy(),
        stops: Vec::new(),
        max_tokens: 24,
    };
    let mut emit = |token| {
        found.push(token);
        ControlFlow::Continue(())
    };
    session.generate(&generation, &Cancel::new(), &mut emit).unwrap();
    found
}

/// The largest relative L2 error of the logits of a position.
pub(super) fn apart(a: &[Vec<f32>], b: &[Vec<f32>]) -> f64 {
    assert_eq!(a.len(), b.len());
    let one = |(a, b): (&Vec<f32>, &Vec<f32>)| {
        let square = |v: f32| f64::from(v).powi(2);
        let difference: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
        let norm: f64 = b.iter().map(|&v| square(v)).sum();
        assert!(difference.is_finite() && norm > 0.0);
        (difference / norm).sqrt()
    };
    a.iter().zip(b).map(one).fold(0.0, f64::max)
}

/// Both networks compute the same: tokens exactly, logits within `tolerance`; 0 means bit by bit.
pub(super) fn agree(name: &str, a: &Network, b: &Network, tolerance: f64) {
    let tokens = prompt(name);
    for place in PLACES {
        let (mut a, mut b) = (a.session(place), b.session(place));
        for prefill in [0, 23, tokens.len()] {
            let [a, b] = [&mut a, &mut b].map(|session| logits(session, &tokens, prefill));
            let apart = apart(&a, &b);
            // The host sums in f64, and in another order.
            let tolerance = if place == Place::Host {
                tolerance.max(1e-6)
            } else {
                tolerance
            };
            assert!(
                apart <= tolerance,
                "{name} {place:?} {prefill}: they differ by {apart:e}"
            );
        }
        assert_eq!(greedy(&mut a, &tokens), greedy(&mut b, &tokens), "{name} {place:?}");
    }
}

/// Some rows and columns of an f16 matrix, or some elements of a vector.
pub(super) fn gathered((name, dtype, shape, bytes): Tensor, rows: &[usize], cols: &[usize]) -> Tensor {
    assert_eq!(dtype, Dtype::F16);
    let stride = *shape.last().unwrap() as usize;
    let at = rows
        .iter()
        .flat_map(|row| cols.iter().map(move |col| (row * stride + col) * 2));
    let payload = at.flat_map(|at| bytes[at..at + 2].to_vec()).collect();
    let shape = match shape.len() {
        1 => vec![cols.len() as u64],
        _ => vec![rows.len() as u64, cols.len() as u64],
    };
    (name, dtype, shape, payload)
}

/// A golden model with only these neurons and heads, and without layers that keep nothing.
pub(super) fn cut(golden: &Golden, head_dim: usize, kept: &[Option<(Vec<usize>, Vec<usize>)>]) -> Network {
    let number = |layer: usize| kept[..layer].iter().filter(|kept| kept.is_some()).count();
    let mut network = Network::of(golden, &|mut tensor| {
        let Some(rest) = tensor.0.strip_prefix("model.layers.") else {
            return vec![tensor];
        };
        let (layer, part) = rest.split_once('.').unwrap();
        let layer: usize = layer.parse().unwrap();
        let part = part.to_owned();
        let Some((neurons, heads)) = &kept[layer] else {
            return Vec::new();
        };
        tensor.0 = format!("model.layers.{}.{part}", number(layer));
        let elements: Vec<usize> = heads.iter().flat_map(|h| h * head_dim..(h + 1) * head_dim).collect();
        let all: Vec<usize> = (0..*tensor.2.last().unwrap() as usize).collect();
        let rows: Vec<usize> = (0..tensor.2[0] as usize).collect();
        vec![match part.as_str() {
            "mlp.gate_proj.weight" | "mlp.up_proj.weight" => gathered(tensor, neurons, &all),
            "mlp.down_proj.weight" => gathered(tensor, &rows, neurons),
            "self_attn.q_proj.weight" => gathered(tensor, &elements, &all),
            "self_attn.q_proj.bias" => gathered(tensor, &[0], &elements),
            "self_attn.o_proj.weight" => gathered(tensor, &rows, &elements),
            _ => tensor,
        }]
    });
    let left: Vec<_> = kept.iter().flatten().collect();
    network.arch.num_layers = left.len();
    network.arch.layer_types.truncate(left.len());
    network.arch.attention_heads_per_layer = Some(left.iter().map(|(_, heads)| heads.len()).collect());
    network
}

pub(super) fn without(all: usize, off: impl Fn(usize) -> bool) -> Vec<usize> {
    (0..all).filter(|&i| !off(i)).collect()
}

/// A mask of everything that is not in `kept`, for layers with this many neurons and heads.
pub(super) fn mask_like(mask: &mut Mask, kept: &[Option<(Vec<usize>, Vec<usize>)>], neurons: usize, heads: usize) {
    for (layer, kept) in kept.iter().enumerate() {
        let Some((some, some_heads)) = kept else {
            mask.set_layer(layer, false).unwrap();
            continue;
        };
        for i in (0..neurons).filter(|i| !some.contains(i)) {
            mask.set_unit(MaskAxis::Neurons, layer, i, false).unwrap();
        }
        for i in (0..heads).filter(|i| !some_heads.contains(i)) {
            mask.set_unit(MaskAxis::Heads, layer, i, false).unwrap();
        }
    }
}

#[test]
fn whole_groups_masked_are_a_network_without_them_to_the_bit() {
    let golden = golden("qwen2");
    let groups = |off: &[usize]| without(160, |i| off.contains(&(i / 32)));
    let kept = [
        Some((groups(&[1, 3]), vec![0, 2])),
        Some((groups(&[]), vec![1])),
        Some((groups(&[0, 1, 2, 4]), vec![0, 1, 2])),
    ];
    let masked = Network::same(&golden).with(|mask| mask_like(mask, &kept, 160, 3), false);
    agree("qwen2", &masked, &cut(&golden, 32, &kept), 0.0);
}

#[test]
fn masking_single_neurons_heads_and_layers_equals_a_network_without_them() {
    let qwen2 = golden("qwen2");
    let kept = [
        Some((without(160, |i| i % 3 == 1 || (64..96).contains(&i)), vec![0, 2])),
        None,
        Some((without(160, |i| i % 7 != 2), vec![1])),
    ];
    let masked = Network::same(&qwen2).with(|mask| mask_like(mask, &kept, 160, 3), false);
    agree("qwen2", &masked, &cut(&qwen2, 32, &kept), 1e-5);
    // Only the biases of the first layer are left.
    let kept = [
        Some((vec![], vec![])),
        Some((without(160, |_| false), vec![0, 1, 2])),
        Some((without(160, |i| i > 2), vec![2])),
    ];
    let masked = Network::same(&qwen2).with(|mask| mask_like(mask, &kept, 160, 3), false);
    agree("qwen2", &masked, &zeroed(&qwen2, 32, &kept), 1e-5);
    // Heads of 48 elements share groups of 32 with their neighbours.
    let llama = golden("llama_untied");
    let kept = [Some((without(224, |i| i > 99), vec![1, 2])), None];
    let masked = Network::same(&llama).with(|mask| mask_like(mask, &kept, 224, 4), false);
    agree("llama_untied", &masked, &cut(&llama, 48, &kept), 1e-5);
    // The first and the last layer are off; norms follow the blocks.
    let gemma = golden("gemma2");
    let kept = [
        None,
        Some((without(352, |i| i % 5 == 0), vec![0, 1, 2, 3])),
        Some((without(352, |i| i / 32 == 3), vec![0, 3])),
        None,
    ];
    // The window of a layer depends on its number, so layers cannot be cut out. Zeros in the weights have the same effect.
    let masked = Network::same(&gemma).with(|mask| mask_like(mask, &kept, 352, 4), false);
    agree("gemma2", &masked, &zeroed(&gemma, 48, &kept), 1e-5);
}

/// A golden model with zeros in the masked columns; masked layers add nothing.
fn zeroed(golden: &Golden, head_dim: usize, kept: &[Option<(Vec<usize>, Vec<usize>)>]) -> Network {
    Network::of(golden, &|mut tensor| {
        let Some(rest) = tensor.0.strip_prefix("model.layers.") else {
            return vec![tensor];
        };
        let (layer, part) = rest.split_once('.').unwrap();
        let kept = &kept[layer.parse::<usize>().unwrap()];
        let cols = *tensor.2.last().unwrap() as usize;
        let off = |col: usize| match (part, kept) {
            ("mlp.down_proj.weight", Some((neurons, _))) => !neurons.contains(&col),
            ("self_attn.o_proj.weight", Some((_, heads))) => !heads.contains(&(col / head_dim)),
            ("mlp.down_proj.weight" | "self_attn.o_proj.weight", None) => true,
            _ => false,
        };
        for (i, weight) in tensor.3.chunks_exact_mut(2).enumerate() {
            if off(i % cols) {
                weight.fill(0);
            }
        }
        vec![tensor]
    })
}

#[test]
fn masking_experts_equals_a_mixture_without_them() {
    let golden = golden("qwen3_moe");
    // The last layer keeps fewer experts than top_k.
    let kept: [&[usize]; 4] = [&[], &[2, 3, 5, 6], &[0, 3, 4, 6], &[1]];
    let masked = Network::same(&golden).with(
        |mask| {
            for (layer, kept) in kept.iter().enumerate().skip(1) {
                for expert in (0..8).filter(|expert| !kept.contains(expert)) {
                    mask.set_unit(MaskAxis::Experts, layer, expert, false).unwrap();
                }
            }
        },
        false,
    );
    let cut = Network::of(&golden, &|mut tensor| {
        let Some(rest) = tensor.0.strip_prefix("model.layers.") else {
            return vec![tensor];
        };
        let (layer, part) = rest.split_once('.').unwrap();
        let kept = kept[layer.parse::<usize>().unwrap()];
        if part == "mlp.gate.weight" {
            let all: Vec<usize> = (0..tensor.2[1] as usize).collect();
            return vec![gathered(tensor, kept, &all)];
        }
        let Some(expert) = part.strip_prefix("mlp.experts.") else {
            return vec![tensor];
        };
        let (expert, part) = expert.split_once('.').unwrap();
        let expert: usize = expert.parse().unwrap();
        let Some(place) = kept.iter().position(|&kept| kept == expert) else {
            return Vec::new();
        };
        tensor.0 = format!("model.layers.{layer}.mlp.experts.{place}.{part}");
        vec![tensor]
    });
    agree("qwen3_moe", &masked, &cut, 1e-5);
}

#[test]
fn a_mask_reads_fewer_bytes_and_a_change_of_masks_uploads_nothing() {
    let golden = golden("qwen2");
    let plain = Network::same(&golden);
    // Two of five groups of neurons, in every layer.
    let masked = Network::same(&golden).with(
        |mask| {
            for (layer, i) in (0..3).flat_map(|layer| (0..64).map(move |i| (layer, i))) {
                mask.set_unit(MaskAxis::Neurons, layer, i, false).unwrap();
            }
        },
        false,
    );
    let tokens = prompt("qwen2");
    let full = plain.plan(1 << 30);
    let narrow = masked.plan(1 << 30);
    let unmasked = narrow.with_mask(None).unwrap();
    let bytes = |plan: &Plan| plan.weight_bytes_read(ProgramKind::Decode);
    assert_eq!(bytes(&full), bytes(&unmasked));
    // Gate, up and down.
    assert_eq!(bytes(&full) - bytes(&narrow), 3 * (3 * 64 * 96 * 2));
    for kind in ProgramKind::ALL {
        let steps = |plan: &Plan| -> Vec<_> {
            let steps = crate::selected(plan, kind).into_iter();
            steps
                .map(|(step, resolved)| (step.label.clone(), step.op, resolved.masked, resolved.grid))
                .collect()
        };
        assert_eq!(steps(&full), steps(&unmasked));
    }
    // As many dispatches as without a mask.
    let dispatches = |plan: &Plan| crate::selected(plan, ProgramKind::Decode).len();
    assert_eq!(dispatches(&narrow), dispatches(&full));

    let mut session = masked.session(Place::Device);
    let with_mask = logits(&mut session, &tokens, 9);
    let before = session.counters();
    session.select(unmasked).unwrap();
    assert!(session.cached().is_empty());
    let without = logits(&mut session, &tokens, 9);
    assert_eq!(without, logits(&mut plain.session(Place::Device), &tokens, 9));
    assert!(apart(&without, &with_mask) > 1e-2);
    session.select(narrow.clone()).unwrap();
    assert_eq!(with_mask, logits(&mut session, &tokens, 9));
    let after = session.counters().since(&before);
    assert_eq!(
        (after.upload_bytes, after.pipelines_compiled, after.bind_groups_created),
        (0, 0, 0)
    );
    greedy(&mut session, &tokens);
    let (runs, cost) = session.decode_cost();
    assert_eq!(cost.weight_bytes, runs * bytes(&narrow));
    assert_eq!((cost.write_buffer_calls, cost.buffers_created), (0, 0));
}

/// The kernels of the steps that run, and which of them are masked.
fn kernels(plan: &Plan, kind: ProgramKind) -> Vec<(Kernel, bool)> {
    let steps = crate::selected(plan, kind).into_iter();
    steps
        .map(|(step, resolved)| (step.op.kernel(), resolved.masked))
        .collect()
}

#[test]
fn speculative_steps_follow_the_selected_mask() {
    let golden = golden("qwen2");
    let plain = Network::same(&golden);
    let masked = Network::same(&golden).with(|mask| mask.set_unit(MaskAxis::Heads, 1, 0, false).unwrap(), false);
    let options = LowerOptions {
        max_binding: 1 << 30,
        drafts: 3,
        ..crate::options(96)
    };
    let full = masked.whole(&options);
    let narrow = full.with_mask(masked.masks.masks.first()).unwrap();
    assert_eq!((full.drafts, narrow.drafts), (3, 3));
    for plan in [&full, &narrow] {
        assert_eq!(
            kernels(plan, ProgramKind::Speculate),
            kernels(plan, ProgramKind::Decode)
        );
    }
    assert!(kernels(&narrow, ProgramKind::Speculate).contains(&(Kernel::Matvec, true)));
    let again = narrow.with_mask(None).unwrap();
    assert_eq!(
        kernels(&again, ProgramKind::Speculate),
        kernels(&full, ProgramKind::Speculate)
    );

    let tokens = prompt("qwen2");
    let wanted = [&masked, &plain].map(|network| greedy(&mut network.session(Place::Device), &tokens));
    let mut session = crate::session(Place::Device, &full, masked.tensors.clone());
    session.select(narrow).unwrap();
    assert_eq!(greedy(&mut session, &tokens), wanted[0]);
    session.select(again).unwrap();
    assert_eq!(greedy(&mut session, &tokens), wanted[1]);
    assert_ne!(wanted[0], wanted[1]);
}

#[test]
fn a_mask_that_masks_nothing_equals_no_mask() {
    let golden = golden("qwen2");
    let open = Network::same(&golden).with(|_| {}, false);
    let (open, plain) = (open.plan(1 << 30), Network::same(&golden).plan(1 << 30));
    assert!(open.masking.is_none());
    assert_eq!(
        (open.graph.buffers.len(), open.graph.weight_bytes()),
        (plain.graph.buffers.len(), plain.graph.weight_bytes())
    );
}

/// Guards against masks that convert weights, or keep copies of them.
#[test]
fn a_mask_stores_no_weights() {
    for dtype in [Dtype::Q4tp, Dtype::Q8Row, Dtype::Q82f] {
        let golden = Golden::of("qwen2", crate::golden("qwen2", dtype));
        let plain = Network::same(&golden).plan(1 << 30);
        let edit = |mask: &mut Mask| {
            for layer in 0..2 {
                (0..40).for_each(|unit| mask.set_unit(MaskAxis::Neurons, layer, unit * 3, false).unwrap());
            }
        };
        let masked = Network::same(&golden).with(edit, false).plan(1 << 30);
        assert!(masked.masking.is_some());
        let [plain, masked] = [plain, masked].map(|plan| plan.graph);
        assert!(masked.weight_bytes() <= plain.weight_bytes(), "{}", dtype.name());
        let more = masked.buffer_bytes().saturating_sub(plain.buffer_bytes());
        assert!(more * 5 <= plain.weight_bytes(), "{}: {more} more bytes", dtype.name());
    }
}

#[test]
fn impossible_masks_are_refused() {
    let refused = |name: &'static str, edit: fn(&mut Mask)| {
        let golden = golden(name);
        let network = Network::same(&golden).with(edit, false);
        let options = LowerOptions {
            chunk: 8,
            kv: Kv::F16,
            ..crate::options(32)
        };
        let plan = network.whole(&options);
        let err = plan.with_mask(network.masks.masks.first()).unwrap_err();
        assert_eq!(err.kind.name(), "UnsupportedModel");
        err.message
    };
    let said = refused("qwen3_moe", |mask| {
        mask.set_unit(MaskAxis::Neurons, 1, 3, false).unwrap()
    });
    assert!(
        said.contains("neurons of layer 1, which is a mixture of experts"),
        "{said}"
    );
    let said = refused("qwen3_5", |mask| mask.set_unit(MaskAxis::Heads, 0, 3, false).unwrap());
    assert!(
        said.contains("heads of layer 0, which has no softmax attention"),
        "{said}"
    );
}

/// A golden model of three layers that are applied twice, and a model that contains these layers twice.
pub(super) fn looped(golden: &Golden) -> [Network; 2] {
    let mut looped = Network::same(golden);
    looped.arch.num_loops = 2;
    let layers = looped.arch.num_layers;
    let mut unrolled = Network::of(golden, &|tensor| {
        let Some(rest) = tensor.0.strip_prefix("model.layers.") else {
            return vec![tensor];
        };
        let (layer, part) = rest.split_once('.').unwrap();
        let again = format!("model.layers.{}.{part}", layer.parse::<usize>().unwrap() + layers);
        let (_, dtype, shape, bytes) = tensor.clone();
        vec![tensor, (again, dtype, shape, bytes)]
    });
    unrolled.arch.num_layers = 2 * layers;
    let types = unrolled.arch.layer_types.clone();
    unrolled.arch.layer_types.extend(types);
    [looped, unrolled]
}

#[test]
fn a_looped_network_equals_one_that_stores_its_layers_twice() {
    let golden = golden("qwen2");
    let [looped, unrolled] = looped(&golden);
    let (plan, twice) = (looped.plan(1 << 30), unrolled.plan(1 << 30));
    let once = Network::same(&golden).plan(1 << 30);
    assert_eq!(plan.graph.weight_bytes(), once.graph.weight_bytes());
    assert_eq!(
        plan.weight_bytes_read(ProgramKind::Decode),
        twice.weight_bytes_read(ProgramKind::Decode)
    );
    assert_eq!(plan.program(ProgramKind::Decode).taps.len(), 6);
    agree("qwen2", &looped, &unrolled, 0.0);
}

#[test]
fn masks_of_loop_iterations_equal_masks_of_layers_that_are_stored_twice() {
    let golden = golden("qwen2");
    let [looped, unrolled] = looped(&golden);
    // Different in each pass, except for the layer that is off.
    let edit = |mask: &mut Mask| {
        for i in (0..160).filter(|i| i % 3 == 0) {
            mask.set_unit(MaskAxis::Neurons, 0, i, false).unwrap();
            mask.set_unit(MaskAxis::Neurons, 5, i / 2, false).unwrap();
        }
        mask.set_unit(MaskAxis::Heads, 3, 1, false).unwrap();
    };
    let looped = looped.with(
        |mask| {
            edit(mask);
            mask.set_layer(1, false).unwrap()
        },
        true,
    );
    let unrolled = unrolled.with(
        |mask| {
            edit(mask);
            mask.set_layer(1, false).unwrap();
            mask.set_layer(4, false).unwrap();
        },
        false,
    );
    agree("qwen2", &looped, &unrolled, 0.0);
    // A mask with one row for each layer applies to every pass.
    let [again, written] = self::looped(&golden);
    let again = again.with(|mask| mask.set_unit(MaskAxis::Heads, 2, 0, false).unwrap(), false);
    let written = written.with(
        |mask| {
            mask.set_unit(MaskAxis::Heads, 2, 0, false).unwrap();
            mask.set_unit(MaskAxis::Heads, 5, 0, false).unwrap();
        },
        false,
    );
    agree("qwen2", &again, &written, 0.0);
}

/// With a norm between passes, the second pass is a network whose embeddings are the normalised stream of the first.
#[test]
fn the_final_norm_is_applied_between_loop_iterations() {
    let golden = golden("qwen2");
    let tokens: Vec<u32> = prompt("qwen2").into_iter().fold(Vec::new(), |mut all, token| {
        if !all.contains(&token) {
            all.push(token);
        }
        all
    });
    assert!(tokens.len() > 20);
    let first = Network::same(&golden);
    let (hidden, vocab) = (first.arch.hidden_size, first.arch.vocab_size);
    let weight = {
        let id = first.tensors.find("model.norm.weight").unwrap();
        let bytes = &first.tensors.stored(id).unwrap().bytes;
        let values = bytes
            .chunks_exact(2)
            .map(|two| half::f16::from_le_bytes([two[0], two[1]]).to_f64());
        values.collect::<Vec<_>>()
    };
    let eps = first.arch.rms_norm_eps;
    let mut embeddings = vec![0f32; vocab * hidden];
    let mut sink = |position: usize, _: &[f32], layers: &[Vec<f32>]| {
        let stream = layers.last().unwrap();
        let mean = stream.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / hidden as f64;
        let row = &mut embeddings[tokens[position] as usize * hidden..][..hidden];
        for (out, (&v, w)) in row.iter_mut().zip(stream.iter().zip(&weight)) {
            *out = (f64::from(v) / (mean + eps).sqrt() * w) as f32;
        }
        Ok(())
    };
    let mut session = first.session(Place::Host);
    session.logits(&tokens, tokens.len(), true, &mut sink).unwrap();
    let bytes: Vec<u8> = embeddings.iter().flat_map(|v| v.to_le_bytes()).collect();
    let tied = first.arch.tie_word_embeddings;
    let mut second = Network::of(&golden, &|tensor| match tensor.0.as_str() {
        "model.embed_tokens.weight" => {
            let (name, dtype, shape, old) = tensor;
            let mut both = vec![(name, Dtype::F32, shape.clone(), bytes.clone())];
            if tied {
                both.push(("lm_head.weight".into(), dtype, shape, old));
            }
            both
        }
        _ => vec![tensor],
    });
    second.arch.tie_word_embeddings = false;
    let mut looped = Network::same(&golden);
    looped.arch.num_loops = 2;
    looped.arch.loop_final_norm = Some(true);
    for place in PLACES {
        let (mut a, mut b) = (looped.session(place), second.session(place));
        for prefill in [0, 9, tokens.len()] {
            let apart = apart(&logits(&mut a, &tokens, prefill), &logits(&mut b, &tokens, prefill));
            assert!(apart < 1e-5, "{place:?} {prefill}: they differ by {apart:e}");
        }
    }
}

#[test]
fn every_step_under_a_mask_is_right_and_a_wrong_list_is_found() {
    let golden = golden("llama_bias");
    let masked = Network::same(&golden).with(
        |mask| {
            (0..96)
                .filter(|i| i % 5 < 2)
                .for_each(|i| mask.set_unit(MaskAxis::Neurons, 0, i, false).unwrap());
            mask.set_unit(MaskAxis::Heads, 1, 1, false).unwrap();
        },
        false,
    );
    let plan = masked.plan(crate::device().max_binding());
    let kernels = kernels(&plan, ProgramKind::Decode);
    assert!(kernels.contains(&(Kernel::Matvec, true)) && kernels.contains(&(Kernel::MatvecGlu, true)));
    crate::all_pass(&crate::compare_steps(&plan, masked.tensors.clone()));
    // One neuron more than the mask has.
    let wrong = with_list(&plan, Kernel::MatvecGlu, |list| list[0] += 1);
    let [tried, right] = [&wrong, &plan].map(|plan| crate::subject(plan, masked.tensors.clone()));
    let outcome = crate::compare_subjects(&tried, &right);
    let names: Vec<_> = outcome.failed.iter().map(|failure| failure.name.as_str()).collect();
    assert_eq!(names, ["decode layer.00.ffn.gate_up"]);
}

/// The plan with another list of the first masked step of a kernel.
pub(super) fn with_list(plan: &Plan, kernel: Kernel, change: impl FnOnce(&mut Vec<u32>)) -> Plan {
    let steps = crate::selected(plan, ProgramKind::Decode);
    let (step, _) = steps
        .iter()
        .find(|(step, resolved)| step.op.kernel() == kernel && resolved.masked)
        .unwrap();
    let list = step.masked.unwrap().list;
    let mut selection = (*plan.selection).clone();
    let mut contents = selection.contents.iter_mut();
    let (_, words) = contents.find(|(buffer, _)| *buffer == list).unwrap();
    change(words);
    Plan {
        selection: Arc::new(selection),
        ..plan.clone()
    }
}
