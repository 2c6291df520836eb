//! Cases of groups of 32 weights that straddle rows.

use super::{Linear, Product, SUBNORMAL, Table, WHOLE, segment_bytes};
use crate::dtype::Dtype;

impl Table {
    /// Groups of 32 weights that straddle rows: rows that begin anywhere in a group, also the first of a segment or of a tensor.
    pub(super) fn straddling(&mut self) {
        let dtype = Dtype::Q4Block;
        self.add_embed("", dtype, 50, 1001, 1.0, WHOLE);
        self.add_embed(" segments", dtype, 100, 50, 1.0, segment_bytes(dtype, 50));
        self.add_embed(" subnormal", dtype, 33, 50, SUBNORMAL, WHOLE);
        for product in Product::ALL.into_iter().chain(Product::LISTED) {
            for (columns, rows, cols) in [(1, 33, 1001), (2, 6, 50), (4, 7, 31), (8, 9, 97), (1, 41, 513)] {
                let linear = Linear {
                    columns: vec![columns],
                    ..self.plain(product, dtype, rows, cols)
                };
                self.add_linear("", linear);
            }
            let plain = self.plain(product, dtype, 101, 50);
            let linear = Linear {
                max_binding: segment_bytes(dtype, 50) * if product.is_pair() { 2 } else { 1 },
                ..plain.clone()
            };
            self.add_linear(" segments", linear);
            let amplitude = SUBNORMAL;
            self.add_linear(" subnormal", Linear { amplitude, ..plain });
        }
        for product in [Product::Matvec, Product::Matmul] {
            let linear = Linear {
                parts: vec![(dtype, 71), (dtype, 25), (dtype, 23)],
                ..self.plain(product, dtype, 71, 50)
            };
            let max_binding = segment_bytes(dtype, 50);
            self.add_linear("", linear.clone());
            self.add_linear(" segments", Linear { max_binding, ..linear });
        }
    }
}
