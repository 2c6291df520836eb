//! Masks of attention and of looped networks, compared with networks without the masked parts: the same bits, and the same
//! bytes read.

use crate::masks::{
    Network, Tensor, agree, gathered, golden, greedy, logits, looped, mask_like, prompt, with_list, without,
};
use crate::{PLACES, Place};
use cmf_gpu::lm::run::Session;
use cmf_gpu::lm::{Plan, ProgramKind};
use cmf_gpu::op::{Kernel, LIST_HEADER};
use cmf_gpu::source::{Mask, MaskAxis, MaskShape};

/// The neurons and query heads that a layer keeps, and the key-value heads that these read.
#[derive(Clone)]
struct Kept {
    neurons: Vec<usize>,
    heads: Vec<usize>,
    kv_heads: Vec<usize>,
}

/// Sizes of a golden model.
struct Sizes {
    neurons: usize,
    heads: usize,
    head_dim: usize,
    /// Rows of the query projection per head; with a gate there are more rows than elements of a head.
    query: usize,
}

impl Sizes {
    fn all(&self, heads: &[usize], kv_heads: &[usize]) -> Option<Kept> {
        Some(Kept {
            neurons: (0..self.neurons).collect(),
            heads: heads.to_vec(),
            kv_heads: kv_heads.to_vec(),
        })
    }
}

/// The network with only these neurons and heads, without keys and values that nothing reads, and without the layers that
/// have none of them.
fn cut(network: &Network, sizes: &Sizes, kept: &[Option<Kept>]) -> Network {
    let number = |layer: usize| kept[..layer].iter().filter(|kept| kept.is_some()).count();
    let mut small = network.changed(&|mut tensor: Tensor| {
        let Some(rest) = tensor.0.strip_prefix("model.layers.") else {
            return vec![tensor];
        };
        let (layer, part) = rest.split_once('.').unwrap();
        let layer: usize = layer.parse().unwrap();
        let part = part.to_owned();
        let Some(kept) = &kept[layer] else {
            return Vec::new();
        };
        tensor.0 = format!("model.layers.{}.{part}", number(layer));
        let elements =
            |heads: &[usize], per: usize| -> Vec<usize> { heads.iter().flat_map(|h| h * per..(h + 1) * per).collect() };
        let queries = elements(&kept.heads, sizes.query);
        let outputs = elements(&kept.heads, sizes.head_dim);
        let shared = elements(&kept.kv_heads, sizes.head_dim);
        let all: Vec<usize> = (0..*tensor.2.last().unwrap() as usize).collect();
        let rows: Vec<usize> = (0..tensor.2[0] as usize).collect();
        vec![match part.as_str() {
            "mlp.gate_proj.weight" | "mlp.up_proj.weight" => gathered(tensor, &kept.neurons, &all),
            "mlp.gate_proj.bias" | "mlp.up_proj.bias" => gathered(tensor, &[0], &kept.neurons),
            "mlp.down_proj.weight" => gathered(tensor, &rows, &kept.neurons),
            "self_attn.q_proj.weight" => gathered(tensor, &queries, &all),
            "self_attn.q_proj.bias" => gathered(tensor, &[0], &queries),
            "self_attn.k_proj.weight" | "self_attn.v_proj.weight" => gathered(tensor, &shared, &all),
            "self_attn.k_proj.bias" | "self_attn.v_proj.bias" => gathered(tensor, &[0], &shared),
            "self_attn.o_proj.weight" => gathered(tensor, &rows, &outputs),
            _ => tensor,
        }]
    });
    let left: Vec<_> = kept.iter().flatten().collect();
    let types = small
        .arch
        .layer_types
        .iter()
        .zip(kept)
        .filter(|(_, kept)| kept.is_some());
    small.arch.layer_types = types.map(|(of, _)| *of).collect();
    small.arch.num_layers = left.len();
    small.arch.attention_heads_per_layer = Some(left.iter().map(|kept| kept.heads.len()).collect());
    small.arch.kv_heads_per_layer = Some(left.iter().map(|kept| kept.kv_heads.len()).collect());
    small
}

