//! The text encoder as a graph: the layers of a language model before the last, and the stream that enters it.

use crate::error::{Result, bail};
use crate::graph::{Graph, Measured, Program};
use crate::lm::{ExpertOptions, LowerOptions, ProgramKind, lower};
use crate::model::{HeadInput, Model};
use crate::op::{BufferId, Kv};
use crate::source::Tensors;
use std::sync::Arc;

/// A lowered text encoder.
#[derive(Clone, Debug)]
pub struct TextPlan {
    /// The graph, of one program.
    pub graph: Arc<Graph>,
    /// The tokens of a run.
    pub batch: BufferId,
    /// The features, a row for each token.
    pub features: BufferId,
    /// Elements of a feature.
    pub hidden: usize,
    /// Most tokens of a text.
    pub tokens: usize,
}

/// Lowers the encoder for texts of at most `tokens` tokens, each of which runs as a whole. Features are the residual stream that
/// enters the last layer, so neither that layer nor the norm after it is part of the graph.
///
/// Errors: as [`lower`].
pub fn text(model: &Model, tensors: &dyn Tensors, tokens: u32, max_binding: u64) -> Result<TextPlan> {
    let mut model = model.clone();
    model.layers.pop();
    let tokens = tokens.next_multiple_of(8);
    let options = LowerOptions {
        ctx: tokens,
        chunk: tokens,
        // Features are compared with those of f32 arithmetic.
        kv: Kv::F32,
        max_binding,
        all_logits: false,
        drafts: 0,
        draft_input: HeadInput::default(),
        experts: ExpertOptions::default(),
    };
    let plan = lower(&model, tensors, &options, &Measured::default())?;
    let prefill = plan.program(ProgramKind::Prefill);
    // A model of one layer has the embedding as its features.
    let embedded = || prefill.steps.first().and_then(|step| step.buffer("h"));
    let Some(features) = prefill.taps.last().map(|tap| tap.1).or_else(embedded) else {
        bail!(Internal, "the text encoder has no stream");
    };
    let program = Program {
        name: "text",
        output: Some(features),
        ..prefill.clone()
    };
    let graph = Graph {
        programs: vec![program],
        ..(*plan.graph).clone()
    };
    Ok(TextPlan {
        graph: Arc::new(graph),
        batch: plan.buffers.batch,
        features,
        hidden: model.hidden,
        tokens: tokens as usize,
    })
}
