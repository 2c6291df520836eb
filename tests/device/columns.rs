//! A column that is decoded with others is what it is alone: to the bit, for every kernel that decodes several side by side.

use cmf_gpu::gpu::{Device, DeviceOptions};
use cmf_gpu::parity::{self, Case, Rig, Round, cases};
use cmf_gpu::program::{BufferId, Ctl, Extent};
use std::sync::Arc;

/// What each round leaves in each of the buffers that the rig writes.
fn outputs(device: &Arc<Device>, rig: &Rig, rounds: Vec<Round>) -> Vec<Vec<Vec<u32>>> {
    let count = rounds.len();
    let rig = Rig { rounds, ..rig.clone() };
    let all = parity::outputs(device, &rig).unwrap();
    all.chunks(all.len() / count).map(<[_]>::to_vec).collect()
}

/// The round of one column of another round, whose inputs hold a whole number of columns each.
fn alone(rig: &Rig, round: &Round, column: usize, columns: usize) -> Round {
    let column_of = |(buffer, words): &(BufferId, Vec<u32>)| {
        if *buffer == rig.plan.fixed.ctl {
            let ctl = Ctl {
                columns: 1,
                ..bytemuck::pod_read_unaligned(bytemuck::cast_slice(words))
            };
            return (*buffer, bytemuck::cast_slice(&[ctl]).to_vec());
        }
        assert!(words.len().is_multiple_of(columns));
        let stride = words.len() / columns;
        (*buffer, words[column * stride..][..stride].to_vec())
    };
    Round {
        name: String::new(),
        inputs: round.inputs.iter().map(column_of).collect(),
        extent: Extent { columns: 1, end: 1 },
    }
}

/// Every column of a matvec that is as wide as its round, against the kernel of one column.
fn each_column_alone(device: &Arc<Device>, case: &Case, rig: &Rig) {
    let round = &rig.rounds[0];
    let columns = rig.plan.programs[0].steps[0].columns as usize;
    let together = outputs(device, rig, vec![round.clone()]);
    let mut narrow = rig.clone();
    narrow.plan.programs[0]
        .steps
        .iter_mut()
        .for_each(|step| step.columns = 1);
    let single = (0..columns).map(|column| alone(rig, round, column, columns)).collect();
    for (column, single) in outputs(device, &narrow, single).iter().enumerate() {
        for (number, (alone, together)) in single.iter().zip(&together[0]).enumerate() {
            // The buffer ends with words that nothing writes; columns take whole units.
            let unset = alone[alone.len() - 1];
            let written = alone.iter().rposition(|&word| word != unset).unwrap() + 1;
            let found = &together[column * written.next_multiple_of(32)..][..written];
            assert!(
                found == &alone[..written],
                "{}: output {number} of column {column} of {columns} differs",
                case.name()
            );
        }
    }
}

fn wide_cases(device: &Arc<Device>) -> (usize, std::collections::BTreeSet<u32>) {
    let mut compared = 0;
    let mut widths = std::collections::BTreeSet::new();
    for case in cases().iter().filter(|case| case.kind().starts_with("matvec")) {
        let rig = case.rig(device.max_binding()).unwrap();
        let columns = rig.plan.programs[0].steps[0].columns;
        if columns > 1 {
            each_column_alone(device, case, &rig);
            widths.insert(columns);
            compared += 1;
        }
    }
    (compared, widths)
}

#[test]
fn products_side_by_side_are_those_of_single_columns() {
    let tree = crate::open(DeviceOptions {
        force_tree: true,
        ..DeviceOptions::default()
    });
    for device in [crate::device(), tree] {
        let (compared, widths) = wide_cases(&device);
        assert_eq!(widths, [2, 4, 8].into(), "{:?}", device.team());
        // Three kernels in three widths, for every type of weights.
        let types = cases()
            .iter()
            .filter(|case| case.name().ends_with(" 33x96 bias") && case.kind().starts_with("matvec_add."))
            .count();
        assert!(types >= 8 && compared >= 9 * types, "{compared} of {types} types");
    }
}
