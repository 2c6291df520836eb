//! The bit widths of vbit rows across tensors: the experts of one layer and projection share a budget.

use super::names::Expert;
use super::options::Options;
use super::plan::{Plan, mean_bits};
use crate::dtype::encode::{amplitudes, spread};
use crate::error::Result;
use crate::import::Tensor;
use std::collections::HashMap;

/// The widths of tensors. Those that share a budget are read when the first of them is asked for.
#[derive(Default)]
pub(super) struct Bits(HashMap<usize, Vec<u8>>);

impl Bits {
    /// The widths of the `index`-th tensor's rows; `None` if there are none to choose.
    ///
    /// Errors: those of reading, with the tensor's name.
    pub fn of(&mut self, index: usize, tensors: &[Tensor], plan: &Plan, options: &Options) -> Result<Option<Vec<u8>>> {
        if !plan.chooses_widths(index) {
            return Ok(None);
        }
        if let Some(widths) = self.0.get(&index) {
            return Ok(Some(widths.clone()));
        }
        let sharing = sharing(index, tensors, plan);
        let mut all = Vec::new();
        let mut rows = Vec::new();
        for &member in &sharing {
            let tensor = &tensors[member];
            let (count, cols) = tensor.data.rows_cols();
            let read = || {
                tensor.data.intact()?;
                let reader = tensor.data.reader()?;
                amplitudes(count, cols, &*reader)
            };
            let amplitudes = read().map_err(|err| err.context(format!("tensor '{}'", tensor.name)))?;
            let frequency = match (&options.router_stats, Expert::of(&tensor.name)) {
                (Some(stats), Some(expert)) => stats.of(&expert),
                _ => 1.0,
            };
            all.extend(amplitudes.into_iter().map(|amplitude| amplitude * frequency));
            rows.push(count);
        }
        let default = || mean_bits(&tensors[index].name, options);
        let mut widths = spread(&all, options.mean_bits.unwrap_or_else(default))?;
        for (&member, &rows) in sharing.iter().zip(&rows) {
            let rest = widths.split_off(rows);
            self.0.insert(member, std::mem::replace(&mut widths, rest));
        }
        Ok(self.0.get(&index).cloned())
    }
}

/// The tensors that share a budget with the `index`-th, which is one of them: experts of its layer and projection, with row
/// widths and rows of its length.
fn sharing(index: usize, tensors: &[Tensor], plan: &Plan) -> Vec<usize> {
    let Some(own) = Expert::of(&tensors[index].name) else {
        return vec![index];
    };
    let cols = tensors[index].data.rows_cols().1;
    let related = |&other: &usize| {
        let expert = Expert::of(&tensors[other].name);
        plan.chooses_widths(other)
            && tensors[other].data.rows_cols().1 == cols
            && expert.is_some_and(|expert| expert.before == own.before && expert.role == own.role)
    };
    (0..tensors.len()).filter(related).collect()
}
