//! Mixtures of experts whose choices are counted, and paged banks, which hold some of their experts at a time. This
//! file gives the rows of each slot. Executors decide which expert is in which slot.

use super::slices::Slice;
use crate::op::{ABSENT, BufferId, LOWEST, MatrixId, TABLE_HEADER};

/// A mixture whose choices are counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routed {
    /// Its layer.
    pub layer: usize,
    /// Its experts.
    pub experts: usize,
    /// How often each expert was chosen, one word for each.
    pub counts: BufferId,
}

/// An expert of a paged bank.
#[derive(Clone, Copy, Debug)]
pub struct ExpertSlices {
    /// Its index in the layer.
    pub expert: usize,
    /// The rows of its gate, up and down projections.
    pub slices: [Slice; 3],
}

/// A bank with fewer slots than experts. After the upload, its slots hold its first experts, in order.
#[derive(Clone, Debug)]
pub struct Paged {
    /// The tables of experts, one for each time that the layer is applied.
    pub tables: Vec<BufferId>,
    /// The matrices of gate and up projections, which can be the same.
    pub gate_up: [MatrixId; 2],
    /// The matrix of down projections.
    pub down: MatrixId,
    /// Experts that it holds at a time.
    pub slots: usize,
    /// All its experts.
    pub members: Vec<ExpertSlices>,
}

impl Paged {
    /// The rows of a slot: for each projection the matrix, the index of the run in its segments, and the index of the
    /// slice in [`ExpertSlices::slices`]. `runs`: the number of runs of a matrix.
    pub fn runs_of(&self, slot: usize, runs: impl Fn(MatrixId) -> usize) -> [(MatrixId, usize, usize); 3] {
        let [gate, up] = self.gate_up;
        let [gate_run, up_run] = match gate == up {
            true => {
                // The shared expert's rows may come first.
                let first = runs(gate).saturating_sub(2 * self.slots);
                [first + slot, first + self.slots + slot]
            }
            false => [slot; 2],
        };
        [(gate, gate_run, 0), (up, up_run, 1), (self.down, slot, 2)]
    }
}

/// The words of a table in which only the `active` experts may be chosen. `whole`: the table in which all may.
///
/// Other experts get the lowest bias. A token that takes more experts than are active still chooses some of them,
/// with weight 0. So they get the place of an active expert that the bank holds, and no other weights are read.
pub fn table_words(whole: &[u32], active: &dyn Fn(usize) -> bool) -> Vec<u32> {
    let (header, experts) = whole.split_at(TABLE_HEADER.min(whole.len()));
    let (experts, _) = experts.as_chunks::<2>();
    let mut places = experts.iter().enumerate().filter(|(expert, _)| active(*expert));
    let stand_in = places.find(|(_, [place, _])| *place != ABSENT);
    let stand_in = stand_in.map_or(ABSENT, |(_, [place, _])| *place);
    let words = experts
        .iter()
        .enumerate()
        .flat_map(|(expert, &pair)| match active(expert) {
            true => pair,
            false => [stand_in, LOWEST.to_bits()],
        });
    header.iter().copied().chain(words).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forbidden_experts_get_the_place_of_one_that_is_allowed_and_present() {
        let lowest = LOWEST.to_bits();
        let whole = [&[9; TABLE_HEADER][..], &[ABSENT, 1, 4, 2, 5, 3]].concat();
        let entries =
            |active: &[usize]| table_words(&whole, &|expert| active.contains(&expert))[TABLE_HEADER..].to_vec();
        assert_eq!(table_words(&whole, &|_| true), whole);
        assert_eq!(entries(&[0, 2]), [ABSENT, 1, 5, lowest, 5, 3]);
        assert_eq!(entries(&[0]), [ABSENT, 1, ABSENT, lowest, ABSENT, lowest]);
    }
}
