//! Runs the file tools on a CMF file: reads skills, compacts, shards and cuts it, and opens the results.
#![no_main]

use cmf_gpu_fuzz::file_tools::use_tools;
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
