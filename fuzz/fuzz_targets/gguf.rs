//! Parses and converts a GGUF file, and opens the result.
#![no_main]

use cmf_gpu::convert::{Options, convert};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::format::gguf::Gguf;
use cmf_gpu::text::Tokenizer;
use cmf_gpu_fuzz::{Counting, bounded, on_disk, scratch};
use libfuzzer_sys::fuzz_target;
use std::ops::ControlFlow;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fuzz_target!(|input: &[u8]| {
    let path = on_disk("model.gguf", input);
    let out = scratch().join("gguf.cmf");
    bounded(input.len(), || {
        if Gguf::parse(input).is_err() {
            return;
        }
        let quant = [Dtype::Q82f, Dtype::F16, Dtype::Q4tp][input.len() % 3];
        if convert(&path, &out, &Options::new(quant), &mut |_| ControlFlow::Continue(())).is_ok() {
            let container = CmfContainer::open(&out).expect("the output of convert can be opened");
            assert!(container.verify(&mut |_, _| {}).failures.is_empty());
            if let Some(json) = container.tokenizer_json() {
                let _ = Tokenizer::from_json(json).and_then(|tokenizer| tokenizer.encode("a b <s>", true));
            }
        }
    });
});
