//! The numeric formats.

/// A numeric format. Each is stored in one layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// bf16.
    Bf16,
    /// f32.
    Fp32,
    /// Signed integers of 32 bits: tables, never weights.
    I32,
    /// Codes of 4 bits in two's complement, an f16 scale per 64.
    Q4G64,
    /// Codes of 5 bits in two's complement, an f16 scale per 64.
    Q5G64,
    /// Codes of 6 bits in two's complement, an f16 scale per 64.
    Q6G64,
    /// Signed bytes, an f16 scale per 32.
    W8G32,
    /// Ternary codes of two bits, an f16 scale per 128.
    Pq2_0,
    /// Ternary codes, five to a byte, an f16 scale per 128.
    Ptq1_0,
    /// Floats of 4 bits, an e4m3 scale per 16, one divisor for all.
    Nvfp4,
    /// Floats of 8 bits (e4m3), a bf16 scale per row.
    Fp8Row,
}

/// The encoding of a format.
pub(super) enum Coding {
    /// Words of so many bytes in row-major order.
    Words(u64),
    /// Groups of columns in three planes.
    Groups {
        /// Columns of a group.
        columns: u64,
        /// Bytes of a group in the base plane.
        base: u64,
        /// Bytes of a group in the high plane.
        high: u64,
    },
    /// Two codes to a byte, then scales in blocks of 128 rows and 4 groups, then one f32.
    Nvfp4,
    /// Bytes, then a bf16 per row.
    Fp8Row,
}

impl Format {
    /// Every format.
    pub const ALL: [Format; 11] = [
        Format::Bf16,
        Format::Fp32,
        Format::I32,
        Format::Q4G64,
        Format::Q5G64,
        Format::Q6G64,
        Format::W8G32,
        Format::Pq2_0,
        Format::Ptq1_0,
        Format::Nvfp4,
        Format::Fp8Row,
    ];

    fn row(self) -> (&'static str, Coding) {
        let groups = |columns, base, high| Coding::Groups { columns, base, high };
        match self {
            Format::Bf16 => ("BF16", Coding::Words(2)),
            Format::Fp32 => ("FP32", Coding::Words(4)),
            Format::I32 => ("I32", Coding::Words(4)),
            Format::Q4G64 => ("Q4G64_F16S", groups(64, 32, 0)),
            Format::Q5G64 => ("Q5G64_F16S", groups(64, 32, 8)),
            Format::Q6G64 => ("Q6G64_F16S", groups(64, 32, 16)),
            Format::W8G32 => ("W8G32_F16S", groups(32, 32, 0)),
            Format::Pq2_0 => ("PQ2_0_G128", groups(128, 32, 0)),
            Format::Ptq1_0 => ("PTQ1_0_G128", groups(128, 24, 2)),
            Format::Nvfp4 => ("NVFP4", Coding::Nvfp4),
            Format::Fp8Row => ("FP8_E4M3FN_ROW_BF16S", Coding::Fp8Row),
        }
    }

    /// The name in a directory.
    pub fn name(self) -> &'static str {
        self.row().0
    }

    pub(super) fn coding(self) -> Coding {
        self.row().1
    }

    /// The format of this name.
    pub fn from_name(name: &str) -> Option<Format> {
        Format::ALL.into_iter().find(|format| format.name() == name)
    }

    /// The name of the layout that holds it.
    pub fn layout(self) -> &'static str {
        match self.coding() {
            Coding::Words(_) => "contiguous-le-v1",
            Coding::Groups { .. } => "row-split-k128-v1",
            Coding::Nvfp4 => "blockscale-k16-m128x4-v1",
            Coding::Fp8Row => "row-scale-v1",
        }
    }
}

/// Where the scales of an NVFP4 matrix begin; `None` on overflow.
pub(super) fn nvfp4_scales_at(rows: u64, cols: u64) -> Option<u64> {
    rows.checked_mul(cols)?.div_ceil(2).checked_next_multiple_of(256)
}

/// Where the row scales of an FP8 matrix begin; `None` on overflow.
pub(super) fn fp8_scales_at(rows: u64, cols: u64) -> Option<u64> {
    rows.checked_mul(cols)?.checked_next_multiple_of(256)
}
