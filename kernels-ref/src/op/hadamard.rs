//! hadamard: the blockwise normalised Walsh-Hadamard transform with signs.
//!
//! H is the block-diagonal matrix of Sylvester matrices in natural order, with entries (-1)^popcount(i & j) / √block for i and
//! j in one block. H is symmetric, and H·H is the identity.

/// y = H(s ⊙ x), as projections with rotated weights need it. `block` is a power of two that divides the length.
pub fn rotate(x: &[f64], signs: &[f32], block: usize) -> Vec<f64> {
    assert_eq!(x.len(), signs.len(), "a sign for each element");
    transform(signed(x, signs), block)
}

/// y = s ⊙ H(x): the inverse of [`rotate`].
pub fn rotate_back(x: &[f64], signs: &[f32], block: usize) -> Vec<f64> {
    assert_eq!(x.len(), signs.len(), "a sign for each element");
    signed(&transform(x.to_vec(), block), signs)
}

fn signed(x: &[f64], signs: &[f32]) -> Vec<f64> {
    x.iter().zip(signs).map(|(x, &sign)| x * f64::from(sign)).collect()
}

fn transform(mut y: Vec<f64>, block: usize) -> Vec<f64> {
    assert!(
        block.is_power_of_two() && y.len().is_multiple_of(block),
        "whole blocks of a power of two"
    );
    for values in y.chunks_exact_mut(block) {
        let mut distance = 1;
        while distance < block {
            for pairs in values.chunks_exact_mut(2 * distance) {
                let (low, high) = pairs.split_at_mut(distance);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            distance *= 2;
        }
    }
    let factor = 1.0 / (block as f64).sqrt();
    y.iter_mut().for_each(|y| *y *= factor);
    y
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(len: usize) -> (Vec<f64>, Vec<f32>) {
        let x = (0..len).map(|i| ((i * 37 + 11) % 101) as f64 / 50.0 - 1.0).collect();
        let signs = (0..len)
            .map(|i| if (i * 13 + i / 7) % 3 == 0 { -1.0 } else { 1.0 })
            .collect();
        (x, signs)
    }

    #[test]
    fn the_result_is_the_product_with_the_matrix() {
        let (x, signs) = inputs(96);
        for block in [1, 2, 16, 32] {
            for (i, y) in rotate(&x, &signs, block).into_iter().enumerate() {
                let first = i / block * block;
                let entry = |j: usize| {
                    if (i & j & (block - 1)).count_ones().is_multiple_of(2) {
                        1.0
                    } else {
                        -1.0
                    }
                };
                let sum: f64 = (first..first + block)
                    .map(|j| entry(j) * f64::from(signs[j]) * x[j])
                    .sum();
                let expected = sum / (block as f64).sqrt();
                assert!(
                    (y - expected).abs() < 1e-12,
                    "block {block}, element {i}: {y}, expected {expected}"
                );
            }
        }
    }

    #[test]
    fn rotating_back_undoes_it() {
        let (x, signs) = inputs(8192);
        for block in [64, 1024, 4096] {
            let back = rotate_back(&rotate(&x, &signs, block), &signs, block);
            assert!(
                back.iter().zip(&x).all(|(back, x)| (back - x).abs() < 1e-12),
                "block {block}"
            );
        }
    }
}
