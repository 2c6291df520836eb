//! Paged experts of types whose rows vary in size, of several types in a layer, and of other unusual banks.

use crate::paged::{Network, logits, prompt};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::error::Kind;
use cmf_gpu::source::Tensors;

/// Tokens that run in chunks; the rest are decoded.
const PREFILLS: [usize; 2] = [40, 21];

/// With every number of slots, the bits are the same as with all experts on the device.
fn same_bits(name: &str, network: &Network) {
    same_bits_of(name, &prompt(name), network);
}

fn same_bits_of(name: &str, tokens: &[u32], network: &Network) {
    let mut resident = network.paged(None);
    let wanted = PREFILLS.map(|prefill| logits(&mut resident, tokens, prefill).unwrap());
    // Experts that do not matter would not be tested.
    assert_ne!(wanted[0], vec![wanted[0][0]; wanted[0].len()]);
    let (experts, top_k) = network.experts();
    for slots in top_k..experts {
        let mut session = network.paged(Some(slots));
        assert!(!session.plan().graph.paged.is_empty());
        // A slot has room for the largest expert.
        if slots == top_k {
            assert!(session.plan().graph.weight_bytes() < resident.plan().graph.weight_bytes());
        }
        for (prefill, wanted) in PREFILLS.into_iter().zip(&wanted) {
            let found = logits(&mut session, tokens, prefill).unwrap();
            assert!(found == *wanted, "{name}, {slots} slots, {prefill} in chunks");
        }
        let counters = session.counters();
        assert!(counters.expert_misses > 0 && counters.expert_hits > 0, "{slots} slots");
        assert!(counters.paged_bytes > counters.expert_misses * 500, "{counters:?}");
    }
}

#[test]
fn experts_with_rows_of_varying_size_page() {
    for dtype in [Dtype::Vbit, Dtype::VbitRo, Dtype::Q1, Dtype::Q1s, Dtype::Q1t] {
        // Without a shared expert, with one in the bank, and with one in another matrix.
        same_bits("qwen3_moe", &Network::of("qwen3_moe", |_| dtype));
        same_bits("qwen2_moe", &Network::of("qwen2_moe", |_| dtype));
        let apart = Network::of("qwen3_5_moe", |projection| match projection.expert {
            Some(_) => dtype,
            None => Dtype::Q8Row,
        });
        same_bits("qwen3_5_moe", &apart);
    }
}

#[test]
fn experts_of_blocks_page() {
    let tokens: Vec<u32> = (0..50).map(|i| i * 37 % 128).collect();
    for dtype in Dtype::all().filter(|dtype| !dtype.has_encoder()) {
        same_bits_of(dtype.name(), &tokens, &Network::of_blocks(dtype));
    }
}

#[test]
fn experts_of_several_types_in_a_layer_page() {
    // Three groups. With few slots, one of them holds all of its experts.
    let kinds = [Dtype::Q1s, Dtype::Q8Row, Dtype::VbitRo];
    let by_expert = Network::of("qwen2_moe", |projection| kinds[projection.expert.unwrap_or(0) % 3]);
    let (experts, top_k) = by_expert.experts();
    let banks = |slots| by_expert.plan(Some(slots), 1 << 30).unwrap().graph.paged.len();
    let mixtures = by_expert.plan(None, 1 << 30).unwrap();
    assert!(mixtures.graph.paged.is_empty());
    assert_eq!((banks(top_k), banks(experts)), (0, 0), "3, 3 and 2 experts");
    let kinds = [Dtype::Q1s, Dtype::VbitRo];
    let by_expert = Network::of("qwen3_moe", |projection| kinds[projection.expert.unwrap_or(0) % 2]);
    let tokens = prompt("qwen3_moe");
    let mut resident = by_expert.paged(None);
    for slots in [2, 3] {
        let mut session = by_expert.paged(Some(slots));
        assert_eq!(session.plan().graph.paged.len(), 6, "two banks in each of three layers");
        for prefill in PREFILLS {
            let [found, wanted] = [&mut session, &mut resident].map(|s| logits(s, &tokens, prefill).unwrap());
            assert!(found == wanted, "{slots} slots, {prefill} in chunks");
        }
        assert!(session.counters().expert_misses > 0);
    }
    // Each projection of an expert has another type, so gate and up are in different matrices; layers differ.
    let by_part = Network::of("qwen3_moe", |projection| {
        match (projection.part, projection.layer % 2) {
            ("gate_proj", _) => Dtype::Vbit,
            ("up_proj", 0) => Dtype::Q4Block,
            ("up_proj", _) => Dtype::Q1t,
            _ => Dtype::Q1s,
        }
    });
    same_bits("qwen3_moe", &by_part);
}

