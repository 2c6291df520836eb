//! What is done to containers as files: skills looked at, copies, splits, cuts. What comes out can be opened.
#![no_main]

use cmf_gpu_fuzz::use_as_files::use_tools;
use cmf_gpu_fuzz::{Counting, bounded, fix_container, on_disk, scratch};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fuzz_target!(|input: &[u8]| {
    let mut file = input.to_vec();
    fix_container(&mut file);
    let path = on_disk("tools.cmf", &file);
    bounded(file.len(), || use_tools(&path, scratch()));
});
