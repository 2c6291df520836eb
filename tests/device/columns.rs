//! A column that is decoded with others is what it is alone: to the bit, for every kernel that decodes several side by side.

use cmf_gpu::gpu::{Device, DeviceOptions};
use cmf_gpu::kernel::Op;
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
        // A list is for all columns.
        if rig.plan.buffers[*buffer].label == "list" {
            return (*buffer, words.clone());
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
        // Six kernels in three widths, for every type of weights.
        let types = cases()
            .iter()
            .filter(|case| case.name().ends_with(" 33x96 bias") && case.kind().starts_with("matvec_add."))
            .count();
        assert!(types >= 8 && compared >= 18 * types, "{compared} of {types} types");
    }
}

/// Where what a column has lies in a buffer: what precedes all columns, and how many words each takes.
struct Place {
    before: usize,
    each: usize,
}

/// The experts of columns that are decoded together, against those of each alone: routes, activations, streams.
fn each_column_of_experts(device: &Arc<Device>, case: &Case, rig: &Rig) -> usize {
    let together = rig.rounds.iter().max_by_key(|round| round.extent.columns).unwrap();
    let columns = together.extent.columns as usize;
    let op = rig.plan.programs[0].steps[0].op;
    let slots = match op {
        Op::MoeGlu(p) => p.first_shared as usize,
        Op::MoeMatvec(p) => p.slots as usize,
        Op::MoeDown(p) => p.slots as usize,
        other => panic!("{other:?}"),
    };
    let labelled = |buffer: BufferId| rig.plan.buffers[buffer].label.as_str();
    // What comes before the columns' words of an input; nothing in all but three.
    let before = |label: &str| match (op, label) {
        (Op::MoeMatvec(p), "y") => p.y_at as usize * 4,
        (Op::MoeDown(p), "router") => p.routes_at as usize,
        (Op::MoeDown(p), "x") => p.x_at as usize * 32,
        _ => 0,
    };
    let input = |column: usize, buffer: BufferId, words: &[u32]| -> Vec<u32> {
        if buffer == rig.plan.fixed.ctl || labelled(buffer) == "experts" {
            return words.to_vec();
        }
        let (head, all) = words.split_at(before(labelled(buffer)));
        assert!(all.len().is_multiple_of(columns));
        let each = all.len() / columns;
        [head, &all[column * each..][..each]].concat()
    };
    let single = |column: usize| Round {
        name: String::new(),
        inputs: (together.inputs.iter())
            .map(|(buffer, words)| (*buffer, input(column, *buffer, words)))
            .collect(),
        extent: Extent { columns: 1, end: 1 },
    };
    let rounds = [vec![together.clone()], (0..columns).map(single).collect()].concat();
    let all = outputs(device, rig, rounds);
    // Routes, then activations; or the stream, what the next map reads of it, and sums of its squares.
    let places: Vec<Vec<Place>> = match op {
        Op::MoeGlu(p) => {
            let act = |before: u32, each: usize| Place {
                before: before as usize,
                each,
            };
            let slots_of = act(p.y_at, slots * p.y_stride as usize);
            let shared = (p.shared_outputs != 0).then(|| act(0, p.shared_stride as usize));
            vec![
                vec![act(p.routes_at, 2 * slots)],
                shared.into_iter().chain([slots_of]).collect(),
            ]
        }
        Op::MoeMatvec(p) => {
            let routes = (slots != 0).then_some(Place {
                before: p.routes_at as usize,
                each: 2 * slots,
            });
            let y = Place {
                before: p.y_at as usize * 4,
                each: slots.max(1) * p.y_stride as usize * 4,
            };
            vec![routes.into_iter().collect(), vec![y]]
        }
        Op::MoeDown(p) => {
            let (len, sums) = (p.y_stride as usize * 4, (p.y_stride as usize).next_multiple_of(32));
            let place = |each| vec![Place { before: 0, each }];
            vec![place(len), place(len), place(sums)]
        }
        _ => Vec::new(),
    };
    let (together, singles) = all.split_first().unwrap();
    assert_eq!((together.len(), singles.len()), (places.len(), columns));
    for (column, single) in singles.iter().enumerate() {
        for (number, places) in places.iter().enumerate() {
            for place in places {
                let alone = &single[number][place.before..][..place.each];
                let found = &together[number][place.before + column * place.each..][..place.each];
                assert!(
                    found == alone,
                    "{}: output {number} of column {column} of {columns} differs",
                    case.name()
                );
            }
        }
    }
    columns
}

#[test]
fn experts_of_columns_together_are_those_of_single_columns() {
    let tree = crate::open(DeviceOptions {
        force_tree: true,
        ..DeviceOptions::default()
    });
    let is_of_experts = |case: &&Case| {
        ["moe_glu.", "moe_matvec.", "moe_down."]
            .iter()
            .any(|kind| case.name().starts_with(kind))
    };
    for device in [crate::device(), tree] {
        let mut compared = 0;
        for case in cases().iter().filter(is_of_experts) {
            let rig = case.rig(device.max_binding()).unwrap();
            let columns = each_column_of_experts(&device, case, &rig);
            assert!(columns > 1, "{}", case.name());
            compared += 1;
        }
        assert!(compared > 100, "{compared}");
    }
}