/// A mask of everything that is not in `kept`.
fn masks(mask: &mut Mask, sizes: &Sizes, kept: &[Option<Kept>]) {
    let kept: Vec<_> = kept
        .iter()
        .map(|kept| kept.as_ref().map(|kept| (kept.neurons.clone(), kept.heads.clone())))
        .collect();
    mask_like(mask, &kept, sizes.neurons, sizes.heads);
}

/// The network with one more mask, of this name.
fn with_task(mut network: Network, name: &str, edit: impl FnOnce(&mut Mask)) -> Network {
    let id = network.masks.masks.len() as u32;
    let mut mask = Mask::open(id, name, MaskShape::of(&network.arch, false));
    edit(&mut mask);
    network.masks.masks.push(mask);
    network
}

/// Bytes that the runs of an answer of 24 tokens read: of weights in each run, and of caches in all runs.
fn bytes_read(session: &mut Session, tokens: &[u32]) -> [u64; 2] {
    greedy(session, tokens);
    let (runs, cost) = session.decode_cost();
    assert!(runs > 8);
    [cost.weight_bytes / runs, cost.kv_bytes]
}

const QWEN3: Sizes = Sizes {
    neurons: 288,
    heads: 4,
    head_dim: 64,
    query: 64,
};

#[test]
fn masked_heads_read_no_caches_and_keys_without_queries_are_not_computed() {
    let golden = golden("qwen3");
    // All heads of one key-value head; one head of each; a single head; pairs of heads of four.
    let mut kept = [
        QWEN3.all(&[0, 1], &[0]),
        QWEN3.all(&[1, 2], &[0, 1]),
        QWEN3.all(&[3], &[1]),
    ];
    for (kept, off) in kept.iter_mut().flatten().zip([2, 5]) {
        kept.neurons = without(288, |i| i / 32 % off == 1);
    }
    let masked = Network::same(&golden).with(|mask| masks(mask, &QWEN3, &kept), false);
    let small = cut(&Network::same(&golden), &QWEN3, &kept);
    agree("qwen3", &masked, &small, 0.0);
    // A chunk also reads only the rest.
    let limit = crate::device().max_binding();
    let [chunk, of_small] =
        [&masked, &small].map(|network| network.plan(limit).weight_bytes_read(ProgramKind::Prefill));
    assert_eq!(chunk, of_small);
    assert!(
        chunk
            < Network::same(&golden)
                .plan(limit)
                .weight_bytes_read(ProgramKind::Prefill)
    );

    let tokens = prompt("qwen3");
    for place in PLACES {
        let [masked, small] = [&masked, &small].map(|network| bytes_read(&mut network.session(place), &tokens));
        assert_eq!(masked, small, "{place:?}");
    }
    // Keys and values in f32 of one, two and one head, at every position that a run saw.
    let mut session = masked.session(Place::Device);
    let [_, read] = bytes_read(&mut session, &tokens);
    let seen: u64 = (1..=session.decode_cost().0).map(|run| tokens.len() as u64 + run).sum();
    assert_eq!(read, seen * (1 + 2 + 1) * 64 * 2 * 4);
}

