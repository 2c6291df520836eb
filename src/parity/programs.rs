//! Programs step by step: each step is judged on its own, from the state that the device's earlier steps left.

use super::judge::{judge, outputs};
use super::outcome::{Outcome, Tally};
use crate::error::Result;
use crate::gpu::{Device, GpuExecutor};
use crate::graph::{BatchShape, Executor, Graph, Selection};
use crate::host::HostExecutor;
use crate::op::BufferId;
use crate::source::Tensors;
use std::sync::Arc;

/// A graph with a selection and its tensors.
#[derive(Clone)]
pub(super) struct Side {
    pub graph: Arc<Graph>,
    pub selection: Arc<Selection>,
    pub tensors: Arc<dyn Tensors>,
}

/// A graph on a device and on the host, in the same state.
pub(super) struct Pair {
    graph: Arc<Graph>,
    selection: Arc<Selection>,
    device: GpuExecutor,
    host: HostExecutor,
    tally: Tally,
}

impl Pair {
    /// `tried` on the device, `reference` on the host.
    pub fn new(device: &Arc<Device>, tried: Side, reference: Side) -> Result<Pair> {
        let Side {
            graph,
            selection,
            tensors,
        } = tried;
        let on_device = GpuExecutor::new(device.clone(), graph, selection, tensors, &mut |_, _| Ok(()))?;
        let Side {
            graph,
            selection,
            tensors,
        } = reference;
        Ok(Pair {
            device: on_device,
            host: HostExecutor::new(graph.clone(), selection.clone(), tensors)?,
            graph,
            selection,
            tally: Tally::default(),
        })
    }

    /// Writes words at the start of a buffer on both sides.
    pub fn write(&mut self, buffer: BufferId, words: &[u32]) -> Result<()> {
        self.device.write(buffer, words)?;
        self.host.write(buffer, words)
    }

    /// Runs the selected steps of a program one by one, and judges each. `progress` gets the label of the next step.
    pub fn run(
        &mut self,
        program: usize,
        shape: BatchShape,
        progress: &mut dyn FnMut(&str) -> Result<()>,
    ) -> Result<()> {
        let graph = self.graph.clone();
        for resolved in graph.programs[program].resolve(&self.selection) {
            progress(&graph.programs[program].steps[resolved.step].label)?;
            self.step(program, resolved.step, resolved.masked, shape)?;
        }
        Ok(())
    }

    fn step(&mut self, program: usize, at: usize, masked: bool, shape: BatchShape) -> Result<()> {
        let graph = self.graph.clone();
        let step = &graph.programs[program].steps[at];
        let count = |buffer: BufferId| graph.buffers[buffer].bytes as usize / 4;
        let outputs = outputs(step, graph.kv);
        let mut before = Vec::new();
        for output in &outputs {
            before.push(self.host.read(output.buffer, 0, count(output.buffer))?);
        }
        self.device.run(program, at..at + 1, shape)?;
        self.host.run(program, at..at + 1, shape)?;
        let mut result: Result<f64, String> = Ok(0.0);
        for (output, before) in outputs.iter().zip(&before) {
            let buffer = output.buffer;
            let found = self.device.read(buffer, 0, count(buffer))?;
            let expected = self.host.read(buffer, 0, count(buffer))?;
            let verdict = judge(before, &found, &expected, output.elements, output.tolerance);
            result = match (result, verdict) {
                (Ok(worst), Ok(error)) => Ok(worst.max(error)),
                (Ok(_), Err(difference)) => Err(format!(
                    "{}: {difference}, in a run up to position {}",
                    graph.buffers[buffer].label,
                    shape.end.saturating_sub(1)
                )),
                (failed, _) => failed,
            };
            // On both sides the next step begins from the device's state.
            self.host.write(buffer, &found)?;
        }
        // Prefill has the same steps with and without logits.
        let program = graph.programs[program].name.trim_end_matches("_logits");
        let variant = if masked { ".masked" } else { "" };
        let kind = format!("{program} {}{variant}", step.op.kernel().spec().name);
        self.tally.add(&kind, &format!("{program} {}", step.label), result);
        Ok(())
    }

    /// The outcome of all steps so far: once for each step of a program.
    pub fn outcome(self) -> Outcome {
        self.tally.outcome()
    }
}
