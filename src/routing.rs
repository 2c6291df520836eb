//! Which skill a prompt is for: distances of hidden states from affine subspaces, and such subspaces from examples.
//!
//! Numbers only: φ, the mean over a prompt's tokens of the hidden state behind a layer, comes from whoever runs the model.

use crate::container::Selection;
use crate::error::{Result, bail};
use half::f16;

/// The only metric that there is: E is a squared distance.
pub const METRIC: &str = "mse";
/// Most rounds of the power iteration; directions that are still turning then are as strong as each other.
const ROUNDS: usize = 64;
/// How little of a subspace may turn in a round for it to be found.
const SETTLED: f64 = 1e-10;
/// Examples whose squared distances are less than this share of their squared lengths differ by rounding.
const LEAST_SPREAD: f64 = 1e-12;
/// Directions with less than this share of the variance of the first are noise.
const LEAST_VARIANCE: f64 = 1e-9;

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// E = ‖r − BᵀB·r‖² / ‖φ‖² with r = φ − mean: how much of φ the subspace does not explain.
///
/// Errors: `Usage` for φ of another length; `NonFinite` where φ is zero or not finite.
pub fn energy(selection: &Selection, phi: &[f64]) -> Result<f64> {
    let hidden = selection.mean.len();
    if phi.len() != hidden {
        bail!(Usage, "φ has {} elements, the selection {hidden}", phi.len());
    }
    let r: Vec<f64> = phi
        .iter()
        .zip(&selection.mean)
        .map(|(phi, &mean)| phi - f64::from(mean))
        .collect();
    let mut rest = r.clone();
    for row in selection.basis.chunks_exact(hidden) {
        let along: f64 = row.iter().zip(&r).map(|(&b, r)| f64::from(b) * r).sum();
        rest.iter_mut()
            .zip(row)
            .for_each(|(rest, &b)| *rest -= along * f64::from(b));
    }
    let energy = dot(&rest, &rest) / dot(phi, phi);
    if !energy.is_finite() {
        bail!(NonFinite, "the prompt has no energy: its φ is zero or too large");
    }
    Ok(energy)
}

/// w = softmax(−E/T). Errors: `Usage` for a temperature that is not above 0.
pub fn weights(energies: &[f64], temperature: f64) -> Result<Vec<f64>> {
    if !(temperature.is_finite() && temperature > 0.0) {
        bail!(Usage, "a temperature of {temperature}, wanted one above 0");
    }
    let least = energies.iter().copied().fold(f64::INFINITY, f64::min);
    let terms: Vec<f64> = energies
        .iter()
        .map(|energy| ((least - energy) / temperature).exp())
        .collect();
    let sum: f64 = terms.iter().sum();
    Ok(terms.iter().map(|term| term / sum).collect())
}

/// The subspace of examples: their mean, and the at most `rank` directions in which they vary most, an orthonormal basis. All
/// numbers are those of f16, as files keep them. The same examples give the same subspace.
///
/// Errors: `Usage` for fewer than two examples, a rank of 0, or examples that are all the same; `NonFinite` for a mean that f16
/// cannot hold.
pub fn fit(examples: &[Vec<f64>], phi_layer: usize, rank: usize) -> Result<Selection> {
    let hidden = examples.first().map_or(0, Vec::len);
    if examples.len() < 2 || examples.iter().any(|phi| phi.len() != hidden) {
        bail!(Usage, "{} examples, wanted at least 2", examples.len());
    }
    if rank == 0 {
        bail!(Usage, "a rank of 0");
    }
    let count = examples.len() as f64;
    let column = |i: usize| examples.iter().map(|phi| phi[i]).sum::<f64>() / count;
    let exact: Vec<f64> = (0..hidden).map(column).collect();
    let mean: Vec<f32> = exact.iter().copied().map(rounded).collect();
    if mean.iter().any(|value| !value.is_finite()) {
        bail!(NonFinite, "the mean of the examples exceeds what f16 holds");
    }
    let centred = |phi: &Vec<f64>| phi.iter().zip(&exact).map(|(phi, mean)| phi - mean).collect();
    let centred: Vec<Vec<f64>> = examples.iter().map(centred).collect();
    let largest = |rows: &[Vec<f64>]| rows.iter().map(|row| dot(row, row)).fold(0.0, f64::max);
    if largest(&centred) <= largest(examples) * LEAST_SPREAD {
        bail!(Usage, "the examples are all the same");
    }
    let basis = principal(&centred, rank.min(examples.len() - 1).min(hidden));
    Ok(Selection {
        metric: Some(METRIC.into()),
        phi_layer,
        mean,
        rank: basis.len(),
        basis: basis.into_iter().flatten().map(rounded).collect(),
    })
}

fn rounded(value: f64) -> f32 {
    f16::from_f64(value).to_f32()
}

/// Orthonormal directions, the strongest first: power iteration with a block of vectors on XᵀX.
fn principal(rows: &[Vec<f64>], rank: usize) -> Vec<Vec<f64>> {
    // Mixtures of all examples: a start that is orthogonal to no direction there is.
    let mut mix = Mix(1);
    let start = (0..rank).map(|_| {
        let mut sum = vec![0.0; rows.first().map_or(0, Vec::len)];
        for row in rows {
            let share = mix.next();
            sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += share * value);
        }
        sum
    });
    let mut basis = orthonormal(start.collect(), rank);
    for _ in 0..ROUNDS {
        let next = basis.iter().map(|direction| {
            let mut sum = vec![0.0; direction.len()];
            for row in rows {
                let along = dot(row, direction);
                sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += along * value);
            }
            sum
        });
        let next = orthonormal(next.collect(), rank);
        let turned = next.iter().map(|direction| {
            let inside: f64 = basis.iter().map(|old| dot(old, direction).powi(2)).sum();
            1.0 - inside
        });
        let turned = turned.fold(0.0, f64::max);
        let kept = next.len() == basis.len();
        basis = next;
        if kept && turned < SETTLED {
            break;
        }
    }
    basis
}

