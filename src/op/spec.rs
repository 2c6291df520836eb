//! What an operator declares: parameters, bindings, threads. The WGSL declarations are generated from it.

/// Index of a buffer of a graph.
pub type BufferId = usize;
/// Index of a matrix of a graph.
pub type MatrixId = usize;
/// Index of a vector of a graph.
pub type VectorId = usize;

/// The object that a step binds to one name of its operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bind {
    /// Matrix and segment. Its planes are two bindings in WGSL, `codes` and `scales`.
    Weight(MatrixId, usize),
    /// A vector.
    Vector(VectorId),
    /// A buffer.
    Buffer(BufferId),
}

/// How a kernel uses a storage binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// `var<storage, read>`
    Read,
    /// `var<storage, read_write>`
    Write,
}

/// One storage binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    /// The name in WGSL and in [`super::host::Operands`]; `w` is a weight.
    pub name: &'static str,
    /// How the kernel uses it.
    pub access: Access,
    /// The WGSL type; empty for a weight, whose two bindings have fixed types.
    pub wgsl: &'static str,
}

impl Binding {
    /// Whether it is a weight, which is two bindings in WGSL.
    pub fn is_weight(&self) -> bool {
        self.wgsl.is_empty()
    }
}

/// The declaration of an operator, which does not depend on its parameters.
#[derive(Debug)]
pub struct Spec {
    /// The stem of the operator's Rust and WGSL files, and its name in reports.
    pub name: &'static str,
    /// The operator's WGSL, without the generated declarations.
    pub text: &'static str,
    /// Names and WGSL types of the parameters, 4 bytes each.
    pub params: &'static [(&'static str, &'static str)],
    /// The bindings in order. A weight is the first.
    pub bindings: &'static [Binding],
    /// Threads of a workgroup; `None`: the variant's [`crate::shader::Team`] decides.
    pub threads: Option<u32>,
    /// Whether there is a variant whose subgroups of 8 lanes share what they load.
    pub shares: bool,
}

impl Spec {
    /// Whether the kernel reads a weight and therefore exists for every layout of planes.
    pub fn has_weight(&self) -> bool {
        self.bindings.first().is_some_and(Binding::is_weight)
    }

    /// Whether the kernel uses the key-value cache and therefore exists for every cache type.
    pub fn has_kv(&self) -> bool {
        self.bindings.iter().any(|binding| binding.wgsl.contains("Kv4"))
    }

    /// Whether a masked variant exists.
    pub fn has_mask(&self) -> bool {
        self.position("list").is_some()
    }

    /// Whether one kernel can compute several tokens side by side.
    pub fn is_wide(&self) -> bool {
        self.threads.is_none() && self.has_mask()
    }

    /// Index of a binding by name.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.bindings.iter().position(|binding| binding.name == name)
    }

    /// The storage bindings as WGSL has them, from binding 1 on: name, access, type.
    pub fn storage(&self) -> impl Iterator<Item = (&'static str, Access, &'static str)> {
        self.bindings.iter().flat_map(|binding| match binding.is_weight() {
            true => vec![
                ("codes", Access::Read, "array<vec4<u32>>"),
                ("scales", Access::Read, "array<u32>"),
            ],
            false => vec![(binding.name, binding.access, binding.wgsl)],
        })
    }

    /// The WGSL `Params` structure and the declarations of all bindings.
    pub fn declarations(&self) -> String {
        let mut text = "struct Params {\n".to_string();
        for (name, kind) in self.params {
            text += &format!("    {name}: {kind},\n");
        }
        text += "}\n@group(0) @binding(0) var<uniform> params: Params;\n";
        for (i, (name, access, kind)) in self.storage().enumerate() {
            let access = match access {
                Access::Read => "read",
                Access::Write => "read_write",
            };
            text += &format!("@group(0) @binding({}) var<storage, {access}> {name}: {kind};\n", i + 1);
        }
        text
    }
}
