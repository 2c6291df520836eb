//! argmax: the index of the largest value.

/// The index of the largest value; of equal values the lowest index. `None` for no values, and if one of them is not finite.
pub fn argmax(values: &[f32]) -> Option<usize> {
    let mut best: Option<(usize, f32)> = None;
    for (index, &value) in values.iter().enumerate() {
        if !value.is_finite() {
            return None;
        }
        if best.is_none_or(|(_, largest)| value > largest) {
            best = Some((index, value));
        }
    }
    best.map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_of_equals_wins() {
        assert_eq!(argmax(&[-3.0, 7.0, 7.0, 1.0]), Some(1));
        assert_eq!(argmax(&[-0.0, 0.0]), Some(0));
        assert_eq!(argmax(&[f32::MIN]), Some(0));
    }

    #[test]
    fn no_values_and_values_that_are_not_finite_have_no_largest() {
        assert_eq!(argmax(&[]), None);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(argmax(&[1.0, bad, 2.0]), None);
        }
    }
}
