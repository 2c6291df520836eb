//! Cases of mixtures of experts: counts of experts on both sides of a power of two, one up to the most there may be; ties,
//! biases and sigmoids; experts that a bank does not hold; banks in segments.

use super::{Overlay, Spec, Table, WHOLE, has_halves, overlays, runnable, segment_bytes};
use crate::dtype::Dtype;
use crate::parity::Tolerance;

/// Which kernel of a mixture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::parity) enum MoePart {
    Glu,
    /// `moe_matvec` as it makes gates.
    Gate,
    /// As it makes products with gates.
    Up,
    /// As it makes the shared expert's.
    SharedUp,
    Down,
    Route,
    Count,
    Lists,
    MatmulGlu,
    MatmulUp,
    Matmul,
    Combine,
}

/// A layer's experts, as one kernel sees them.
#[derive(Clone, Debug)]
pub(in crate::parity) struct Moe {
    pub part: MoePart,
    pub dtype: Dtype,
    pub experts: usize,
    pub top_k: usize,
    /// Outputs of an expert.
    pub outputs: usize,
    /// Columns of an expert.
    pub cols: usize,
    /// Outputs of the shared expert; 0 = none.
    pub shared: usize,
    /// Whether the shared expert's weight is a sigmoid of a logit.
    pub gated: bool,
    pub sigmoid: bool,
    pub renormalise: bool,
    pub biased: bool,
    /// Whether many logits are equal.
    pub ties: bool,
    /// Whether the bank lacks every third expert.
    pub partial: bool,
    pub gelu: bool,
    /// Largest magnitude of a weight.
    pub amplitude: f32,
    pub overlay: Overlay,
    /// One round each.
    pub columns: Vec<u32>,
    /// Bytes of a segment.
    pub max_binding: u64,
}

impl MoePart {
    const WITH_WEIGHTS: [MoePart; 8] = [
        MoePart::Glu,
        MoePart::Gate,
        MoePart::Up,
        MoePart::SharedUp,
        MoePart::Down,
        MoePart::MatmulGlu,
        MoePart::MatmulUp,
        MoePart::Matmul,
    ];

    fn stem(self) -> &'static str {
        match self {
            MoePart::Glu => "moe_glu",
            MoePart::Gate | MoePart::Up | MoePart::SharedUp => "moe_matvec",
            MoePart::Down => "moe_down",
            MoePart::Route => "moe_route",
            MoePart::Count => "moe_count",
            MoePart::Lists => "moe_lists",
            MoePart::MatmulGlu => "moe_matmul_glu",
            MoePart::MatmulUp => "moe_matmul_up",
            MoePart::Matmul => "moe_matmul",
            MoePart::Combine => "moe_combine",
        }
    }

    pub fn has_weights(self) -> bool {
        MoePart::WITH_WEIGHTS.contains(&self)
    }

    /// How its weights are to be understood.
    fn suffix(self) -> &'static str {
        match self {
            MoePart::Up => " gated",
            MoePart::SharedUp => " gated, shared",
            _ => "",
        }
    }

    /// Whether the weights are both gate and up projections.
    pub fn is_glu(self) -> bool {
        matches!(self, MoePart::Glu | MoePart::MatmulGlu)
    }

    fn tolerance(self) -> Tolerance {
        match self {
            MoePart::Glu | MoePart::Up | MoePart::SharedUp | MoePart::Route => Tolerance::Exponential,
            MoePart::MatmulGlu | MoePart::MatmulUp => Tolerance::Exponential,
            MoePart::Gate | MoePart::Down | MoePart::Matmul | MoePart::Combine => Tolerance::Summed,
            MoePart::Count | MoePart::Lists => Tolerance::Exact,
        }
    }
}

