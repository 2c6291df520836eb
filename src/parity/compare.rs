//! Runs kernel cases on a device and on the host, and counts the results.

use super::cases::cases;
use super::judge::{Elements, Output, judge, outputs as written_by};
use super::rig::{Rig, Round};
use crate::error::Result;
use crate::gpu::{Device, GpuExecutor};
use crate::graph::{Executor, Graph, Selection};
use crate::host::HostExecutor;
use crate::op::{BufferId, Tolerance};
use crate::source::Tensors;
use std::collections::BTreeMap;
use std::sync::Arc;

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
    pub worst: BTreeMap<String, f64>,
}

/// A comparison that failed.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Failure {
    /// Its name: operator, type and dimensions, or program and step.
    pub name: String,
    /// The difference.
    pub what: String,
}

impl Outcome {
    /// Counts a comparison: its error, or the difference in words.
    pub(super) fn add(&mut self, kind: &str, name: &str, result: Result<f64, String>) {
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
}

/// Runs every case whose name contains `filter` on the device and on the host. `progress` gets the number of cases done, the
/// number of all, and the name of the next.
///
/// Errors: those of the executors. A wrong result is not an error but a failure in the outcome.
pub fn kernels(
    device: &Arc<Device>,
    filter: Option<&str>,
    progress: &mut dyn FnMut(usize, usize, &str) -> Result<()>,
) -> Result<Outcome> {
    let mut all = cases();
    all.retain(|case| filter.is_none_or(|filter| case.name().contains(filter)));
    let mut outcome = Outcome::default();
    for (i, case) in all.iter().enumerate() {
        progress(i, all.len(), case.name())?;
        let rig = case.rig(device.max_binding())?;
        let result = compare(device, &rig, &rig).map_err(|err| err.context(case.name()))?;
        outcome.add(case.kind(), case.name(), result);
    }
    Ok(outcome)
}

/// Runs `tried` on the device and `reference` on the host: the largest error, or the first difference. The two are the same
/// rig, unless a test checks that a fault is found.
///
/// Errors: those of the executors.
pub fn compare(device: &Arc<Device>, tried: &Rig, reference: &Rig) -> Result<Result<f64, String>> {
    compare_on(&mut *tried.executor(Some(device))?, tried, reference)
}

/// The same, with `tried` on any executor.
fn compare_on(executor_of_tried: &mut dyn Executor, tried: &Rig, reference: &Rig) -> Result<Result<f64, String>> {
    let mut host = reference.executor(None)?;
    let outputs = reference.outputs();
    let mut worst: f64 = 0.0;
    let mut idle = true;
    for round in &reference.rounds {
        reference.run(round, &mut *host)?;
        tried.run(round, executor_of_tried)?;
        for (buffer, declared) in reference.graph.buffers.iter().enumerate() {
            let before = reference.contents(round, buffer);
            let found = executor_of_tried.read(buffer, 0, before.len())?;
            let verdict = match outputs.get(&buffer) {
                Some(output) => {
                    let expected = host.read(buffer, 0, before.len())?;
                    idle &= expected == before;
                    judge(&before, &found, &expected, output.elements, output.tolerance)
                }
                // An input stays as it was.
                None => judge(&before, &found, &before, Elements::Words, Tolerance::Exact),
            };
            match verdict {
                Ok(error) => worst = worst.max(error),
                Err(difference) => return Ok(Err(format!("{}: {}: {difference}", round.name, declared.label))),
            }
        }
    }
    match idle {
        true => Ok(Err("the reference writes nothing".into())),
        false => Ok(Ok(worst)),
    }
}

/// The words that the device leaves in every output after every round, for comparing devices and variants bit by bit.
///
/// Errors: those of the executor.
pub fn outputs(device: &Arc<Device>, rig: &Rig) -> Result<Vec<Vec<u32>>> {
    let mut device = rig.executor(Some(device))?;
    let mut all = Vec::new();
    for round in &rig.rounds {
        rig.run(round, &mut *device)?;
        for &buffer in rig.outputs().keys() {
            all.push(device.read(buffer, 0, rig.words(buffer))?);
        }
    }
    Ok(all)
}

/// A graph on a device, or on the host.
pub(super) fn executor(
    device: Option<&Arc<Device>>,
    graph: Arc<Graph>,
    selection: Arc<Selection>,
    tensors: Arc<dyn Tensors>,
) -> Result<Box<dyn Executor>> {
    Ok(match device {
        Some(device) => {
            let device = device.clone();
            Box::new(GpuExecutor::new(device, graph, selection, tensors, &mut |_, _| Ok(()))?)
        }
        None => Box::new(HostExecutor::new(graph, selection, tensors)?),
    })
}

impl Rig {
    /// The rig on a device, or on the host.
    pub(super) fn executor(&self, device: Option<&Arc<Device>>) -> Result<Box<dyn Executor>> {
        let (graph, selection) = (Arc::new(self.graph.clone()), Arc::new(self.selection.clone()));
        executor(device, graph, selection, self.tensors.clone())
    }

    /// The buffers that its steps write.
    pub(super) fn outputs(&self) -> BTreeMap<BufferId, Output> {
        let steps = self.graph.programs[0].steps.iter();
        let outputs = steps.flat_map(|step| written_by(step, self.graph.kv));
        outputs.map(|output| (output.buffer, output)).collect()
    }

    /// Writes the contents of every buffer before a round.
    pub(super) fn load(&self, round: &Round, executor: &mut dyn Executor) -> Result<()> {
        (0..self.graph.buffers.len()).try_for_each(|buffer| executor.write(buffer, &self.contents(round, buffer)))
    }

    /// The same, and runs the steps.
    pub(super) fn run(&self, round: &Round, executor: &mut dyn Executor) -> Result<()> {
        self.load(round, executor)?;
        self.run_steps(round, executor)
    }

    /// Runs the steps.
    pub(super) fn run_steps(&self, round: &Round, executor: &mut dyn Executor) -> Result<()> {
        executor.run(0, 0..self.graph.programs[0].steps.len(), round.shape())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// The reference writes, and all that it writes is finite. Device tests run every case.
    #[test]
    fn the_first_cases_of_each_kind_run_on_the_host() {
        let mut seen: HashMap<String, usize> = HashMap::new();
        for case in cases() {
            let count = seen.entry(case.kind().into()).or_default();
            *count += 1;
            if *count > 3 {
                continue;
            }
            let rig = case.rig(u64::MAX).unwrap();
            let found = compare_on(&mut *rig.executor(None).unwrap(), &rig, &rig).unwrap();
            assert_eq!(found, Ok(0.0), "{}", case.name());
        }
    }
}
