//! The result of many comparisons.

use std::collections::BTreeMap;

/// The number of comparisons, and the failures among them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Comparisons.
    pub cases: usize,
    /// Comparisons within tolerance.
    pub passed: usize,
    /// The failures, each name once with its first difference.
    pub failed: Vec<Failure>,
    /// The largest error of every kind of comparison, by name.
    pub worst: Vec<(String, f64)>,
}

/// A comparison that failed.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Failure {
    /// Its name: operator, type and dimensions, or program and step.
    pub name: String,
    /// The difference.
    pub what: String,
}

/// An outcome that is being counted.
#[derive(Default)]
pub(super) struct Tally {
    cases: usize,
    passed: usize,
    failed: Vec<Failure>,
    worst: BTreeMap<String, f64>,
}

impl Tally {
    /// Counts a comparison: its error, or the difference in words.
    pub fn add(&mut self, kind: &str, name: &str, result: Result<f64, String>) {
        self.cases += 1;
        match result {
            Ok(error) => {
                self.passed += 1;
                let worst = self.worst.entry(kind.into()).or_insert(0.0);
                *worst = worst.max(error);
            }
            Err(_) if self.failed.iter().any(|failure| failure.name == name) => {}
            Err(what) => self.failed.push(Failure {
                name: name.into(),
                what,
            }),
        }
    }

    pub fn outcome(self) -> Outcome {
        Outcome {
            cases: self.cases,
            passed: self.passed,
            failed: self.failed,
            worst: self.worst.into_iter().collect(),
        }
    }
}
