//! Opens two shards of a model and checks a signature file.
#![no_main]

use cmf_gpu_fuzz::file_tools::use_shards;
use cmf_gpu_fuzz::{Counting, bounded, fix_container, on_disk, split_input};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fuzz_target!(|input: &[u8]| {
    let (first, second) = split_input(input);
    let shards = [first, second].map(|bytes| {
        let mut file = bytes.to_vec();
        fix_container(&mut file);
        file
    });
    let paths = [1, 2].map(|no| on_disk(&format!("m-0000{no}-of-00002.cmf"), &shards[no - 1]));
    on_disk("m-00001-of-00002.cmf.sig", second);
    bounded(input.len(), || use_shards(&paths));
});
