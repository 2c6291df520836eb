//! The printed form of a graph, for people and for snapshot tests.

use super::program::{Graph, Program, Selection};
use super::step::Step;
use crate::op::Bind;
use crate::op::Op;
use std::fmt;

impl Graph {
    /// Lists the steps of a program that a selection runs: label, operator with the layout of its weight, parameters,
    /// operands, grid.
    pub fn print(&self, program: &Program, selection: &Selection) -> String {
        let mut text = format!("{}:\n", program.name);
        for resolved in program.resolve(selection) {
            let step = &program.steps[resolved.step];
            let masked = if resolved.masked { ".masked" } else { "" };
            text += &format!(
                "  {:<24} {}{masked}{} {}\n",
                step.label,
                step.op.kernel().spec().name,
                step.planes
                    .map_or(String::new(), |planes| format!("[{}]", planes.name())),
                self.operands(step)
            );
            text += &format!("  {:<24}   {} -> {:?}", "", Parameters(&step.op), resolved.grid);
            if step.width != 1 {
                text += &format!(" x {}", step.width);
            }
            text.push('\n');
        }
        text
    }

    fn operands(&self, step: &Step) -> String {
        let declared = step.op.kernel().spec().bindings.iter().zip(&step.bindings);
        let one = declared.map(|(binding, bind)| {
            let label = match *bind {
                Bind::Weight(matrix, segment) => {
                    let matrix = &self.matrices[matrix];
                    match matrix.segments.len() {
                        1 => matrix.label.clone(),
                        count => format!("{}#{}/{count}", matrix.label, segment + 1),
                    }
                }
                Bind::Vector(vector) => self.vectors[vector].label.clone(),
                Bind::Buffer(buffer) => self.buffers[buffer].label.clone(),
            };
            format!("{}={label}", binding.name)
        });
        one.collect::<Vec<_>>().join(" ")
    }
}

/// Displays parameters as `name=value`.
struct Parameters<'a>(&'a Op);

impl fmt::Display for Parameters<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let declared = self.0.kernel().spec().params.iter().zip(self.0.bytes().chunks_exact(4));
        for (i, ((name, kind), bytes)) in declared.enumerate() {
            let word: u32 = bytemuck::pod_read_unaligned(bytes);
            let separator = if i == 0 { "" } else { " " };
            match (*kind, word) {
                ("f32", word) => write!(f, "{separator}{name}={:?}", f32::from_bits(word))?,
                (_, u32::MAX) => write!(f, "{separator}{name}=none")?,
                (_, word) => write!(f, "{separator}{name}={word}")?,
            }
        }
        Ok(())
    }
}
