//! Pipelines: containers with several networks, each described by a configuration of its own (section 12 of the format).
//!
//! A component is a prefix of tensor names. Its `config.json` is a tensor of bytes beside its weights.

/// The `arch_name` of the pipeline that makes pictures: Lumina-Image 2.0, a text encoder, a denoiser and a decoder.
pub const LUMINA2: &str = "lumina2-image";

/// The `arch_name` of pipelines for video with sound.
const VIDEO: [&str; 2] = ["minimax-h3-av", "ltx-2.5-av"];

/// The prefix of the tensors of a denoiser, which no other model has.
pub const DENOISER: &str = "dit.";

/// The end of the names of configurations.
pub const CONFIG: &str = ".config_json";

/// Whether an `arch_name` is that of a known pipeline.
pub fn is_known(arch_name: &str) -> bool {
    arch_name == LUMINA2 || VIDEO.contains(&arch_name)
}

/// Whether the tensor of this name is a configuration.
pub fn is_config(tensor: &str) -> bool {
    tensor.ends_with(CONFIG)
}

/// The name of the configuration of a component, such as `dit`.
pub fn config_name(component: &str) -> String {
    format!("{component}{CONFIG}")
}
