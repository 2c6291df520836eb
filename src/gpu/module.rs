//! From a kernel's text to the module that the driver gets: branches on constants are taken here, and what no branch needs
//! any more is left out. Kernels are composed for several widths and types, so that much of their text is such branches,
//! and drivers that see them first unfold them: twice the time and the memory.

use crate::error::{Error, Kind, Result};
use std::collections::HashSet;
use wgpu::naga::compact::{KeepUnused, compact};
use wgpu::naga::front::wgsl::parse_str;
use wgpu::naga::{Arena, Block, Constant, Expression, Handle, Literal, Module, Statement};

/// Parses `text`. Errors: `DeviceError` with the kernel's name and the place.
pub(super) fn module(name: &str, text: &str) -> Result<Module> {
    let mut module = parse_str(text).map_err(|err| {
        let told = err.emit_to_string_with_path(text, name);
        Error::new(Kind::DeviceError, format!("kernel {name}: {}", told.trim_end()))
    })?;
    let Module {
        constants,
        global_expressions,
        functions,
        entry_points,
        ..
    } = &mut module;
    let entries = entry_points.iter_mut().map(|entry| &mut entry.function);
    for function in functions.iter_mut().map(|(_, function)| function).chain(entries) {
        let mut known = Known {
            expressions: &function.expressions,
            constants,
            global_expressions,
            evaluated: HashSet::new(),
        };
        known.decide(&mut function.body);
        // A name would keep what only a side that is gone evaluates.
        let evaluated = known.evaluated;
        function.named_expressions.retain(|named, _| evaluated.contains(named));
    }
    compact(&mut module, KeepUnused::No);
    Ok(module)
}

/// Where the value of a condition can be looked up.
struct Known<'a> {
    expressions: &'a Arena<Expression>,
    constants: &'a Arena<Constant>,
    global_expressions: &'a Arena<Expression>,
    /// What the statements that stay evaluate.
    evaluated: HashSet<Handle<Expression>>,
}

impl Known<'_> {
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
    fn decide(&mut self, block: &mut Block) {
        let mut decided = Block::with_capacity(block.len());
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
                        self.decide(taken);
                        decided.append(taken);
                        // What follows a side that leaves is never reached, and not valid there.
                        if decided.last().is_some_and(leaves) {
                            break;
                        }
                        continue;
                    }
                    self.decide(accept);
                    self.decide(reject);
                }
                Statement::Block(inner) => self.decide(inner),
                Statement::Loop { body, continuing, .. } => {
                    self.decide(body);
                    self.decide(continuing);
                }
                Statement::Switch { cases, .. } => cases.iter_mut().for_each(|case| self.decide(&mut case.body)),
                _ => {}
            }
            decided.push(statement, span);
        }
        *block = decided;
    }
}

fn leaves(statement: &Statement) -> bool {
    matches!(
        statement,
        Statement::Return { .. } | Statement::Break | Statement::Continue | Statement::Kill
    )
}

#[cfg(test)]
mod tests {
    use super::*;
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
        // The branch on what is not constant stays.
        let body = &module.entry_points[0].function.body;
        assert_eq!(body.iter().filter(|s| matches!(s, Statement::If { .. })).count(), 1);
        let valid = validator().validate(&module);
        assert!(valid.is_ok(), "{valid:?}");
    }

    #[test]
    fn every_kernel_stays_valid_and_none_grows() {
        let mut smaller = 0;
        for variant in crate::shader::all_variants() {
            let text = crate::shader::compose(&variant);
            let whole = parse_str(&text).unwrap();
            let module = module(&variant.name(), &text).unwrap();
            assert!(module.functions.len() <= whole.functions.len());
            smaller += usize::from(module.functions.len() < whole.functions.len());
            if let Err(err) = validator().validate(&module) {
                panic!("{}: {err:?}", variant.name());
            }
        }
        assert!(smaller > 0);
    }

    #[test]
    fn a_text_that_is_none_is_an_error_with_its_name_and_place() {
        let err = module("matvec.broken", "fn main() { let x = 1u + ; }").unwrap_err();
        assert_eq!(err.kind, Kind::DeviceError);
        assert!(err.message.contains("matvec.broken:1:"), "{}", err.message);
    }
}
