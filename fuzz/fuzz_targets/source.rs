//! Opens a GGUF file as a model: describes its network, plans it, and reads every tensor as an executor does.
#![no_main]

use cmf_gpu_fuzz::Counting;
use cmf_gpu_fuzz::models::check_model;
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fuzz_target!(|input: &[u8]| check_model("source.gguf", input));
