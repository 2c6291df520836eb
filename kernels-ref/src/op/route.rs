//! route: the experts of a token, and their weights.

use std::cmp::Ordering;

/// How a router's logits become experts and weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Experts a token takes.
    pub top_k: usize,
    /// A score is the sigmoid of its logit instead of a softmax over all.
    pub sigmoid: bool,
    /// The weights of the chosen experts are divided by their sum.
    pub renormalise: bool,
    /// Factor of the weights.
    pub scale: f64,
}

/// 1 / (1 + exp(-v))
pub fn sigmoid(v: f64) -> f64 {
    1.0 / (1.0 + (-v).exp())
}

/// Index and weight of the chosen experts, by rank; of equal experts the lowest index is first.
///
/// score = softmax(logits) or sigmoid(logit). Experts rank by their logits, which order as the scores do; with `bias` by
/// score + bias. The bias does not change the weights.
pub fn route(logits: &[f32], bias: Option<&[f32]>, routing: &Routing) -> Vec<(usize, f64)> {
    let logits: Vec<f64> = logits.iter().map(|&v| f64::from(v)).collect();
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = logits.iter().map(|v| (v - most).exp()).sum();
    let score = |v: f64| match routing.sigmoid {
        true => sigmoid(v),
        false => (v - most).exp() / total,
    };
    let key = |expert: usize| match bias {
        Some(bias) => score(logits[expert]) + f64::from(bias[expert]),
        None => logits[expert],
    };
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| {
        let by_key = key(b).partial_cmp(&key(a)).unwrap_or(Ordering::Equal);
        by_key.then(a.cmp(&b))
    });
    order.truncate(routing.top_k);
    let scores: Vec<f64> = order.iter().map(|&expert| score(logits[expert])).collect();
    let divisor = match routing.renormalise {
        true => scores.iter().sum::<f64>().max(1e-20),
        false => 1.0,
    };
    let weights = scores.iter().map(|score| score / divisor * routing.scale);
    order.iter().copied().zip(weights).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Routing = Routing {
        top_k: 2,
        sigmoid: false,
        renormalise: false,
        scale: 1.0,
    };

    fn close(found: &[(usize, f64)], wanted: &[(usize, f64)]) {
        assert_eq!(found.len(), wanted.len());
        for (found, wanted) in found.iter().zip(wanted) {
            assert_eq!(found.0, wanted.0);
            assert!((found.1 - wanted.1).abs() < 1e-12, "{found:?}, expected {wanted:?}");
        }
    }

    #[test]
    fn weights_are_shares_of_all_or_of_the_chosen() {
        // Weights 1 : 2 : 4 : 1.
        let logits = [0.0, 2f32.ln(), 4f32.ln(), 0.0];
        let exact = |v: f32| f64::from(v).exp();
        let (two, four) = (exact(logits[1]), exact(logits[2]));
        let all = 2.0 + two + four;
        close(&route(&logits, None, &PLAIN), &[(2, four / all), (1, two / all)]);
        let renormalised = Routing {
            renormalise: true,
            scale: 2.5,
            ..PLAIN
        };
        let both = two + four;
        close(
            &route(&logits, None, &renormalised),
            &[(2, 2.5 * four / both), (1, 2.5 * two / both)],
        );
    }

    #[test]
    fn of_equal_experts_the_lower_index_is_first_and_a_bias_only_changes_ranks() {
        close(
            &route(&[1.0, 1.0, 1.0], None, &PLAIN),
            &[(0, 1.0 / 3.0), (1, 1.0 / 3.0)],
        );
        close(
            &route(&[-0.0, 0.0, 0.0], None, &PLAIN),
            &[(0, 1.0 / 3.0), (1, 1.0 / 3.0)],
        );
        let sigmoids = Routing { sigmoid: true, ..PLAIN };
        let found = route(&[0.0, 3.0, 0.0], Some(&[0.1, -2.0, 0.2]), &sigmoids);
        close(&found, &[(2, 0.5), (0, 0.5)]);
    }
}
