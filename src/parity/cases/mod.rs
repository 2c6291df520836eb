//! The kernel cases, one file for each family of operators: dimensions, and the graphs made of them.
//!
//! Dimensions are chosen for common faults: single rows, tails of a vector of 4, of a team and of a tile, positions on both
//! sides of the end of an attention block, folded grids, tokens of several sequences.

mod attention;
mod delta_net;
mod dtypes;
mod experts;
mod image;
mod linear;
mod moe;
mod norm;
mod sample;

use super::case::{Case, Table};

/// Every case, in a fixed order. Names are unique.
pub fn cases() -> Vec<Case> {
    let mut table = Table::default();
    linear::add_embed(&mut table);
    norm::add(&mut table);
    linear::add(&mut table);
    attention::add(&mut table);
    delta_net::add(&mut table);
    moe::add(&mut table);
    sample::add(&mut table);
    image::add(&mut table);
    table.cases
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Kernel;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_every_operator_has_cases() {
        let cases = cases();
        let names: BTreeSet<_> = cases.iter().map(Case::name).collect();
        assert_eq!(names.len(), cases.len());
        let operators = |masked: bool| -> BTreeSet<&str> {
            let kinds = cases.iter().map(|case| case.kind().split('.'));
            let of_variant = kinds.filter(|kind| kind.clone().any(|part| part == "masked") == masked);
            of_variant.filter_map(|mut kind| kind.next()).collect()
        };
        let (plain, masked) = (operators(false), operators(true));
        for spec in Kernel::ALL.iter().map(|kernel| kernel.spec()) {
            assert!(plain.contains(spec.name), "{} has no case", spec.name);
            assert_eq!(
                spec.has_mask(),
                masked.contains(spec.name),
                "masked cases of {}",
                spec.name
            );
        }
    }
}
