//! The formulas of a network's operators, one file each.
//!
//! Inputs are the f32 values that a kernel reads, results are f64. A slice of a wrong length panics: it is a fault of the caller,
//! and never of a model file.

pub mod argmax;
pub mod attention;
pub mod conv;
pub mod delta_net;
pub mod glu;
pub mod hadamard;
pub mod layer_norm;
pub mod linear;
pub mod rms_norm;
pub mod rope;
pub mod route;
