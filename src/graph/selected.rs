//! A graph under a selection: steps and costs that an executor needs in every run.

use super::cost::KvBytes;
use super::executor::Counters;
use super::program::{Graph, Program, Resolved, Selection};
use crate::error::{Result, bail};
use crate::op::BatchShape;
use std::ops::Range;

/// The programs of a graph under a selection.
#[derive(Clone, Debug, Default)]
pub struct Selected {
    programs: Vec<SelectedProgram>,
}

/// One program under a selection.
#[derive(Clone, Debug)]
pub struct SelectedProgram {
    /// The steps that run.
    resolved: Vec<Resolved>,
    /// All steps of the program.
    steps: usize,
    weight_bytes: u64,
    kv_reads: Vec<KvBytes>,
}

impl Selected {
    /// Resolves every program.
    pub fn new(graph: &Graph, selection: &Selection) -> Selected {
        let program = |program: &Program| SelectedProgram {
            resolved: program.resolve(selection),
            steps: program.steps.len(),
            weight_bytes: graph.weight_bytes_read(program, selection),
            kv_reads: graph.kv_reads(program, selection),
        };
        Selected {
            programs: graph.programs.iter().map(program).collect(),
        }
    }

    /// A program by index. Errors: `Internal` for one that does not exist.
    pub fn program(&self, index: usize) -> Result<&SelectedProgram> {
        match self.programs.get(index) {
            Some(program) => Ok(program),
            None => bail!(Internal, "no program {index}, the graph has {}", self.programs.len()),
        }
    }
}

impl SelectedProgram {
    /// The steps in a range that run. Errors: `Internal` for a range past the end of the program.
    pub fn within(&self, steps: &Range<usize>) -> Result<&[Resolved]> {
        if steps.start > steps.end || steps.end > self.steps {
            bail!(Internal, "steps {steps:?}, the program has {}", self.steps);
        }
        let index = |step: usize| self.resolved.partition_point(|resolved| resolved.step < step);
        Ok(&self.resolved[index(steps.start)..index(steps.end)])
    }

    /// Counts the bytes that a run of the program reads, if the range includes its last step.
    pub fn count_bytes(&self, steps: &Range<usize>, shape: BatchShape, counters: &mut Counters) {
        if steps.end == self.steps {
            counters.weight_bytes += self.weight_bytes;
            counters.kv_bytes += self.kv_reads.iter().map(|read| read.of_run(shape)).sum::<u64>();
        }
    }
}
