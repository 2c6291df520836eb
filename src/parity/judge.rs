//! Compares the words that a device left in a buffer with those of the reference.

use crate::graph::Step;
use crate::op::{Access, Bind, Binding, BufferId, Kv, Tolerance};
use half::f16;
use std::fmt;

/// The value of every word that a round does not set: a NaN as f32 and as two f16, unlike any that kernels compute.
pub(super) const UNSET: u32 = 0x7fc1_7fc1;

/// The elements of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Elements {
    F32,
    F16,
    /// Compared bit by bit.
    Words,
    /// A word, compared bit by bit, and an f32, in turns.
    Pairs,
}

impl Elements {
    /// The elements behind an operator's binding, which its WGSL type decides.
    pub fn of(binding: &Binding, kv: Kv) -> Elements {
        match (binding.name, binding.wgsl) {
            // Places and weights of experts.
            ("router" | "routes", _) => Elements::Pairs,
            (_, "array<f32>" | "array<vec4<f32>>") => Elements::F32,
            (_, "array<Kv4>") => match kv {
                Kv::F16 => Elements::F16,
                Kv::F32 => Elements::F32,
            },
            _ => Elements::Words,
        }
    }
}

/// A buffer that a step writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Output {
    pub buffer: BufferId,
    pub elements: Elements,
    pub tolerance: Tolerance,
}

/// The buffers that a step writes.
pub(super) fn outputs(step: &Step, kv: Kv) -> Vec<Output> {
    let declared = step.op.kernel().spec().bindings.iter().zip(&step.bindings);
    let output = |(binding, bind): (&Binding, &Bind)| match *bind {
        Bind::Buffer(buffer) if binding.access == Access::Write => Some(Output {
            buffer,
            elements: Elements::of(binding, kv),
            tolerance: step.op.tolerance(),
        }),
        _ => None,
    };
    declared.filter_map(output).collect()
}

/// Why a comparison fails. Indices count words.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Difference {
    /// The relative error, and the largest that passes.
    TooFar(f64, f64),
    /// The device's value is not a finite number.
    NotFinite(usize),
    /// The reference's value is not a finite number, so the case itself is wrong.
    BadReference(usize),
    /// The reference writes the word, and the device does not.
    Missing(usize),
    /// The device writes the word, and the reference does not.
    Unexpected(usize),
    /// Index, found and expected word.
    Word(usize, u32, u32),
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Difference::TooFar(error, limit) => write!(f, "relative error {error:.2e}, expected at most {limit:.0e}"),
            Difference::NotFinite(i) => write!(f, "word {i}: the device's value is not a finite number"),
            Difference::BadReference(i) => write!(f, "word {i}: the reference's value is not a finite number"),
            Difference::Missing(i) => write!(f, "word {i} is not written, expected a value"),
            Difference::Unexpected(i) => write!(f, "word {i} is written, expected it to stay as it was"),
            Difference::Word(i, found, expected) => write!(f, "word {i} is {found:#x}, expected {expected:#x}"),
        }
    }
}

