//! Flags of `bench`.

use crate::cli::args::{LoadArgs, whole};
use crate::cli::context::{Result, usage};
use crate::cli::overlay::{BLEND_HELP, SKILL_HELP};
use cmf_gpu::LoadOptions;
use cmf_gpu::dtype::Dtype;
use cmf_gpu::options::Overlay;
use cmf_gpu::source::ModelSource;
use cmf_gpu::synthetic::Shape;

const CTX_HELP: &str =
    "Length of the context in tokens; 0 = the length the model was trained for [default: as -p and -n after -d need]";

const QUANT_HELP: &str = "Quantises the matrices of a Hugging Face directory or a GGUF file to this type while loading \
     [default: the types of the file]; the type of synthetic matrices [default: q4tp, or pq2_0 for bonsai-27b]";

#[derive(clap::Args)]
#[command(mut_arg("ctx", |arg| arg.help(CTX_HELP)), mut_arg("quant", |arg| arg.help(QUANT_HELP)))]
#[command(mut_arg("skill", |arg| arg.help(SKILL_HELP)), mut_arg("blend", |arg| arg.help(BLEND_HELP)))]
pub struct Args {
    #[command(flatten)]
    pub load: LoadArgs,
    /// Tokens of the prompt; 0 leaves the row out
    #[arg(short = 'p', long, default_value_t = 512, value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub n_prompt: usize,
    /// Tokens to generate; 0 leaves the row out
    #[arg(short = 'n', long, default_value_t = 128, value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub n_gen: usize,
    /// Tokens in the cache before the measured ones; their prefill is not measured. Rows are named pp512 @ d4096
    #[arg(short = 'd', long, default_value_t = 0, value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub n_depth: usize,
    /// Random weights of this shape instead of a model: smollm2-135m, llama-8b, qwen3-8b, qwen3-30b-a3b, qwen3.5-27b, bonsai-27b or
    /// qwen3.5-35b-a3b
    #[arg(long, value_name = "SPEC")]
    synthetic: Option<String>,
    /// Number of layers of the synthetic model [default: all]
    #[arg(long, value_name = "N", value_parser = whole::<usize>, allow_negative_numbers = true)]
    layers: Option<usize>,
    /// Prints the memory that the model needs on a GPU and the cost of its programs; runs nothing and needs no GPU
    #[arg(long)]
    pub plan: bool,
    /// Also measures basic operations of the device: reading memory, dispatches, empty workgroups
    #[arg(long)]
    pub costs: bool,
    /// Number of measurements per row
    #[arg(short, long, default_value_t = 5, value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub repetitions: usize,
    /// Format of the table
    #[arg(short, long, value_enum, default_value_t = Form::Md)]
    pub output: Form,
}

/// The formats of the table.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Form {
    Md,
    Json,
    Csv,
}

/// What is measured, by the flags.
pub enum Source {
    /// The model that is given.
    Model(Box<ModelSource>),
    /// Random weights.
    Synthetic(Shape),
}

impl Args {
    /// The model, opened, or the shape of the synthetic model. Errors: `Usage` when neither or both are given, and for layers
    /// that the shape does not have; those of opening.
    pub fn source(&self) -> Result<Source> {
        let Some(spec) = &self.synthetic else {
            if self.layers.is_some() {
                let hint = "--layers needs --synthetic; the layers of a model file are fixed";
                return Err(usage(hint));
            }
            return Ok(Source::Model(Box::new(self.load.open()?)));
        };
        if self.load.model.optional()?.is_some() {
            return Err(usage("--synthetic replaces MODEL, and both are given"));
        }
        let shape = Shape::named(spec)?;
        Ok(Source::Synthetic(match self.layers {
            Some(layers) => shape.with_layers(layers)?,
            None => shape,
        }))
    }

    /// The type of synthetic matrices.
    pub fn quant(&self, shape: &Shape) -> Dtype {
        self.load.quant.quant.unwrap_or(shape.usual_type())
    }

    /// The library's options. Errors: `Usage`.
    pub fn options(&self) -> Result<LoadOptions> {
        let overlay = self.load.overlay.fixed()?;
        if self.synthetic.is_some() && overlay != Overlay::Backbone {
            return Err(usage("a skill needs a MODEL, and --synthetic replaces it"));
        }
        let options = self.load.options();
        let ctx = options.ctx.unwrap_or(self.positions()?);
        Ok(options.overlay(overlay).ctx(ctx))
    }

    /// Positions that the rows need. Errors: `Usage` for more than there can be.
    pub fn positions(&self) -> Result<u32> {
        // One token before the generated ones, and one whose run is in flight at the end.
        let positions = self.n_prompt.max(self.n_gen.saturating_add(2));
        let positions = positions.saturating_add(self.n_depth);
        let (p, n, d) = (self.n_prompt, self.n_gen, self.n_depth);
        let text = format!("-p {p}, -n {n}, -d {d}: {positions} tokens are too many");
        u32::try_from(positions).map_err(|_| usage(text))
    }

    /// Errors: `Usage` when a context of `ctx` positions is too short for a row.
    pub fn check_fits(&self, ctx: u32) -> Result<()> {
        let needs = [
            ("-p", self.n_prompt, self.n_prompt),
            ("-n", self.n_gen, self.n_gen.saturating_add(1)),
        ];
        let depth = self.n_depth;
        let after = match depth {
            0 => String::new(),
            _ => format!(" after -d {depth}"),
        };
        let too_long =
            |&&(_, count, tokens): &&(&str, usize, usize)| count > 0 && tokens.saturating_add(depth) > ctx as usize;
        match needs.iter().find(too_long) {
            Some((flag, count, _)) => Err(usage(format!(
                "{flag} {count}{after} does not fit into a context of {ctx}; give a smaller {flag} or a larger --ctx"
            ))),
            None => Ok(()),
        }
    }
}
