//! Two files of one model, and a signature: opened, joined, checked.
#![no_main]

use cmf_gpu_fuzz::use_as_files::use_parts;
use cmf_gpu_fuzz::{Counting, bounded, fix_container, halves, on_disk};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fuzz_target!(|input: &[u8]| {
    let (first, second) = halves(input);
    let parts = [first, second].map(|part| {
        let mut file = part.to_vec();
        fix_container(&mut file);
        file
    });
    let paths = [1, 2].map(|no| on_disk(&format!("m-0000{no}-of-00002.cmf"), &parts[no - 1]));
    on_disk("m-00001-of-00002.cmf.sig", second);
    bounded(input.len(), || use_parts(&paths));
});