/// Judges the words `found` on a device in a buffer that held `before` and where the reference left `expected`: the relative
/// L2 error over the words that either of them changed, or the first difference.
pub(super) fn judge(
    before: &[u32],
    found: &[u32],
    expected: &[u32],
    elements: Elements,
    tolerance: Tolerance,
) -> Result<f64, Difference> {
    let limit = match elements {
        Elements::F32 | Elements::Pairs => tolerance.limit(),
        Elements::F16 => Tolerance::Half.limit(),
        Elements::Words => 0.0,
    };
    let (mut difference, mut norm) = (0.0, 0.0);
    for (i, ((&before, &found), &expected)) in before.iter().zip(found).zip(expected).enumerate() {
        if before == expected && before == found {
            continue;
        }
        if before == UNSET && found == before {
            return Err(Difference::Missing(i));
        }
        if before == UNSET && expected == before {
            return Err(Difference::Unexpected(i));
        }
        let is_word = elements == Elements::Words || elements == Elements::Pairs && i % 2 == 0;
        if is_word && found != expected {
            return Err(Difference::Word(i, found, expected));
        }
        let half = |word: u32, shift: u32| f16::from_bits((word >> shift) as u16).to_f32();
        let values = match elements {
            _ if is_word => [None, None],
            Elements::F16 => [0, 16].map(|shift| Some((half(found, shift), half(expected, shift)))),
            _ => [Some((f32::from_bits(found), f32::from_bits(expected))), None],
        };
        for (found, expected) in values.into_iter().flatten() {
            if !expected.is_finite() {
                return Err(Difference::BadReference(i));
            }
            if !found.is_finite() {
                return Err(Difference::NotFinite(i));
            }
            difference += (f64::from(found) - f64::from(expected)).powi(2);
            norm += f64::from(expected).powi(2);
        }
    }
    let error = match (difference, norm) {
        (0.0, _) => 0.0,
        (_, 0.0) => f64::INFINITY,
        _ => (difference / norm).sqrt(),
    };
    match error <= limit {
        true => Ok(error),
        false => Err(Difference::TooFar(error, limit)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Kernel;

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn errors_are_relative_to_the_changed_words() {
        let before = bits(&[1e6, 0.0, 0.0]);
        let expected = bits(&[1e6, 3.0, 4.0]);
        let found = bits(&[1e6, 3.0, 4.001]);
        let judged = judge(&before, &found, &expected, Elements::F32, Tolerance::Summed);
        // The large element that neither side changed does not hide the error.
        assert!(
            matches!(judged, Err(Difference::TooFar(error, _)) if (error - 2e-4).abs() < 1e-6),
            "{judged:?}"
        );
        assert_eq!(
            judge(&before, &expected, &expected, Elements::F32, Tolerance::Exact),
            Ok(0.0)
        );
        let tiny = bits(&[1e6, 0.0, 1e-9]);
        assert!(judge(&before, &tiny, &before, Elements::F32, Tolerance::Half).is_err());
    }

    #[test]
    fn missing_and_unexpected_words_are_found() {
        let unset = [UNSET; 2];
        let one = [1f32.to_bits(), UNSET];
        let both = bits(&[1.0, 1.0]);
        for elements in [Elements::F32, Elements::F16, Elements::Words, Elements::Pairs] {
            let judged = |found: &[u32], expected: &[u32]| judge(&unset, found, expected, elements, Tolerance::Half);
            assert_eq!(judged(&one, &one), Ok(0.0));
            assert_eq!(judged(&one, &both), Err(Difference::Missing(1)));
            assert_eq!(judged(&both, &one), Err(Difference::Unexpected(1)));
        }
    }

    #[test]
    fn values_that_are_not_finite_fail() {
        let (nan, one) = (bits(&[f32::NAN]), bits(&[1.0]));
        let judged = |found: &[u32], expected: &[u32]| judge(&[0], found, expected, Elements::F32, Tolerance::Half);
        assert_eq!(judged(&nan, &one), Err(Difference::NotFinite(0)));
        assert_eq!(judged(&one, &nan), Err(Difference::BadReference(0)));
        assert_eq!(judged(&bits(&[f32::INFINITY]), &one), Err(Difference::NotFinite(0)));
    }

    #[test]
    fn halves_pairs_and_words_are_compared_by_their_own_rules() {
        let half = |value: f32| u32::from(f16::from_f32(value).to_bits());
        let pair = |low: f32, high: f32| [half(low) | half(high) << 16];
        let judged = |found: &[u32], elements| judge(&[0], found, &pair(1.0, 2.0), elements, Tolerance::Summed);
        assert_eq!(judged(&pair(1.0, 2.0), Elements::F16), Ok(0.0));
        assert!(judged(&pair(1.01, 2.0), Elements::F16).is_err());
        assert!(judged(&pair(1.0, 2.02), Elements::F16).is_err());
        let expected = pair(1.0, 2.0)[0];
        assert_eq!(
            judged(&[expected ^ 1], Elements::Words),
            Err(Difference::Word(0, expected ^ 1, expected))
        );
        let route = |place: u32, weight: f32| [place, weight.to_bits()];
        let judged = |found: &[u32]| judge(&[0; 2], found, &route(3, 0.5), Elements::Pairs, Tolerance::Summed);
        assert!(judged(&route(3, 0.500_000_1)).is_ok());
        assert_eq!(judged(&route(4, 0.5)), Err(Difference::Word(0, 4, 3)));
    }

    #[test]
    fn every_written_binding_has_elements_of_its_type() {
        for kernel in Kernel::ALL {
            let written = kernel.spec().bindings.iter().filter(|b| b.access == Access::Write);
            for binding in written {
                let has_floats = binding.wgsl.contains("f32") || binding.wgsl.contains("Kv4");
                let elements = Elements::of(binding, Kv::F16);
                assert_eq!(
                    has_floats,
                    matches!(elements, Elements::F32 | Elements::F16),
                    "{}: {binding:?}",
                    kernel.spec().name
                );
            }
        }
    }
}
