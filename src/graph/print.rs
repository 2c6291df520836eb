//! The printed form of a graph, for people and for snapshot tests.

use super::program::{Graph, Program, Selection, Step};
use crate::op::{Bind, Op};

impl Graph {
    /// Lists the steps of a program that a selection runs: label, operator with the layout of its weight, parameters,
    /// operands, grid.
    pub fn print(&self, program: &Program, selection: &Selection) -> String {
        let mut text = format!("{}:\n", program.name);
        for resolved in program.resolve(selection) {
            let step = &program.steps[resolved.step];
            let masked = if resolved.masked { ".masked" } else { "" };
            let planes = step
                .planes
                .map_or(String::new(), |planes| format!("[{}]", planes.name()));
            let (operator, operands) = (step.op.kernel().spec().name, self.operands(step));
            text += &format!("  {:<24} {operator}{masked}{planes} {operands}\n", step.label);
            text += &format!("  {:<24}   {} -> {:?}", "", parameters(&step.op), resolved.grid);
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

/// Parameters as `name=value`.
fn parameters(op: &Op) -> String {
    let declared = op.kernel().spec().params.iter().zip(op.bytes().chunks_exact(4));
    let one = declared.map(
        |((name, kind), bytes)| match (*kind, bytemuck::pod_read_unaligned(bytes)) {
            ("f32", word) => format!("{name}={:?}", f32::from_bits(word)),
            (_, u32::MAX) => format!("{name}=none"),
            (_, word) => format!("{name}={word}"),
        },
    );
    one.collect::<Vec<_>>().join(" ")
}
