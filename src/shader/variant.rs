//! Variants of operators: types of weights and caches, teams, width, masks.

use crate::dtype::planes::Planes;
use crate::op::{Kernel, Kv, Spec};

/// How a team of 32 logical lanes is realised. All ways give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Team {
    /// 4, 8, 16 or 32 lanes of one subgroup, which exchange values by shuffles.
    Subgroup {
        /// Physical lanes of a team.
        lanes: u32,
    },
    /// 32 threads that exchange values through workgroup memory.
    Tree,
}

impl Team {
    /// Every way to realise a team.
    pub const ALL: [Team; 5] = [
        Team::Subgroup { lanes: 4 },
        Team::Subgroup { lanes: 8 },
        Team::Subgroup { lanes: 16 },
        Team::Subgroup { lanes: 32 },
        Team::Tree,
    ];

    /// The subgroups whose lanes share what they load, where a kernel has such a variant. Drivers that compute the lanes of
    /// a load one after another have subgroups of this size.
    pub const SHARING: Team = Team::Subgroup { lanes: 8 };

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

/// Everything that decides the text of one pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Variant {
    /// The operator.
    pub kernel: Kernel,
    /// The layout of the weight's planes, for kernels with a weight.
    pub planes: Option<Planes>,
    /// The cache's type, for kernels that touch it.
    pub kv: Option<Kv>,
    /// How teams are realised, for kernels with teams. For kernels without teams, that subgroups of this size share what
    /// they load.
    pub team: Option<Team>,
    /// Tokens that a team computes side by side: 1, 2, 4 or 8; 1 for kernels that are not wide.
    pub width: u32,
    /// Whether the kernel computes only the rows, outputs, groups or heads that a mask list names.
    pub masked: bool,
    /// Whether `unpack2x16float` keeps subnormals on this device.
    pub half_native: bool,
}

impl Variant {
    /// Threads of a workgroup.
    pub fn threads(&self) -> u32 {
        let team = self.team.map_or(1, Team::threads);
        self.kernel.spec().threads.unwrap_or(team)
    }

    /// Teams of a workgroup; 1 for kernels without teams.
    pub fn teams(&self) -> u32 {
        match self.kernel.spec().threads {
            None => self.team.map_or(1, Team::teams),
            Some(_) => 1,
        }
    }

    /// The team of an operator's variant on a device that realises teams in this way.
    pub fn team_of(spec: &Spec, of_device: Team) -> Option<Team> {
        let exists = spec.threads.is_none() || (spec.shares && of_device == Team::SHARING);
        exists.then_some(of_device)
    }

    /// The variant's name: operator, mask, planes, cache type, team, width.
    pub fn name(&self) -> String {
        let mut name = self.kernel.spec().name.to_string();
        if self.masked {
            name += ".masked";
        }
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
        if self.width != 1 {
            name += &format!(".w{}", self.width);
        }
        if self.half_native { name } else { name + ".exact_half" }
    }

    /// Every variant that exists.
    pub fn all() -> Vec<Variant> {
        Kernel::ALL.iter().flat_map(|&kernel| Variant::of(kernel)).collect()
    }

    /// Every variant of one operator.
    pub fn of(kernel: Kernel) -> Vec<Variant> {
        let spec = kernel.spec();
        let planes = match spec.has_weight() {
            true => Planes::ALL.map(Some).to_vec(),
            false => vec![None],
        };
        let kvs = match spec.has_kv() {
            true => vec![Some(Kv::F16), Some(Kv::F32)],
            false => vec![None],
        };
        let teams = match spec.threads {
            None => Team::ALL.map(Some).to_vec(),
            Some(_) if spec.shares => vec![None, Some(Team::SHARING)],
            Some(_) => vec![None],
        };
        let widths: &[u32] = if spec.is_wide() { &[1, 2, 4, 8] } else { &[1] };
        let masks: &[bool] = if spec.has_mask() { &[false, true] } else { &[false] };
        let mut all = Vec::new();
        for &planes in &planes {
            let halves: &[bool] = match planes.is_some_and(Planes::has_halves) {
                true => &[true, false],
                false => &[true],
            };
            for &kv in &kvs {
                for &team in &teams {
                    for &width in widths {
                        for &masked in masks {
                            all.extend(halves.iter().map(|&half_native| Variant {
                                kernel,
                                planes,
                                kv,
                                team,
                                width,
                                masked,
                                half_native,
                            }));
                        }
                    }
                }
            }
        }
        all
    }
}
