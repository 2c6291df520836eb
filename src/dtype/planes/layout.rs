//! The table of device layouts.

use super::blocks;
use cmf_kernels_ref::dtype::gguf::types;

/// A device layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Planes {
    /// f32.
    F32,
    /// f16.
    F16,
    /// bf16.
    Bf16,
    /// Signed bytes, an f16 scale per row.
    I8,
    /// Signed bytes, an f16 scale per row and one per column.
    I8Col,
    /// 4-bit codes, an f16 scale per group.
    Nib4,
    /// 4-bit codes, an f16 scale for 32 codes, which may belong to two rows.
    Nib4Flat,
    /// 4-bit codes, a 5-bit rung per group on the row's ladder of scales.
    Nib4Ladder,
    /// One bit per weight, an f16 scale per group.
    Bits1,
    /// The same with an overlay.
    Bits1Overlay,
    /// Two bits per weight, an f16 scale per group, and an overlay.
    Bits2,
    /// 3, 4, 5, 6 or 8 bits per weight, different from row to row, an f16 scale per group.
    BitsN,
    /// Signed bytes, an f16 scale per group.
    I8Group,
    /// 4-bit codes, an f16 scale and an f16 minimum per group.
    Q41,
    /// 5-bit codes, an f16 scale per group.
    Q50,
    /// 5-bit codes, an f16 scale and an f16 minimum per group.
    Q51,
    /// 4-bit codes of a table, an f16 scale per group.
    Iq4Nl,
    /// 4-bit floating-point numbers, a power of two per group.
    Mxfp4,
    /// 2-bit codes, 4-bit steps of scale and offset per half group, two f16 scales per 8 groups.
    Q2K,
    /// 3-bit codes, a 6-bit step per half group, an f16 scale per 8 groups.
    Q3K,
    /// 4-bit codes, 6-bit steps of scale and offset per group, two f16 scales per 8 groups.
    Q4K,
    /// 5-bit codes, else as [`Planes::Q4K`].
    Q5K,
    /// 6-bit codes, an 8-bit step per half group, an f16 scale per 8 groups.
    Q6K,
    /// 4-bit codes of a table, a 6-bit step per group, an f16 scale per 8 groups.
    Iq4Xs,
    /// 2-bit codes, an f16 scale per 8 groups.
    Tq2,
    /// 2-bit codes, an f16 scale per 4 groups.
    Pq2,
}

/// How the rows of a layout differ in size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rows {
    /// All have the same size.
    Even,
    /// Each has as many overlay entries as it needs.
    Overlay,
    /// Each has a bit width of its own; eight rows share a record.
    Widths,
    /// Groups cross rows.
    Flat,
}

/// One row of the table.
pub(super) struct Layout {
    /// Name in shader variants.
    name: &'static str,
    /// The files of `shaders/dtype` that decode it, as stem and text.
    shaders: &'static [(&'static str, &'static str)],
    /// Whether kernels decode f16.
    has_halves: bool,
    /// Bytes of a group's codes; 0 where rows differ in it.
    pub group_bytes: usize,
    /// Bytes of the record of a row with so many groups; 0 where rows have no record of their own.
    pub record_bytes: fn(groups: usize) -> usize,
    /// How rows differ in size.
    pub rows: Rows,
    /// Whether there are scales per column.
    has_column_scales: bool,
    /// Unused bytes at the end of the code plane and of the scale plane: a binding has at least one word, and kernels may
    /// read a little past the last row.
    pub spare_bytes: [usize; 2],
}

const PLAIN: Layout = Layout {
    name: "",
    shaders: &[],
    has_halves: true,
    group_bytes: 0,
    record_bytes: |_| 0,
    rows: Rows::Even,
    has_column_scales: false,
    spare_bytes: [0, 0],
};

/// Bytes of an f16 per group, padded to whole words.
fn padded_halves(groups: usize) -> usize {
    groups.div_ceil(2) * 4
}

macro_rules! shaders {
    ($($stem:literal)*) => {
        &[$(($stem, include_str!(concat!("../../../shaders/dtype/", $stem, ".wgsl")))),*]
    };
}

/// The layout of a GGUF block type: its name, which is that of the file with its constants, its block, the bits of a code.
macro_rules! blocks {
    ($name:literal, $block:ident, $bits:literal) => {
        Layout {
            name: $name,
            shaders: shaders!($name "block" "no_overlay"),
            group_bytes: blocks::group_bytes($bits),
            record_bytes: |groups| blocks::record_bytes(&types::$block, groups),
            // Kernels read the word after the last step.
            spare_bytes: [0, 4],
            ..PLAIN
        }
    };
}

