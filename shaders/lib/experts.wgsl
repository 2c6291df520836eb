// The binding `experts`: how a layer routes tokens, and where each expert is in a bank of weights.
// src/op/constants.rs has the length of the header as TABLE_HEADER.

// place: index in the bank, ABSENT if the bank does not hold the expert. bias: added to the expert's score for ranking.
struct Expert { place: u32, bias: f32 }

struct Experts {
    count: u32,
    top_k: u32,        // experts that a token takes
    sigmoid: u32,      // 1 = score is sigmoid(logit), 0 = softmax over all experts
    renormalise: u32,  // 1 = divide the scores of the chosen experts by their sum
    biased: u32,       // 1 = rank by score + bias; weights never contain the bias
    gate: u32,         // index of the logit of the shared expert's weight, or ABSENT
    scale: f32,        // factor of the weights
    spare: u32,
    all: array<Expert>,
}
