//! What each step of a network computes, one file per operator.
//!
//! Inputs are the f32 values a kernel reads, results are f64. Shapes are the caller's promise: a slice of another length
//! panics, because it is an error of the program and never of a file.

pub mod argmax;
pub mod attention;
pub mod delta_net;
pub mod glu;
pub mod linear;
pub mod rms_norm;
pub mod rope;
pub mod route;
