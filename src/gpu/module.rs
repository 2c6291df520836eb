//! Parses the text of a kernel, resolves branches on constants, and removes code that is then unreachable.
//!
//! Kernels are composed for several widths and types, so they have many such branches. With them, drivers take twice
//! the time and memory to compile.

use crate::error::{Result, error};
use std::collections::HashSet;
use wgpu::naga::compact::{KeepUnused, compact};
use wgpu::naga::front::wgsl::parse_str;
use wgpu::naga::{Arena, Block, Constant, Expression, Handle, Literal, Module, Statement};

/// Parses a text and removes its dead branches. Errors: `DeviceError` with the kernel's name, line and column.
pub(super) fn module(name: &str, text: &str) -> Result<Module> {
    let mut module = parse_str(text).map_err(|err| {
        let message = err.emit_to_string_with_path(text, name);
        error!(DeviceError, "kernel {name}: {}", message.trim_end())
    })?;
    simplify(&mut module);
    Ok(module)
}

/// Resolves the branches whose conditions are constants, and removes everything that is then unused.
pub fn simplify(module: &mut Module) {
    let Module {
        constants,
        global_expressions,
        functions,
        entry_points,
        ..
    } = &mut *module;
    let entries = entry_points.iter_mut().map(|entry| &mut entry.function);
    for function in functions.iter_mut().map(|(_, function)| function).chain(entries) {
        let mut branches = Branches {
            expressions: &function.expressions,
            constants,
            global_expressions,
            evaluated: HashSet::new(),
        };
        branches.resolve(&mut function.body);
        // The name of an expression that only a removed branch evaluates would keep it alive.
        let evaluated = branches.evaluated;
        function.named_expressions.retain(|named, _| evaluated.contains(named));
    }
    compact(module, KeepUnused::No);
}

/// Resolves the branches of one function.
struct Branches<'a> {
    expressions: &'a Arena<Expression>,
    constants: &'a Arena<Constant>,
    global_expressions: &'a Arena<Expression>,
    /// Expressions that the remaining statements evaluate.
    evaluated: HashSet<Handle<Expression>>,
}

impl Branches<'_> {
    /// The value of a condition that is constant.
    fn value(&self, condition: Handle<Expression>) -> Option<bool> {
        let expression = match self.expressions[condition] {
            Expression::Constant(constant) => &self.global_expressions[self.constants[constant].init],
            ref other => other,
        };
        match expression {
            Expression::Literal(Literal::Bool(value)) => Some(*value),
            _ => None,
        }
    }

    /// Replaces each branch on a constant by the side that is taken.
    fn resolve(&mut self, block: &mut Block) {
        let mut resolved = Block::with_capacity(block.len());
        for (mut statement, span) in std::mem::take(block).span_into_iter() {
            match &mut statement {
                Statement::Emit(range) => self.evaluated.extend(range.clone()),
                Statement::If {
                    condition,
                    accept,
                    reject,
                } => {
                    if let Some(value) = self.value(*condition) {
                        let taken = if value { accept } else { reject };
                        self.resolve(taken);
                        resolved.append(taken);
                        // Statements after one that leaves the block are unreachable, and naga rejects them.
                        if resolved.last().is_some_and(leaves) {
                            break;
                        }
                        continue;
                    }
                    self.resolve(accept);
                    self.resolve(reject);
                }
                Statement::Block(inner) => self.resolve(inner),
                Statement::Loop { body, continuing, .. } => {
                    self.resolve(body);
                    self.resolve(continuing);
                }
                Statement::Switch { cases, .. } => cases.iter_mut().for_each(|case| self.resolve(&mut case.body)),
                _ => {}
            }
            resolved.push(statement, span);
        }
        *block = resolved;
    }
}

/// Whether no statement after this one is reached.
fn leaves(statement: &Statement) -> bool {
    matches!(
        statement,
        Statement::Return { .. } | Statement::Break | Statement::Continue | Statement::Kill
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;
    use wgpu::naga::valid::{Capabilities, ShaderStages, SubgroupOperationSet, ValidationFlags, Validator};

    fn validator() -> Validator {
        let mut validator = Validator::new(ValidationFlags::all(), Capabilities::all());
        validator.subgroup_stages(ShaderStages::all());
        validator.subgroup_operations(SubgroupOperationSet::all());
        validator
    }

    #[test]
    fn branches_on_constants_are_taken_and_the_rest_is_left_out() {
        let text = "
            const COLS: u32 = 1u;
            @group(0) @binding(0) var<storage, read_write> y: array<f32>;
            fn unused(i: u32) -> f32 { return y[i] * 3.0; }
            fn early(i: u32) -> f32 {
                if (COLS == 1u) { return 2.0; }
                return unused(i);
            }
            @compute @workgroup_size(1)
            fn main(@builtin(global_invocation_id) id: vec3<u32>) {
                for (var i = 0u; i < id.y; i += 1u) {
                    if (COLS > 1u) { y[i] = unused(i); } else { y[i] = early(i); }
                }
                if (id.x > 3u) { y[0] = 1.0; }
            }";
        let module = module("test", text).unwrap();
        let names: Vec<_> = module
            .functions
            .iter()
            .map(|(_, f)| f.name.as_deref().unwrap())
            .collect();
        assert_eq!(names, ["early"]);
        assert!(matches!(
            module.functions.iter().next().unwrap().1.body.last(),
            Some(Statement::Return { .. })
        ));
        // The branch on a value that is not constant stays.
        let body = &module.entry_points[0].function.body;
        assert_eq!(body.iter().filter(|s| matches!(s, Statement::If { .. })).count(), 1);
        let valid = validator().validate(&module);
        assert!(valid.is_ok(), "{valid:?}");
    }

    #[test]
    fn a_text_that_is_none_is_an_error_with_its_name_and_place() {
        let err = module("matvec.broken", "fn main() { let x = 1u + ; }").unwrap_err();
        assert_eq!(err.kind, Kind::DeviceError);
        assert!(err.message.contains("matvec.broken:1:"), "{}", err.message);
    }
}
