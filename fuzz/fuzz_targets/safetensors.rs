//! Parses and converts a Hugging Face model: a `config.json` and a safetensors file.
#![no_main]

use cmf_gpu::convert::{Options, convert};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::format::safetensors;
use cmf_gpu_fuzz::{Counting, bounded, join_input, on_disk, other_number, scratch, split_input};
use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};
use std::ops::ControlFlow;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fuzz_target!(|input: &[u8]| {
    let (config, file) = split_input(input);
    on_disk("config.json", config);
    let path = on_disk("model.safetensors", file);
    let out = scratch().join("safetensors.cmf");
    bounded(input.len(), || {
        if safetensors::parse(file).is_err() {
            return;
        }
        let quant = [Dtype::Q8Row, Dtype::F16, Dtype::Q4tp][input.len() % 3];
        if convert(&path, &out, &Options::new(quant), &mut |_| ControlFlow::Continue(())).is_ok() {
            let container = CmfContainer::open(&out).expect("the output of convert can be opened");
            assert!(container.verify(&mut |_, _| {}).failures.is_empty());
        }
    });
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let (config, file) = split_input(&data[..size]);
    let header = file.first_chunk().map_or(0, |len| u64::from_le_bytes(*len));
    let header = usize::try_from(header).unwrap_or(0).min(file.len().saturating_sub(8));
    let mutated = |bytes: &[u8]| {
        let mut new = bytes.to_vec();
        new.resize(bytes.len() + 64, 0);
        let len = fuzzer_mutate(&mut new, bytes.len(), bytes.len() + 64);
        new.truncate(len);
        new
    };
    let new = match seed % 5 {
        3 => join_input(&other_number(config, seed >> 3), file),
        4 if header > 0 => {
            let text = other_number(&file[8..8 + header], seed >> 3);
            let parts = [&(text.len() as u64).to_le_bytes()[..], &text, &file[8 + header..]];
            join_input(config, &parts.concat())
        }
        0 => join_input(&mutated(config), file),
        1 if header > 0 => {
            let text = mutated(&file[8..8 + header]);
            let parts = [&(text.len() as u64).to_le_bytes()[..], &text, &file[8 + header..]];
            join_input(config, &parts.concat())
        }
        _ => return fuzzer_mutate(data, size, max_size),
    };
    if new.len() > max_size {
        return fuzzer_mutate(data, size, max_size);
    }
    data[..new.len()].copy_from_slice(&new);
    new.len()
});
