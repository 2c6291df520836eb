//! One line of the table of kernel cases.

use super::maker::Maker;
use super::rig::Rig;
use crate::error::Result;
use std::sync::Arc;

type Build = dyn Fn(&mut Maker) -> Result<()> + Send + Sync;

/// An operator with a weight type and dimensions.
#[derive(Clone)]
pub struct Case {
    name: String,
    build: Arc<Build>,
}

impl Case {
    /// The unique name: operator and type, dimensions, flags.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The operator and type in the name.
    pub fn kind(&self) -> &str {
        self.name.split(' ').next().unwrap_or_default()
    }

    /// The case's graph and rounds, for a device that binds `max_binding` bytes at once.
    pub fn rig(&self, max_binding: u64) -> Result<Rig> {
        // Each case has its own random data, which does not depend on other cases (FNV-1a of the name, 32 bits).
        let hash = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
        let seed = self.name.bytes().fold(0x811c_9dc5, hash);
        let mut maker = Maker::new(seed.into(), max_binding);
        (self.build)(&mut maker).map_err(|err| err.context(&self.name))?;
        Ok(maker.finish())
    }
}

/// The words of a name whose conditions are true.
pub(super) fn flags<const N: usize>(all: [(bool, &str); N]) -> String {
    all.into_iter().filter(|flag| flag.0).map(|flag| flag.1).collect()
}

/// The cases, in order.
#[derive(Default)]
pub(super) struct Table {
    pub cases: Vec<Case>,
}

impl Table {
    /// Adds a case, and the function that makes its graph and rounds.
    pub fn add(&mut self, name: String, build: impl Fn(&mut Maker) -> Result<()> + Send + Sync + 'static) {
        self.cases.push(Case {
            name,
            build: Arc::new(build),
        });
    }
}
