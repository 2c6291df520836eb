//! How far the results of a device may be from the reference.

/// The largest relative L2 error that is allowed, over the elements that a step writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tolerance {
    /// The same bits.
    Exact,
    /// A few roundings for each element: 1e-6.
    Rounded,
    /// A sum in f32: 5e-6.
    Summed,
    /// A result of exp or tanh, for which drivers guarantee less precision: 2e-5.
    Exponential,
    /// A result that is rounded to f16. An error in the last bit of f32 can change the rounding: 1e-3.
    Half,
}

impl Tolerance {
    /// The largest error that passes.
    pub fn limit(self) -> f64 {
        match self {
            Tolerance::Exact => 0.0,
            Tolerance::Rounded => 1e-6,
            Tolerance::Summed => 5e-6,
            Tolerance::Exponential => 2e-5,
            Tolerance::Half => 1e-3,
        }
    }
}
