//! Renders chat templates: reads lines of JSON with `template` and `variables`, and writes lines with `text` or `error`.
//!
//! `scripts/reference/templates.py` compares this with what Python makes of the same templates.

use cmf_gpu::text::{ChatTemplate, RenderOptions};
use serde_json::{Value, json};
use std::io::{BufRead, Write};
use std::time::{Duration, UNIX_EPOCH};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let case: Value = serde_json::from_str(&line?)?;
        let source = case["template"].as_str().ok_or("a line has no template")?;
        let variables = case["variables"].as_object().ok_or("a line has no variables")?;
        let options = RenderOptions {
            kwargs: variables.clone(),
            // 2025-06-15 09:05:07
            now: Some(UNIX_EPOCH + Duration::from_secs(1_749_978_307)),
            ..RenderOptions::default()
        };
        let result = ChatTemplate::new(source).and_then(|template| template.render(&[], &options));
        let answer = match result {
            Ok(text) => json!({"text": text}),
            Err(err) => json!({"error": err.message}),
        };
        writeln!(out, "{answer}")?;
    }
    Ok(())
}
