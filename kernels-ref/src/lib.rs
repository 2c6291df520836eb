//! CPU reference kernels: the oracle that every GPU kernel of `cmf-gpu` is compared with.
//!
//! Plain formulas, f64 inside, no tiling and no copied summation order; every constant is an argument. [`dtype`] says what
//! the bytes of a tensor mean, [`op`] what each step of a network computes.
#![forbid(unsafe_code)]

pub mod dtype;
pub mod op;
