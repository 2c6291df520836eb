//! Element types of the key-value cache.

/// Element type of the key-value cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Kv {
    /// 2 bytes.
    #[default]
    F16,
    /// 4 bytes.
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

    /// The name in options, and the suffix of the shader file.
    pub fn name(self) -> &'static str {
        match self {
            Kv::F16 => "f16",
            Kv::F32 => "f32",
        }
    }
}
