//! What decides the text of one pipeline besides its kernel: types of weights and caches, teams, columns.

use super::Kernel;
use crate::dtype::planes::Planes;

/// Element type of the key-value cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kv {
    /// Two bytes an element.
    F16,
    /// Four bytes an element.
    F32,
}

impl Kv {
    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        match self {
            Kv::F16 => 2,
            Kv::F32 => 4,
        }
    }

    /// The name of the option's value, and of the shader file's suffix.
    pub fn name(self) -> &'static str {
        match self {
            Kv::F16 => "f16",
            Kv::F32 => "f32",
        }
    }
}

/// How the matvec family's teams of 32 logical lanes are realised; the results are the same to the bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Team {
    /// Lanes of one subgroup: 4, 8, 16 or 32 of them, exchanging by shuffles.
    Subgroup {
        /// Physical lanes of a team.
        lanes: u32,
    },
    /// 32 threads that exchange through workgroup memory.
    Tree,
}

impl Team {
    /// Physical lanes of a team.
    pub fn lanes(self) -> u32 {
        match self {
            Team::Subgroup { lanes } => lanes,
            Team::Tree => 32,
        }
    }

    /// Threads of a workgroup.
    pub fn threads(self) -> u32 {
        match self {
            Team::Subgroup { lanes: 32 } => 128,
            Team::Subgroup { .. } | Team::Tree => 64,
        }
    }

    /// Teams of a workgroup.
    pub fn teams(self) -> u32 {
        self.threads() / self.lanes()
    }
}

/// Columns that one run of the decoding kernels can have.
pub const MAX_COLUMNS: u32 = 8;

/// Everything that decides the text of one pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Variant {
    /// The kernel.
    pub kernel: Kernel,
    /// The weight planes, for kernels with weights.
    pub planes: Option<Planes>,
    /// The cache's type, for kernels that touch it.
    pub kv: Option<Kv>,
    /// How teams are realised, for the matvec family.
    pub team: Option<Team>,
    /// Columns that a team computes side by side, for the matvec family: 1, 2, 4 or 8; 1 for the others.
    pub columns: u32,
    /// Whether `unpack2x16float` keeps subnormals on this device.
    pub half_native: bool,
}

impl Variant {
    /// Threads of a workgroup.
    pub fn threads(&self) -> u32 {
        match (self.kernel.row().threads, self.team) {
            (Some(threads), _) => threads,
            (None, Some(team)) => team.threads(),
            (None, None) => unreachable!("a kernel of the matvec family has a team"),
        }
    }

    /// The variant's name: kernel, planes, cache type, team.
    pub fn name(&self) -> String {
        let mut name = self.kernel.stem().to_string();
        if let Some(planes) = self.planes {
            name += &format!(".{}", planes.name());
        }
        if let Some(kv) = self.kv {
            name += &format!(".kv_{}", kv.name());
        }
        match self.team {
            Some(Team::Subgroup { lanes }) => name += &format!(".sg{lanes}"),
            Some(Team::Tree) => name += ".tree",
            None => {}
        }
        if self.columns != 1 {
            name += &format!(".c{}", self.columns);
        }
        if self.half_native { name } else { name + ".exact_half" }
    }
}
