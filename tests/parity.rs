//! The device against the reference: every kernel, whole programs, and variants of kernels against each other, bit by bit.

mod common;

use cmf_gpu::parity::{self, Case};
use std::sync::Arc;

fn never(_: usize, _: usize, _: &str) -> cmf_gpu::Result<()> {
    Ok(())
}

#[test]
fn every_kernel_agrees_with_the_reference() {
    let device = common::device();
    let outcome = parity::kernels(&device, None, &mut never).unwrap();
    for failure in &outcome.failed {
        println!("{}: {}", failure.name, failure.what);
    }
    println!("{:#?}", outcome.worst);
    println!("{} {}", outcome.cases, outcome.passed);
    assert!(outcome.failed.is_empty());
    assert_eq!(outcome.passed, outcome.cases);
}