/// Some experts have gate and up projections of two types, the others of one: banks of both kinds, of which one may hold all of
/// its experts, and a shared expert of either kind.
#[test]
fn experts_with_separate_gate_matrices_page_together_with_others() {
    type IsApart = fn(Option<usize>) -> bool;
    // With the number of experts of each kind.
    let apart: [(IsApart, [usize; 2]); 4] = [
        (|expert| expert.is_some_and(|expert| expert % 2 == 0), [4, 4]),
        (|expert| expert.is_none_or(|expert| expert < 3), [3, 5]),
        (|expert| expert.is_none_or(|expert| expert >= 3), [5, 3]),
        (|expert| expert != Some(7), [7, 1]),
    ];
    for (is_apart, members_of) in apart {
        let network = Network::of("qwen2_moe", |projection| match projection.part {
            "gate_proj" if is_apart(projection.expert) => Dtype::Vbit,
            _ => Dtype::Q8Row,
        });
        let tokens = prompt("qwen2_moe");
        let mut resident = network.paged(None);
        let wanted = PREFILLS.map(|prefill| logits(&mut resident, &tokens, prefill).unwrap());
        for slots in 3..members_of[0].max(members_of[1]) {
            let mut session = network.paged(Some(slots));
            // Both kinds in each of two layers.
            let banks = &session.plan().graph.paged;
            let members = |of_one: bool| -> Vec<usize> {
                let banks = banks
                    .iter()
                    .filter(|bank| (bank.gate_up[0] == bank.gate_up[1]) == of_one);
                banks.map(|bank| bank.members.len()).collect()
            };
            let wanted_members = members_of.map(|members| match members > slots {
                true => vec![members; 2],
                false => Vec::new(),
            });
            assert_eq!([members(false), members(true)], wanted_members, "{slots} slots");
            for (prefill, wanted) in PREFILLS.into_iter().zip(&wanted) {
                let found = logits(&mut session, &tokens, prefill).unwrap();
                assert!(found == *wanted, "{members_of:?}, {slots} slots, {prefill} in chunks");
            }
            assert!(session.counters().expert_misses > 0);
        }
    }
}

#[test]
fn banks_in_several_segments_page() {
    // With two types, gates are in a matrix of their own.
    let types = [Dtype::VbitRo, Dtype::Q1s, Dtype::Q1t, Dtype::Q82f].map(|dtype| [dtype; 2]);
    for [dtype, gate] in types
        .into_iter()
        .chain([[Dtype::Bf16, Dtype::F16], [Dtype::VbitRo, Dtype::F16]])
    {
        let network = Network::of("qwen3_moe", |projection| match projection.part {
            "gate_proj" => gate,
            _ => dtype,
        });
        let tokens = prompt("qwen3_moe");
        let mut resident = network.paged(None);
        let mut session = network.session(network.plan(Some(7), 33_000).unwrap());
        let banks = session.plan().graph.paged.clone();
        let segments = |id: usize| session.plan().graph.matrices[id].segments.len();
        let mut gates_and_ups = banks.iter().flat_map(|bank| bank.gate_up);
        let is_cut = gates_and_ups.any(|matrix| segments(matrix) > 1);
        assert!(is_cut, "{} and {}", gate.name(), dtype.name());
        for prefill in PREFILLS {
            let [found, wanted] = [&mut session, &mut resident].map(|s| logits(s, &tokens, prefill).unwrap());
            assert!(found == wanted, "{}, {prefill} in chunks", dtype.name());
        }
        assert!(session.counters().expert_misses > 0);
    }
}

/// In a network that is applied twice, a layer's experts are in the same slots both times.
#[test]
fn experts_of_looped_layers_page() {
    let mut network = Network::of("qwen3_moe", |_| Dtype::Q1s);
    network.arch.num_loops = 2;
    same_bits("qwen3_moe", &network);
    let plan = network.plan(Some(2), 1 << 30).unwrap();
    assert_eq!(plan.graph.paged.len(), 3);
    assert!(plan.graph.paged.iter().all(|bank| bank.tables.len() == 2));
}

/// A chunk of a prompt needs every expert, with slots for those of one token.
#[test]
fn a_chunk_that_needs_all_experts_gets_them_in_several_fetches() {
    let network = Network::of("qwen3_moe", |_| Dtype::Vbit);
    let (experts, top_k) = network.experts();
    let tokens: Vec<u32> = prompt("qwen3_moe").into_iter().take(40).collect();
    let mut session = network.paged(Some(top_k));
    let (found, wanted) = (
        logits(&mut session, &tokens, 16).unwrap(),
        logits(&mut network.paged(None), &tokens, 16).unwrap(),
    );
    assert!(found == wanted);
    let mut fresh = network.paged(Some(top_k));
    logits(&mut fresh, &tokens[..16], 16).unwrap();
    let all = fresh.route_counts().unwrap();
    assert!(
        all.values().any(|counts| counts.iter().all(|&count| count > 0)),
        "{all:?}"
    );
    let counters = fresh.counters();
    let wanted: usize = all
        .values()
        .map(|counts| counts.iter().filter(|&&count| count > 0).count())
        .sum();
    assert_eq!(counters.expert_hits + counters.expert_misses, wanted as u64);
    assert!(counters.expert_misses as usize >= wanted - top_k * all.len() && experts > top_k);
}

