//! Loads a `tokenizer.json`, and encodes, decodes and streams a text with it.
#![no_main]

use cmf_gpu::text::Tokenizer;
use cmf_gpu_fuzz::{Counting, bounded, join_input, other_number, split_input};
use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fuzz_target!(|input: &[u8]| {
    let (text, json) = split_input(input);
    let text = String::from_utf8_lossy(text);
    bounded(input.len(), || {
        let Ok(tokenizer) = Tokenizer::from_json(json) else {
            return;
        };
        let size = tokenizer.vocab_size() as u32;
        let guarded = tokenizer.encode_guarded(&format!("{}{text}", tokenizer.guard(&text)));
        let lists = [
            tokenizer.encode(&text, true),
            tokenizer.encode_plain(&text),
            guarded,
            Ok(vec![size, u32::MAX, 0, 1, size.saturating_sub(1)]),
        ];
        for (i, ids) in lists.into_iter().enumerate() {
            let Ok(mut ids) = ids else { continue };
            assert!(i == 3 || ids.iter().all(|&id| id < size));
            ids.truncate(64);
            let _ = tokenizer.decode(&ids, true);
            let Ok(mut stream) = tokenizer.stream(true, &["ab".into()]) else {
                continue;
            };
            for &id in &ids {
                if stream.push(id).is_err() {
                    break;
                }
            }
            let _ = stream.finish();
        }
    });
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let (text, json) = split_input(&data[..size]);
    let new = join_input(text, &other_number(json, seed >> 2));
    if seed.is_multiple_of(4) && new.len() <= max_size {
        data[..new.len()].copy_from_slice(&new);
        return new.len();
    }
    fuzzer_mutate(data, size, max_size)
});
