//! Chooses skills for a prompt: the distance of its hidden state from each skill's affine subspace, and the fit of such
//! subspaces to examples.
//!
//! The input is φ: the mean over a prompt's tokens of a layer's output. The engine computes it.

use crate::error::{Result, bail};
use crate::source::Selection;
use half::f16;

/// The only supported metric: E is a squared distance.
pub const METRIC: &str = "mse";
/// Most iterations of the power iteration. Directions that have not converged by then have nearly equal variances.
const ITERATIONS: usize = 64;
/// The power iteration ends when less than this share of the subspace changes.
const CONVERGED: f64 = 1e-10;
/// Examples whose squared distances from the mean are below this share of their squared lengths differ only by rounding.
const LEAST_SPREAD: f64 = 1e-12;
/// Directions with less than this share of the largest variance are noise.
const LEAST_VARIANCE: f64 = 1e-9;

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Adds `factor` times a vector to `sum`.
fn add(sum: &mut [f64], factor: f64, vector: &[f64]) {
    sum.iter_mut()
        .zip(vector)
        .for_each(|(sum, value)| *sum += factor * value);
}

/// E = ‖r − BᵀB·r‖² / ‖φ‖² with r = φ − mean: the share of φ that the subspace does not explain.
///
/// Errors: `Usage` for a φ of the wrong length; `NonFinite` where φ is zero or not finite.
pub fn energy(selection: &Selection, phi: &[f64]) -> Result<f64> {
    let hidden = selection.mean.len();
    if phi.len() != hidden {
        bail!(Usage, "φ: expected {hidden} elements, found {}", phi.len());
    }
    let around = phi.iter().zip(&selection.mean);
    let r: Vec<f64> = around.map(|(phi, &mean)| phi - f64::from(mean)).collect();
    let mut rest = r.clone();
    for row in selection.basis.chunks_exact(hidden) {
        let row: Vec<f64> = row.iter().copied().map(f64::from).collect();
        add(&mut rest, -dot(&row, &r), &row);
    }
    let energy = dot(&rest, &rest) / dot(phi, phi);
    if !energy.is_finite() {
        bail!(
            NonFinite,
            "the energy of the prompt is not finite: its φ is zero or too large"
        );
    }
    Ok(energy)
}

/// w = softmax(−E/T). Errors: `Usage` unless the temperature T is above 0.
pub fn weights(energies: &[f64], temperature: f64) -> Result<Vec<f64>> {
    if !(temperature.is_finite() && temperature > 0.0) {
        bail!(Usage, "temperature: expected a number above 0, found {temperature}");
    }
    let least = energies.iter().copied().fold(f64::INFINITY, f64::min);
    let terms = energies.iter().map(|energy| ((least - energy) / temperature).exp());
    let terms: Vec<f64> = terms.collect();
    let sum: f64 = terms.iter().sum();
    Ok(terms.iter().map(|term| term / sum).collect())
}

/// Fits a subspace to examples: their mean, and an orthonormal basis of the at most `rank` directions in which they vary
/// most. All numbers are rounded to f16, the type in files. The result is deterministic.
///
/// Errors: `Usage` for fewer than two examples, a rank of 0, or equal examples; `NonFinite` if the mean exceeds f16.
pub fn fit(examples: &[Vec<f64>], phi_layer: usize, rank: usize) -> Result<Selection> {
    let hidden = examples.first().map_or(0, Vec::len);
    if examples.len() < 2 || examples.iter().any(|phi| phi.len() != hidden) {
        bail!(
            Usage,
            "expected at least 2 examples of one length, found {}",
            examples.len()
        );
    }
    if rank == 0 {
        bail!(Usage, "rank: expected at least 1, found 0");
    }
    let count = examples.len() as f64;
    let column = |i: usize| examples.iter().map(|phi| phi[i]).sum::<f64>() / count;
    let exact: Vec<f64> = (0..hidden).map(column).collect();
    let mean: Vec<f32> = exact.iter().copied().map(rounded).collect();
    if mean.iter().any(|value| !value.is_finite()) {
        bail!(NonFinite, "the mean of the examples exceeds the range of f16");
    }
    let centred = |phi: &Vec<f64>| phi.iter().zip(&exact).map(|(phi, mean)| phi - mean).collect();
    let centred: Vec<Vec<f64>> = examples.iter().map(centred).collect();
    let largest = |rows: &[Vec<f64>]| rows.iter().map(|row| dot(row, row)).fold(0.0, f64::max);
    if largest(&centred) <= largest(examples) * LEAST_SPREAD {
        bail!(Usage, "all examples are equal");
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

/// Orthonormal directions by descending variance: power iteration with a block of vectors on XᵀX.
fn principal(rows: &[Vec<f64>], rank: usize) -> Vec<Vec<f64>> {
    // Random combinations of all examples: a start that is orthogonal to none of the wanted directions.
    let mut mix = Mix(1);
    let start = (0..rank).map(|_| {
        let mut sum = vec![0.0; rows.first().map_or(0, Vec::len)];
        rows.iter().for_each(|row| add(&mut sum, mix.next(), row));
        sum
    });
    let mut basis = orthonormal(start.collect(), rank);
    for _ in 0..ITERATIONS {
        let next = basis.iter().map(|direction| {
            let mut sum = vec![0.0; direction.len()];
            rows.iter().for_each(|row| add(&mut sum, dot(row, direction), row));
            sum
        });
        let next = orthonormal(next.collect(), rank);
        let changed = next.iter().map(|direction| {
            let inside: f64 = basis.iter().map(|old| dot(old, direction).powi(2)).sum();
            1.0 - inside
        });
        let changed = changed.fold(0.0, f64::max);
        let kept = next.len() == basis.len();
        basis = next;
        if kept && changed < CONVERGED {
            break;
        }
    }
    basis
}

/// Pseudorandom numbers from −1 to 1 with a fixed seed: a linear congruential generator.
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

/// Gram-Schmidt, applied twice for accuracy: at most `most` orthonormal vectors with the span of the first independent
/// `vectors`.
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
                add(&mut vector, -along, unit);
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
    fn energy_is_the_share_outside_of_the_subspace() {
        let plane = selection(&[1.0, 0.0, 0.0], &[0.0, 1.0, 0.0]);
        // r = (2, 4, 1); (2, 0, 1) is orthogonal to the subspace.
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
        // Two directions with deviations 3 and 1 around a mean, and a little noise.
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
        // The first direction has the larger variance; few examples leave the two slightly correlated.
        let unit = 1.0 / (hidden as f64 / 2.0).sqrt();
        assert!(dot(&rows[0], &a).abs() * unit > 0.99, "{}", dot(&rows[0], &a) * unit);
        assert!(dot(&rows[1], &b).abs() * unit > 0.99);
        assert!(examples.iter().all(|phi| energy(&found, phi).unwrap() < 1e-3));
        assert_eq!(fit(&examples, 3, 2).unwrap(), found, "deterministic");
        // No more directions than the examples have.
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