#[test]
fn an_expert_that_cannot_be_read_is_an_error() {
    for dtype in [Dtype::Q1s, Dtype::F16] {
        let network = Network::of("qwen3_moe", |_| dtype);
        let tokens = prompt("qwen3_moe");
        let wanted = logits(&mut network.paged(None), &tokens, 21).unwrap();
        let mut session = network.paged(Some(3));
        // Each projection, of an expert that is on the device at first and of others.
        for name in [
            "model.layers.1.mlp.experts.0.gate_proj.weight",
            "model.layers.2.mlp.experts.6.up_proj.weight",
            "model.layers.3.mlp.experts.7.down_proj.weight",
        ] {
            *network.tensors.broken.lock().unwrap() = network.tensors.find(name);
            session.clear();
            let err = logits(&mut session, &tokens, 21).unwrap_err();
            assert_eq!(err.kind, Kind::Io, "{err:?}");
            *network.tensors.broken.lock().unwrap() = None;
            session.clear();
            assert!(logits(&mut session, &tokens, 21).unwrap() == wanted, "after {name}");
        }
    }
}

/// Replaced tensors make new banks, larger or smaller, and empty their slots.
#[test]
fn paged_experts_can_be_replaced() {
    let tokens = prompt("qwen3_moe");
    // The same type as the first, with more in each row.
    let more = Network::richer("qwen3_moe", 2, |_| Dtype::Q1s);
    let [first, second] = [Dtype::Q1s, Dtype::Vbit].map(|dtype| Network::of("qwen3_moe", |_| dtype));
    let networks = [first, second, more];
    let wanted = networks
        .iter()
        .map(|network| logits(&mut network.paged(None), &tokens, 21).unwrap());
    let wanted: Vec<_> = wanted.collect();
    assert!(wanted[0] != wanted[1] && wanted[0] != wanted[2]);
    let changed = networks[0].experts_tensors();
    let mut session = networks[0].paged(Some(3));
    for next in [0, 1, 0, 2, 0] {
        let network = &networks[next];
        let plan = network.plan(Some(3), crate::device().max_binding()).unwrap();
        session.replace(plan, network.tensors.clone(), &changed).unwrap();
        for _ in 0..2 {
            session.clear();
            assert!(logits(&mut session, &tokens, 21).unwrap() == wanted[next], "{next}");
        }
    }
}

/// Experts that were fetched before the one that failed are on the device and known to be there.
#[test]
fn after_a_fetch_that_failed_halfway_every_token_is_right() {
    let network = Network::of("qwen3_moe", |_| Dtype::Q8Row);
    let tokens = prompt("qwen3_moe");
    let mut resident = network.paged(None);
    let mut alone = |token: u32| {
        resident.clear();
        logits(&mut resident, &[token], 0).unwrap()
    };
    let wanted: Vec<_> = tokens.iter().map(|&token| alone(token)).collect();
    let mut failures = 0;
    for expert in 0..8 {
        for slots in [4, 6] {
            let mut session = network.paged(Some(slots));
            let name = format!("model.layers.1.mlp.experts.{expert}.down_proj.weight");
            *network.tensors.broken.lock().unwrap() = network.tensors.find(&name);
            failures += usize::from(logits(&mut session, &tokens[..16], 16).is_err());
            *network.tensors.broken.lock().unwrap() = None;
            for at in (0..4).map(|i| (3 * expert + i) % tokens.len()) {
                session.clear();
                let found = logits(&mut session, &tokens[at..=at], 0).unwrap();
                assert!(found == wanted[at], "expert {expert}, {slots} slots, token {at}");
            }
        }
    }
    assert!(failures >= 4, "{failures} failures");
}

/// A layer with no more experts than slots keeps all of them.
#[test]
fn layers_with_fewer_experts_stay_as_they_are() {
    // The first mixture has 5 of 8 experts, the second 3.
    let kept = |layer: &str| match layer {
        "1" => 5,
        "2" => 3,
        _ => 8,
    };
    let network = Network::changed(
        "qwen3_moe",
        |_| Dtype::VbitRo,
        |(name, dtype, shape, bytes)| {
            let parts: Vec<&str> = name.split('.').collect();
            let left = match parts[..] {
                [_, _, layer, "mlp", "experts", expert, ..] if expert.parse::<u64>().unwrap() >= kept(layer) => {
                    return None;
                }
                [_, _, layer, "mlp", "gate", "weight"] => kept(layer),
                _ => return Some((name, dtype, shape, bytes)),
            };
            let bytes = bytes[..(left * shape[1] * 2) as usize].to_vec();
            Some((name, dtype, vec![left, shape[1]], bytes))
        },
    );
    let tokens = prompt("qwen3_moe");
    let mut resident = network.paged(None);
    for (slots, paged) in [(2, 3), (3, 2), (4, 2), (5, 1), (7, 1)] {
        let mut session = network.paged(Some(slots));
        assert_eq!(session.plan().graph.paged.len(), paged);
        for prefill in PREFILLS {
            let [found, wanted] = [&mut session, &mut resident].map(|s| logits(s, &tokens, prefill).unwrap());
            assert!(found == wanted, "{slots} slots, {prefill} in chunks");
        }
    }
}
