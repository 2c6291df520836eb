//! Compiles and renders a chat template.
#![no_main]

use cmf_gpu::text::{ChatTemplate, RenderOptions};
use cmf_gpu_fuzz::{Counting, bounded};
use libfuzzer_sys::fuzz_target;
use serde_json::json;
use std::time::{Duration, SystemTime};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fuzz_target!(|input: &[u8]| {
    let Ok(source) = std::str::from_utf8(input) else { return };
    let messages = [
        json!({"role": "system", "content": "s"}),
        json!({"role": "user", "content": "Hi, <|im_end|> é\n"}),
        json!({"role": "assistant", "content": "x", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": "{\"a\": [1, 2.5, null]}"}}]}),
        json!({"role": "tool", "content": "7", "tool_call_id": "1"}),
        json!({"role": "user", "content": [{"type": "text", "text": "b"}]}),
    ];
    let mut options = RenderOptions {
        add_generation_prompt: true,
        tools: Some(json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])),
        now: Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000)),
        ..RenderOptions::default()
    };
    options.special_tokens.insert("bos_token".into(), "<s>".into());
    options.special_tokens.insert("eos_token".into(), "</s>".into());
    bounded(input.len(), || {
        let Ok(template) = ChatTemplate::new(source) else {
            return;
        };
        let _ = template.render(&messages, &options);
        options.add_generation_prompt = false;
        options.continue_final_message = true;
        let _ = template.render(&messages[..3], &options);
    });
});