/// Numbers from −1 to 1 without a pattern, the same every time: a linear congruential generator.
struct Mix(u64);

impl Mix {
    fn next(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) as f64 / (1u64 << 30) as f64 - 1.0
    }
}

/// Gram-Schmidt, twice for accuracy: at most `most` unit vectors that span what the first independent ones span.
fn orthonormal(vectors: Vec<Vec<f64>>, most: usize) -> Vec<Vec<f64>> {
    let longest = vectors.iter().map(|vector| dot(vector, vector)).fold(0.0, f64::max);
    let mut basis: Vec<Vec<f64>> = Vec::new();
    for mut vector in vectors {
        if basis.len() == most {
            break;
        }
        for _ in 0..2 {
            for unit in &basis {
                let along = dot(unit, &vector);
                vector
                    .iter_mut()
                    .zip(unit)
                    .for_each(|(value, unit)| *value -= along * unit);
            }
        }
        let length = dot(&vector, &vector);
        if length > longest * LEAST_VARIANCE * LEAST_VARIANCE && length.sqrt().is_normal() {
            let length = length.sqrt();
            basis.push(vector.into_iter().map(|value| value / length).collect());
        }
    }
    basis
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    fn selection(mean: &[f32], basis: &[f32]) -> Selection {
        Selection {
            metric: None,
            phi_layer: 0,
            mean: mean.to_vec(),
            basis: basis.to_vec(),
            rank: basis.len() / mean.len(),
        }
    }

    #[test]
    fn energy_is_what_the_subspace_leaves_over() {
        let plane = selection(&[1.0, 0.0, 0.0], &[0.0, 1.0, 0.0]);
        // r = (2, 4, 1), of which (2, 0, 1) is left over.
        assert_eq!(energy(&plane, &[3.0, 4.0, 1.0]).unwrap(), 5.0 / 26.0);
        assert_eq!(energy(&plane, &[1.0, 7.0, 0.0]).unwrap(), 0.0);
        assert_eq!(energy(&plane, &[0.0; 3]).unwrap_err().kind, Kind::NonFinite);
        assert_eq!(energy(&plane, &[1.0]).unwrap_err().kind, Kind::Usage);
    }

    #[test]
    fn weights_favour_small_energies() {
        let w = weights(&[0.2, 0.2 + 0.1 * 2f64.ln()], 0.1).unwrap();
        assert!(
            (w[0] - 2.0 / 3.0).abs() < 1e-12 && (w[1] - 1.0 / 3.0).abs() < 1e-12,
            "{w:?}"
        );
        let cold = weights(&[1e6, 0.0], 1e-9).unwrap();
        assert_eq!(cold, [0.0, 1.0]);
        for bad in [0.0, -1.0, f64::NAN] {
            assert_eq!(weights(&[1.0], bad).unwrap_err().kind, Kind::Usage);
        }
    }

    #[test]
    fn fitting_finds_the_directions_in_which_examples_vary() {
        let (hidden, mut noise) = (24, Mix(7));
        // Two directions, 3 to 1, about a mean, and a little of everything.
        let (a, b): (Vec<f64>, Vec<f64>) = (
            (0..hidden).map(|i| f64::from(i % 2)).collect(),
            (0..hidden).map(|i| f64::from((i + 1) % 2)).collect(),
        );
        let example = |_: usize| {
            let (x, y) = (3.0 * noise.next(), noise.next());
            let at = |i: usize| 0.5 + x * a[i] + y * b[i] + 1e-3 * noise.next();
            (0..hidden as usize).map(at).collect::<Vec<f64>>()
        };
        let examples: Vec<Vec<f64>> = (0..40).map(example).collect();
        let found = fit(&examples, 3, 2).unwrap();
        assert_eq!((found.rank, found.phi_layer, found.mean.len()), (2, 3, hidden as usize));
        let rows: Vec<Vec<f64>> = found
            .basis
            .chunks_exact(hidden as usize)
            .map(|row| row.iter().map(|&value| f64::from(value)).collect())
            .collect();
        for (i, row) in rows.iter().enumerate() {
            for (j, other) in rows.iter().enumerate() {
                let wanted = f64::from(u8::from(i == j));
                assert!((dot(row, other) - wanted).abs() < 2e-3, "{i} {j}");
            }
        }
        // The first direction is the stronger one; in a few examples the two are not quite independent.
        let unit = 1.0 / (hidden as f64 / 2.0).sqrt();
        assert!(dot(&rows[0], &a).abs() * unit > 0.99, "{}", dot(&rows[0], &a) * unit);
        assert!(dot(&rows[1], &b).abs() * unit > 0.99);
        assert!(examples.iter().all(|phi| energy(&found, phi).unwrap() < 1e-3));
        assert_eq!(fit(&examples, 3, 2).unwrap(), found, "deterministic");
        // Not more directions than examples have.
        assert_eq!(fit(&examples[..3], 0, 9).unwrap().rank, 2);
        assert_eq!(fit(&examples[..1], 0, 1).unwrap_err().kind, Kind::Usage);
        assert_eq!(fit(&vec![examples[0].clone(); 4], 0, 1).unwrap_err().kind, Kind::Usage);
        assert_eq!(fit(&examples, 0, 0).unwrap_err().kind, Kind::Usage);
        assert_eq!(
            fit(&[vec![1e6; 4], vec![2e6; 4]], 0, 1).unwrap_err().kind,
            Kind::NonFinite
        );
    }
}