impl Table {
    pub(super) fn moe(&mut self) {
        for dtype in runnable() {
            for part in MoePart::WITH_WEIGHTS {
                let plain = plain(part, dtype);
                self.add_moe("", plain.clone());
                self.add_moe(
                    "",
                    Moe {
                        outputs: 33,
                        cols: 1056,
                        shared: 70,
                        gelu: true,
                        ..plain.clone()
                    },
                );
                self.add_moe(" segments", segmented(part, dtype));
                self.add_moe(
                    " partial",
                    Moe {
                        partial: true,
                        ..plain.clone()
                    },
                );
                for (what, overlay) in overlays(dtype) {
                    self.add_moe(
                        what,
                        Moe {
                            overlay,
                            ..plain.clone()
                        },
                    );
                }
                if has_halves(dtype) {
                    let amplitude = super::SUBNORMAL;
                    self.add_moe(
                        " subnormal",
                        Moe {
                            amplitude,
                            ..plain.clone()
                        },
                    );
                }
                if !dtype.needs_group_rows() {
                    self.add_moe(
                        "",
                        Moe {
                            cols: 36,
                            outputs: 7,
                            ..plain
                        },
                    );
                }
            }
        }
        for (experts, top_k) in [(1, 1), (5, 2), (7, 7), (60, 4), (127, 8), (256, 8), (512, 64)] {
            for part in MoePart::WITH_WEIGHTS {
                let moe = Moe {
                    experts,
                    top_k,
                    outputs: 6,
                    cols: 32,
                    shared: 12,
                    ..plain(part, Dtype::Q82f)
                };
                self.add_moe("", moe);
            }
            for part in [MoePart::Route, MoePart::Count, MoePart::Lists, MoePart::Combine] {
                let columns = vec![1, 2, 17, 64];
                let moe = Moe {
                    experts,
                    top_k,
                    columns,
                    ..plain(part, Dtype::F32)
                };
                self.add_moe("", moe);
            }
            for part in [MoePart::Glu, MoePart::Gate, MoePart::Route, MoePart::Count] {
                for flags in 1..16 {
                    let moe = Moe {
                        experts,
                        top_k,
                        sigmoid: flags & 1 != 0,
                        renormalise: flags & 2 != 0,
                        biased: flags & 4 != 0,
                        ties: flags & 8 != 0,
                        outputs: 2,
                        cols: 32,
                        columns: match part {
                            MoePart::Glu | MoePart::Gate => vec![2],
                            _ => vec![9],
                        },
                        ..plain(part, Dtype::F32)
                    };
                    self.add_moe("", moe);
                }
            }
        }
        for part in [MoePart::Glu, MoePart::SharedUp] {
            let plain = plain(part, Dtype::F16);
            self.add_moe(" ungated", Moe { gated: false, ..plain });
        }
        for shared in [0, 1, 48, 49] {
            for part in [MoePart::Glu, MoePart::MatmulGlu, MoePart::Route, MoePart::Combine] {
                let what = format!(" shared of {shared}");
                self.add_moe(
                    &what,
                    Moe {
                        shared,
                        ..plain(part, Dtype::F16)
                    },
                );
            }
        }
    }

    fn add_moe(&mut self, what: &str, moe: Moe) {
        let mut name = moe.part.stem().to_string();
        if moe.part.has_weights() {
            name += &format!(".{} {}x{}", moe.dtype.name(), moe.outputs, moe.cols);
        }
        name += &format!(" {} of {}", moe.top_k, moe.experts);
        for (asked, flag) in [
            (moe.sigmoid, " sigmoid"),
            (moe.renormalise, " renormalised"),
            (moe.biased, " biased"),
            (moe.ties, " ties"),
            (moe.gelu, " gelu"),
        ] {
            name += if asked { flag } else { "" };
        }
        name += moe.part.suffix();
        self.add(name + what, moe.part.tolerance(), Spec::Moe(moe));
    }
}

fn plain(part: MoePart, dtype: Dtype) -> Moe {
    Moe {
        part,
        dtype,
        experts: 8,
        top_k: 3,
        outputs: 24,
        cols: 96,
        shared: 40,
        gated: true,
        sigmoid: false,
        renormalise: false,
        biased: false,
        ties: false,
        partial: false,
        gelu: false,
        amplitude: 1.0,
        overlay: Overlay::Sparse,
        columns: match part {
            MoePart::Glu | MoePart::Gate | MoePart::Up | MoePart::SharedUp | MoePart::Down => vec![1, 8, 3],
            _ => vec![1, 5, 33],
        },
        max_binding: WHOLE,
    }
}

/// At least two segments: as much as 8 rows of all parts take, and half as much again where rows vary.
fn segmented(part: MoePart, dtype: Dtype) -> Moe {
    let plain = plain(part, dtype);
    let parts = match part {
        MoePart::SharedUp => 1,
        _ if part.is_glu() => 2 * plain.experts,
        _ => plain.experts,
    };
    // What 32 rows of three parts take, and more column scales than those of three.
    let columns = if dtype == Dtype::Q82f {
        parts * plain.cols * 2
    } else {
        0
    };
    Moe {
        outputs: 40,
        // A shared expert lies in banks of one segment only.
        shared: 0,
        max_binding: segment_bytes(dtype, plain.cols) * parts as u64 / 4 + columns as u64,
        ..plain
    }
}
