//! Tokens that run together: each gets the same bits as alone. Kernels are tested on the device, also for several sequences in
//! one run; [`crate::speculation`] tests whole programs.

use cmf_gpu::gpu::{Device, DeviceOptions};
use cmf_gpu::parity::{Case, Rig, Round, alone, cases};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The default device, and the same with teams that exchange values through workgroup memory.
fn devices() -> [Arc<Device>; 2] {
    let tree = crate::open(DeviceOptions {
        force_tree: true,
        ..DeviceOptions::default()
    });
    [crate::device(), tree]
}

fn same_alone(device: &Arc<Device>, case: &Case, rig: &Rig, round: &Round) {
    let result = alone(Some(device), rig, round).unwrap();
    assert_eq!(result, Ok(()), "{}, {:?}", case.name(), device.team());
}

/// The round with the most tokens.
fn widest(rig: &Rig) -> &Round {
    rig.rounds.iter().max_by_key(|round| round.tokens.len()).unwrap()
}

#[test]
fn products_side_by_side_are_those_of_single_tokens() {
    for device in devices() {
        let (mut compared, mut widths) = (0, BTreeSet::new());
        for case in cases().iter().filter(|case| case.kind().starts_with("matvec")) {
            let rig = case.rig(device.max_binding()).unwrap();
            let (round, width) = (widest(&rig), rig.graph.programs[0].steps[0].width);
            if width > 1 {
                assert_eq!(round.tokens.len(), width as usize, "{}", case.name());
                same_alone(&device, case, &rig, round);
                widths.insert(width);
                compared += 1;
            }
        }
        assert_eq!(widths, [2, 4, 8].into(), "{:?}", device.team());
        // Three operators, with and without a mask, in three widths, for every type of weights.
        let types = cases()
            .iter()
            .filter(|case| case.name().ends_with(" 33x96 bias") && case.kind().starts_with("matvec_add."))
            .count();
        assert!(types >= 8 && compared >= 18 * types, "{compared} of {types} types");
    }
}

#[test]
fn experts_of_tokens_together_are_those_of_single_tokens() {
    let is_of_experts = |case: &&Case| {
        let kinds = ["moe_glu.", "moe_matvec.", "moe_down."];
        kinds.iter().any(|kind| case.name().starts_with(kind))
    };
    for device in devices() {
        let mut compared = 0;
        for case in cases().iter().filter(is_of_experts) {
            let rig = case.rig(device.max_binding()).unwrap();
            assert!(widest(&rig).tokens.len() > 1, "{}", case.name());
            same_alone(&device, case, &rig, widest(&rig));
            compared += 1;
        }
        assert!(compared > 100, "{compared}");
    }
}

/// All operators that compute token by token; for several sequences, all their cases.
#[test]
fn tokens_of_several_sequences_are_those_of_single_tokens() {
    let device = crate::device();
    let (mut operators, mut of_slots) = (BTreeSet::new(), BTreeSet::new());
    for case in cases() {
        let operator = case.kind().split('.').next().unwrap_or_default().to_owned();
        let has_slots = case.name().contains("two slots");
        if operators.contains(&operator) && !has_slots {
            continue;
        }
        let rig = case.rig(device.max_binding()).unwrap();
        let rounds = rig.rounds.iter().filter(|round| (2..=17).contains(&round.tokens.len()));
        for round in rounds.filter(|_| !rig.rows.is_empty()) {
            same_alone(&device, &case, &rig, round);
            operators.insert(operator.clone());
            if has_slots && round.tokens.iter().any(|token| token.slot != 0) {
                of_slots.insert(operator.clone());
            }
        }
    }
    assert!(operators.len() > 20, "{operators:?}");
    let wanted = ["attn_block", "attn_chunk", "attn_merge", "delta_net", "rope"];
    assert_eq!(of_slots, wanted.map(str::to_owned).into());
}
