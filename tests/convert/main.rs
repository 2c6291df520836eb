//! The importers and the converter, from source files to opened containers.

mod block_types;
mod build;
mod exchange;
mod experts;
mod families;
mod gguf;
#[path = "../golden/mod.rs"]
mod golden;
mod huggingface;
mod keep;
mod lenient;
mod malformed;
mod next;
mod pipelines;
mod recurrent;
mod refusals;
mod requant;
mod sources;
mod splits;
mod ternary;
mod tokenizer;
mod types;
