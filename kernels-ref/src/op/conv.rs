//! conv: a convolution of an image with a square kernel, stride 1, and zeros around the image.

/// One output: Σ over taps and inputs of w\[tap\]\[input\] · pixel(x + dx, y + dy)\[input\]. `weights` is \[side², inputs\], taps row
/// by row; `pixel` returns the inputs at signed offsets from the output's place, or `None` outside of the image.
pub fn output<'a>(
    weights: &[f32],
    inputs: usize,
    side: usize,
    pixel: impl Fn(isize, isize) -> Option<&'a [f32]>,
) -> f64 {
    assert_eq!(weights.len(), side * side * inputs, "weights are [side², inputs]");
    let middle = (side / 2) as isize;
    let mut sum = 0.0;
    for (tap, weights) in weights.chunks_exact(inputs).enumerate() {
        let (dy, dx) = ((tap / side) as isize - middle, (tap % side) as isize - middle);
        if let Some(pixel) = pixel(dy, dx) {
            let products = weights.iter().zip(pixel).map(|(&w, &x)| f64::from(w) * f64::from(x));
            sum += products.sum::<f64>();
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn taps_go_row_by_row_from_the_upper_left() {
        // Tap t has weight 10^t for one input; the pixel at (dy, dx) has the value of its tap's number.
        let weights: Vec<f32> = (0..9).map(|tap| 10f32.powi(tap)).collect();
        let pixels: Vec<[f32; 1]> = (0..9).map(|tap| [tap as f32]).collect();
        let pixel = |dy: isize, dx: isize| Some(&pixels[((dy + 1) * 3 + dx + 1) as usize][..]);
        assert_eq!(output(&weights, 1, 3, pixel), 876_543_210.0);
        // Nothing above and left of the image.
        let corner = |dy: isize, dx: isize| (dy >= 0 && dx >= 0).then(|| pixel(dy, dx)).flatten();
        assert_eq!(output(&weights, 1, 3, corner), 870_540_000.0);
    }

    #[test]
    fn inputs_of_a_tap_are_together() {
        assert_eq!(output(&[2.0, 3.0], 2, 1, |_, _| Some(&[5.0, 7.0])), 31.0);
    }
}