/// In the order of the enum.
static TABLE: [Layout; 26] = [
    Layout {
        name: "f32",
        shaders: shaders!("f32" "no_overlay"),
        has_halves: false,
        group_bytes: 128,
        spare_bytes: [0, 4],
        ..PLAIN
    },
    Layout {
        name: "f16",
        shaders: shaders!("f16" "wide16" "no_overlay"),
        group_bytes: 64,
        spare_bytes: [0, 4],
        ..PLAIN
    },
    Layout {
        name: "bf16",
        shaders: shaders!("bf16" "wide16" "no_overlay"),
        has_halves: false,
        group_bytes: 64,
        spare_bytes: [0, 4],
        ..PLAIN
    },
    Layout {
        name: "i8",
        shaders: shaders!("i8" "i8_codes" "no_overlay"),
        group_bytes: 32,
        record_bytes: |_| 2,
        ..PLAIN
    },
    Layout {
        name: "i8_col",
        shaders: shaders!("i8_col" "i8_codes" "no_overlay"),
        group_bytes: 32,
        record_bytes: |_| 2,
        has_column_scales: true,
        ..PLAIN
    },
    Layout {
        name: "nib4",
        shaders: shaders!("group_words" "nib4_codes" "no_overlay"),
        group_bytes: 16,
        record_bytes: padded_halves,
        ..PLAIN
    },
    Layout {
        name: "nib4_flat",
        shaders: shaders!("nib4_flat" "no_overlay"),
        record_bytes: |_| 4,
        rows: Rows::Flat,
        spare_bytes: [16, 4],
        ..PLAIN
    },
    Layout {
        name: "nib4_ladder",
        shaders: shaders!("nib4_ladder" "nib4_codes" "no_overlay"),
        group_bytes: 16,
        record_bytes: |groups| 4 + (groups * 5).div_ceil(32) * 4,
        spare_bytes: [0, 4],
        ..PLAIN
    },
    Layout {
        name: "bits1",
        shaders: shaders!("group" "bits1_codes" "no_overlay"),
        group_bytes: 4,
        record_bytes: |groups| groups * 2,
        ..PLAIN
    },
    Layout {
        name: "bits1_overlay",
        shaders: shaders!("group_overlay" "bits1_codes"),
        group_bytes: 4,
        record_bytes: |groups| 4 + padded_halves(groups),
        rows: Rows::Overlay,
        ..PLAIN
    },
    Layout {
        name: "bits2",
        shaders: shaders!("group_overlay" "bits2_codes"),
        group_bytes: 8,
        record_bytes: |groups| 4 + padded_halves(groups),
        rows: Rows::Overlay,
        ..PLAIN
    },
    Layout {
        name: "bits_n",
        shaders: shaders!("bits_n" "no_overlay"),
        rows: Rows::Widths,
        ..PLAIN
    },
    Layout {
        name: "i8_group",
        shaders: shaders!("i8_group" "i8_codes" "no_overlay"),
        group_bytes: 32,
        record_bytes: padded_halves,
        ..PLAIN
    },
    blocks!("q4_1", Q4_1, 4),
    blocks!("q5_0", Q5_0, 5),
    blocks!("q5_1", Q5_1, 5),
    blocks!("iq4_nl", IQ4_NL, 4),
    blocks!("mxfp4", MXFP4, 4),
    blocks!("q2_k", Q2_K, 2),
    blocks!("q3_k", Q3_K, 3),
    blocks!("q4_k", Q4_K, 4),
    blocks!("q5_k", Q5_K, 5),
    blocks!("q6_k", Q6_K, 6),
    blocks!("iq4_xs", IQ4_XS, 4),
    blocks!("tq2_0", TQ2_0, 2),
    blocks!("pq2_0", PQ2_0, 2),
];

impl Planes {
    /// Every layout.
    pub const ALL: [Planes; TABLE.len()] = [
        Planes::F32,
        Planes::F16,
        Planes::Bf16,
        Planes::I8,
        Planes::I8Col,
        Planes::Nib4,
        Planes::Nib4Flat,
        Planes::Nib4Ladder,
        Planes::Bits1,
        Planes::Bits1Overlay,
        Planes::Bits2,
        Planes::BitsN,
        Planes::I8Group,
        Planes::Q41,
        Planes::Q50,
        Planes::Q51,
        Planes::Iq4Nl,
        Planes::Mxfp4,
        Planes::Q2K,
        Planes::Q3K,
        Planes::Q4K,
        Planes::Q5K,
        Planes::Q6K,
        Planes::Iq4Xs,
        Planes::Tq2,
        Planes::Pq2,
    ];

    pub(super) fn layout(self) -> &'static Layout {
        &TABLE[self as usize]
    }

    /// The name in shader variants.
    pub fn name(self) -> &'static str {
        self.layout().name
    }

    /// The files of `shaders/dtype` that decode it, as stem and text, in the order in which they are concatenated.
    pub fn shaders(self) -> &'static [(&'static str, &'static str)] {
        self.layout().shaders
    }

    /// Whether its kernels decode f16.
    pub fn has_halves(self) -> bool {
        self.layout().has_halves
    }

    /// Whether it has scales per column, for each of at most three stacked tensors.
    pub fn has_column_scales(self) -> bool {
        self.layout().has_column_scales
    }

    /// Whether single weights are replaced by the values of an overlay.
    pub fn has_overlay(self) -> bool {
        self.layout().rows == Rows::Overlay
    }

    /// Whether [`SHARED_ROWS`](super::SHARED_ROWS) rows share a record.
    pub fn shares_records(self) -> bool {
        self.layout().rows == Rows::Widths
    }

    /// Whether its rows differ in size.
    pub fn varies(self) -> bool {
        self.layout().rows != Rows::Even
    }
}