#[test]
fn heads_are_left_out_of_gated_normed_biased_and_windowed_attention() {
    // A gate follows every query head; the layers between are recurrent.
    let gated = golden("qwen3_5");
    let sizes = Sizes {
        neurons: 160,
        heads: 4,
        head_dim: 64,
        query: 128,
    };
    let whole = sizes.all(&[0, 1, 2, 3], &[0, 1]);
    let network = Network::same(&gated);
    let recurrent: Vec<bool> = network
        .arch
        .layer_types
        .iter()
        .map(|of| format!("{of:?}").contains("Linear"))
        .collect();
    let some = [sizes.all(&[2, 3], &[1]), sizes.all(&[0, 3], &[0, 1])];
    let mut others = some.iter().cycle();
    let kept: Vec<_> = recurrent
        .iter()
        .map(|&recurrent| {
            if recurrent {
                whole.clone()
            } else {
                others.next().unwrap().clone()
            }
        })
        .collect();
    assert!(recurrent.contains(&true) && recurrent.contains(&false));
    let masked = Network::same(&gated).with(|mask| masks(mask, &sizes, &kept), false);
    agree("qwen3_5", &masked, &cut(&network, &sizes, &kept), 0.0);

    // Biases of keys, values and sums; every query head has its own keys.
    let biased = golden("llama_bias");
    let sizes = Sizes {
        neurons: 96,
        heads: 2,
        head_dim: 32,
        query: 32,
    };
    let kept = [sizes.all(&[1], &[1]), sizes.all(&[0], &[0])];
    let masked = Network::same(&biased).with(|mask| masks(mask, &sizes, &kept), false);
    agree(
        "llama_bias",
        &masked,
        &cut(&Network::same(&biased), &sizes, &kept),
        1e-5,
    );

    // Windows and soft caps; heads of 48 share groups of 32 columns.
    let capped = golden("gemma2");
    let sizes = Sizes {
        neurons: 352,
        heads: 4,
        head_dim: 48,
        query: 48,
    };
    let kept = [
        sizes.all(&[0, 1], &[0]),
        sizes.all(&[1, 2], &[0, 1]),
        sizes.all(&[2, 3], &[1]),
        sizes.all(&[3], &[1]),
    ];
    let masked = Network::same(&capped).with(|mask| masks(mask, &sizes, &kept), false);
    agree("gemma2", &masked, &cut(&Network::same(&capped), &sizes, &kept), 1e-5);
}

#[test]
fn masks_of_passes_are_cuts_of_layers_that_exist_twice() {
    let golden = golden("qwen2");
    let sizes = Sizes {
        neurons: 160,
        heads: 3,
        head_dim: 32,
        query: 32,
    };
    let neurons = |off: &[usize]| without(160, |i| off.contains(&(i / 32)));
    let kept = |off: &[usize], heads: &[usize]| {
        Some(Kept {
            neurons: neurons(off),
            heads: heads.to_vec(),
            kv_heads: vec![0],
        })
    };
    // One mask per iteration; the second layer is off in both.
    let kept = [
        kept(&[1, 2], &[0, 2]),
        None,
        kept(&[], &[1]),
        kept(&[4], &[0, 1, 2]),
        None,
        kept(&[0, 3], &[2]),
    ];
    let [looped, unrolled] = looped(&golden);
    let masked = looped.with(
        |mask| {
            for (invocation, kept) in kept.iter().enumerate() {
                let Some(kept) = kept else {
                    mask.set_layer(invocation % 3, false).unwrap();
                    continue;
                };
                for i in without(160, |i| kept.neurons.contains(&i)) {
                    mask.set_unit(MaskAxis::Neurons, invocation, i, false).unwrap();
                }
                for i in without(3, |i| kept.heads.contains(&i)) {
                    mask.set_unit(MaskAxis::Heads, invocation, i, false).unwrap();
                }
            }
        },
        true,
    );
    agree("qwen2", &masked, &cut(&unrolled, &sizes, &kept), 0.0);
}

