//! argmax: the index of the largest value.

/// The index of the largest value, the lowest one of equals. `None` if there is no value or one is not a finite number.
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
    fn no_answer_from_nothing_or_nonsense() {
        assert_eq!(argmax(&[]), None);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(argmax(&[1.0, bad, 2.0]), None);
        }
    }
}
