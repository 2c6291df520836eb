//! Which tensors lie on the device as f32 though their file holds fewer bits of them. No device here.
//!
//! There are two reasons: groups of 32 weights that straddle the rows of a matrix, and the gate and up projections of a
//! mixture's expert in different types. Both are rare, and have no kernels of their own.

use super::Plan;
use crate::container::{TensorId, Tensors};
use crate::dtype::Dtype;
use crate::dtype::planes::Planes;
use std::collections::BTreeMap;

/// A tensor that takes more bytes on the device than in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Widened {
    /// Its name.
    pub name: String,
    /// Its type in the file.
    pub dtype: Dtype,
    /// Bytes in the file.
    pub file_bytes: u64,
    /// Bytes on the device.
    pub device_bytes: u64,
}

impl Plan {
    /// The tensors that the plan lays out as f32 and the file does not, in the file's order. `tensors` are those that the plan was
    /// made for.
    pub fn widened(&self, tensors: &dyn Tensors) -> Vec<Widened> {
        let mut bytes: BTreeMap<TensorId, u64> = BTreeMap::new();
        for matrix in self.matrices.iter().filter(|matrix| matrix.planes == Planes::F32) {
            for segment in &matrix.segments {
                let row = segment.geometry.code_row_bytes() as u64;
                for run in &segment.runs {
                    *bytes.entry(matrix.parts[run.part]).or_default() += run.rows.len() as u64 * row;
                }
            }
        }
        bytes
            .into_iter()
            .map(|(id, device_bytes)| (&tensors.infos()[id], device_bytes))
            .filter(|(info, _)| info.dtype != Dtype::F32)
            .map(|(info, device_bytes)| Widened {
                name: info.name.clone(),
                dtype: info.dtype,
                file_bytes: info.nbytes,
                device_bytes,
            })
            .collect()
    }
}

/// What should be said about them: the first by name, of the others how many and how much. `None` if there are none.
pub fn widened_notice(widened: &[Widened]) -> Option<String> {
    let (first, others) = widened.split_first()?;
    let mut text = format!(
        "{} tensor '{}' has no kernels in its shape and lies on the device as f32: {} bytes instead of {}",
        first.dtype.name(),
        first.name,
        first.device_bytes,
        first.file_bytes
    );
    if !others.is_empty() {
        let sum = |of: fn(&Widened) -> u64| others.iter().map(of).sum::<u64>();
        text += &format!(
            ", and {} more like it: {} bytes instead of {}",
            others.len(),
            sum(|one| one.device_bytes),
            sum(|one| one.file_bytes)
        );
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::super::{Matrix, Stacking};
    use super::*;
    use crate::container::MemoryTensors;

    fn plan(shapes: &[(Dtype, u64, u64)]) -> (Plan, MemoryTensors) {
        let payload = |dtype: Dtype, rows: u64, cols: u64| match dtype.size(&[rows, cols]).unwrap() {
            crate::dtype::Size::Exact(bytes) => vec![0; bytes as usize],
            crate::dtype::Size::AtLeast(_) => panic!("wanted a type of fixed size"),
        };
        let tensors = shapes
            .iter()
            .enumerate()
            .map(|(i, &(dtype, rows, cols))| (format!("t{i}"), dtype, vec![rows, cols], payload(dtype, rows, cols)));
        let tensors = MemoryTensors::new(tensors).unwrap();
        let mut plan = Plan::of_nothing(0, 1, None);
        for id in 0..shapes.len() {
            // Two segments of 40 rows of two units.
            let limit = 32 * 256;
            let matrix = Matrix::stack(format!("m{id}"), &[id], Stacking::Rows, &tensors, limit).unwrap();
            plan.matrices.push(matrix);
        }
        (plan, tensors)
    }

    #[test]
    fn only_what_became_f32_is_told() {
        let (plan, tensors) = plan(&[
            (Dtype::Q4Block, 40, 36),
            (Dtype::Q4Block, 40, 64),
            (Dtype::F32, 40, 36),
            (Dtype::Q8Row, 40, 36),
            (Dtype::Q4Block, 3, 33),
        ]);
        let found = plan.widened(&tensors);
        let wanted = |name: &str, file_bytes, device_bytes| Widened {
            name: name.into(),
            dtype: Dtype::Q4Block,
            file_bytes,
            device_bytes,
        };
        // 45 and 4 groups of 18 bytes; rows of two units of 128 bytes, in as many segments as it takes.
        assert_eq!(found, [wanted("t0", 810, 40 * 256), wanted("t4", 72, 3 * 256)]);
        let notice = widened_notice(&found).unwrap();
        for part in [
            "q4_block",
            "'t0'",
            "10240 bytes instead of 810",
            "1 more",
            "768 bytes instead of 72",
        ] {
            assert!(notice.contains(part), "{notice}");
        }
        assert_eq!(widened_notice(&[]), None);
    }
}
