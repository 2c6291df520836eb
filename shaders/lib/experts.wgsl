// What a layer's experts have in common, and where each of them lies in a bank of weights.
// The place of an expert that the bank does not hold, and the index of a logit that there is not.
const ABSENT: u32 = 0xffffffffu;

struct Expert { place: u32, bias: f32 }

struct Experts {
    count: u32,
    top_k: u32,        // experts a token takes
    sigmoid: u32,      // 1 = a score is the sigmoid of its logit, 0 = softmax over all
    renormalise: u32,  // 1 = the weights of the chosen are divided by their sum
    biased: u32,       // 1 = the biases count, for ranking only
    gate: u32,         // index of the logit of the shared expert's weight
    scale: f32,        // factor of the weights
    spare: u32,
    all: array<Expert>,
}
