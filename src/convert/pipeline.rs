//! Matrices of pipelines whose type is not that of the others.

use crate::dtype::Dtype;
use crate::import::Tensor;

/// The role of a matrix of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Role {
    /// A convolution. Kernels read its weights in f32, f16 and bf16 only.
    Convolution,
    /// The first and the last layers of denoiser and decoder: small, and every error of theirs is one of the whole picture.
    Ends,
    /// The embedding of the text encoder, and the matrices that scale and gate the layers of the denoiser.
    Wide,
}

impl Role {
    /// Every role with its name in notes.
    pub const NAMES: [(Role, &str); 3] = [
        (Role::Convolution, "convolutions"),
        (Role::Ends, "small matrices at the ends of denoiser and decoder"),
        (Role::Wide, "matrices of embedding and modulation"),
    ];

    /// The role of a tensor; `None` for one without a rule of its own.
    pub fn of(tensor: &Tensor) -> Option<Role> {
        const ENDS: [&str; 4] = [
            "dit.x_embedder.",
            "dit.time_caption_embed.timestep_embedder.",
            "dit.norm_out.",
            "vae.",
        ];
        let name = tensor.name.as_str();
        if tensor.data.shape.len() == 4 {
            return Some(Role::Convolution);
        }
        if ENDS.iter().any(|prefix| name.starts_with(prefix)) {
            return Some(Role::Ends);
        }
        let wide =
            name == "te.embed_tokens.weight" || name.starts_with("dit.") && name.ends_with(".norm1.linear.weight");
        wide.then_some(Role::Wide)
    }

    /// The type when the other matrices are to be `quant`.
    pub fn dtype(self, quant: Dtype) -> Dtype {
        match self {
            _ if quant.code_bits() >= 16 => quant,
            Role::Convolution | Role::Ends => Dtype::F16,
            Role::Wide if quant.code_bits() < 8 => Dtype::Q82f,
            Role::Wide => quant,
        }
    }
}