#[test]
fn tasks_take_turns_on_one_model_and_each_equals_its_cut_network() {
    let golden = golden("qwen3");
    let whole = QWEN3.all(&[0, 1, 2, 3], &[0, 1]);
    let heads = [QWEN3.all(&[2, 3], &[1]), whole.clone(), QWEN3.all(&[0], &[0])];
    let layers = [whole.clone(), None, whole.clone()];
    let mut network = Network::same(&golden);
    let tasks = [heads, layers];
    for (name, kept) in ["heads", "layers"].into_iter().zip(&tasks) {
        network = with_task(network, name, |mask| masks(mask, &QWEN3, kept));
    }
    network = with_task(network, "open", |_| {});
    let tokens = prompt("qwen3");
    let plain = Network::same(&golden);
    let wanted = tasks.iter().map(|kept| cut(&plain, &QWEN3, kept));
    let wanted: Vec<_> = wanted
        .chain([Network::same(&golden)])
        .map(|network| logits(&mut network.session(Place::Device), &tokens, 9))
        .collect();
    let full = plain.plan(crate::device().max_binding());

    let mut session = network.session(Place::Device);
    let plan = session.plan().clone();
    let plans: Vec<Plan> = network
        .masks
        .masks
        .iter()
        .map(|mask| plan.with_mask(Some(mask)).unwrap())
        .collect();
    // An open mask costs the same as none.
    assert_eq!(plans[2].cost().programs, full.cost().programs);
    let before = session.counters();
    for turn in [0, 1, 2, 0, 2, 1] {
        session.select(plans[turn].clone()).unwrap();
        assert_eq!(logits(&mut session, &tokens, 9), wanted[turn], "turn {turn}");
    }
    let after = session.counters().since(&before);
    let moved = [after.upload_bytes, after.pipelines_compiled, after.bind_groups_created];
    assert_eq!(moved, [0; 3]);
    // A layer that is off reads nothing.
    let reads = |plan: &Plan| {
        let reads = plan.graph.kv_reads(plan.program(ProgramKind::Decode), &plan.selection);
        reads.iter().map(|read| read.position).sum::<u64>()
    };
    assert_eq!(
        [reads(&full), reads(&plans[1]), reads(&plans[0])],
        [6, 4, 4].map(|heads| heads * 64 * 2 * 4)
    );
}

#[test]
fn a_mask_that_masks_nothing_changes_no_bit_and_no_counter() {
    let golden = golden("qwen3");
    let tokens = prompt("qwen3");
    let runs = [Network::same(&golden), Network::same(&golden).with(|_| {}, false)].map(|network| {
        let mut session = network.session(Place::Device);
        let logits = logits(&mut session, &tokens, 9);
        greedy(&mut session, &tokens);
        let mut counters = session.counters();
        // The first one compiles the pipelines, which the device keeps.
        (counters.pipelines_compiled, counters.pipeline_us) = (0, 0);
        // The number of steps in a submission depends on time.
        (counters.submits, counters.passes, counters.readback_bytes) = (0, 0, 0);
        (logits, counters)
    });
    let [(plain, counted), (open, counted_open)] = runs;
    assert!(plain == open);
    assert_eq!(counted, counted_open);
}

/// A wrong list of heads is found in the steps that use it, and in no other step.
#[test]
fn a_wrong_list_of_heads_is_found() {
    let golden = golden("qwen3");
    let kept = [
        QWEN3.all(&[0, 1], &[0]),
        QWEN3.all(&[1, 2, 3], &[0, 1]),
        QWEN3.all(&[3], &[1]),
    ];
    let masked = Network::same(&golden).with(|mask| masks(mask, &QWEN3, &kept), false);
    let plan = masked.plan(crate::device().max_binding());
    crate::all_pass(&crate::compare_steps(&plan, masked.tensors.clone()));
    // Another head first, which is not attended.
    let wrong = with_list(&plan, Kernel::AttnBlock, |list| list[LIST_HEADER as usize..].reverse());
    let [tried, right] = [&wrong, &plan].map(|plan| crate::subject(plan, masked.tensors.clone()));
    let outcome = crate::compare_subjects(&tried, &right);
    let mut names: Vec<_> = outcome.failed.iter().map(|failure| failure.name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "decode layer.00.attn.block",
            "decode layer.00.attn.merge",
            "prefill layer.00.attn.chunk"
        ]
    );
}
