//! rope: rotary position embedding of one head.

/// Rotates the pairs (i, i + rot/2) of `head` by the angles whose cosines and sines are given; rot = 2·cos.len().
///
/// `cos` and `sin` have the same length, at most half of the head. Elements from rot on stay as they are.
pub fn rotate_half(head: &mut [f64], cos: &[f32], sin: &[f32]) {
    assert_eq!(cos.len(), sin.len(), "one cosine and one sine per pair");
    let (first, second) = head[..2 * cos.len()].split_at_mut(cos.len());
    for (((a, b), &cos), &sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        let (cos, sin) = (f64::from(cos), f64::from(sin));
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

/// Rotates the pairs (2j, 2j + 1) of `head` by the angles whose cosines and sines `table` has in turns: cos 0, sin 0, cos 1, ...
/// Both slices have the same length.
pub fn rotate_pairs(head: &mut [f64], table: &[f32]) {
    assert_eq!(head.len(), table.len(), "one cosine and one sine per pair");
    for (pair, angle) in head.chunks_exact_mut(2).zip(table.chunks_exact(2)) {
        let (cos, sin) = (f64::from(angle[0]), f64::from(angle[1]));
        (pair[0], pair[1]) = (pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_of_an_interleaved_pair_are_neighbours() {
        let mut head = [1.0, 2.0, 3.0, 4.0];
        rotate_pairs(&mut head, &[0.0, 1.0, 1.0, 0.0]);
        assert_eq!(head, [-2.0, 1.0, 3.0, 4.0]);
    }

    #[test]
    fn elements_of_a_pair_are_half_of_the_rotated_ones_apart() {
        // A quarter turn of (1, 3), no turn of (2, 4); 5 and 6 are not rotated.
        let mut head = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        rotate_half(&mut head, &[0.0, 1.0], &[1.0, 0.0]);
        assert_eq!(head, [-3.0, 2.0, 1.0, 4.0, 5.0, 6.0]);
    }

    #[test]
    fn a_table_may_scale_as_well() {
        let mut head = [1.0, 2.0];
        rotate_half(&mut head, &[2.0], &[0.5]);
        assert_eq!(head, [1.0, 4.5]);
    }
}
