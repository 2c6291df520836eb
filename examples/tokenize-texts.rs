//! Encodes and decodes texts: reads lines of JSON with `file`, a `tokenizer.json`, and `text`; writes lines with the ids with
//! and without added special tokens, and with the texts of the former with and without special tokens.
//!
//! `scripts/reference/token_ids.py` compares this with what the Python package `tokenizers` makes of the same texts.

use cmf_gpu::text::Tokenizer;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::{BufRead, Write};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut known: HashMap<String, Tokenizer> = HashMap::new();
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let case: Value = serde_json::from_str(&line?)?;
        let file = case["file"].as_str().ok_or("a line has no file")?;
        let text = case["text"].as_str().ok_or("a line has no text")?;
        let tokenizer = match known.entry(file.to_string()) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(Tokenizer::from_json(&std::fs::read(file)?)?),
        };
        let ids = tokenizer.encode(text, true)?;
        let plain = tokenizer.encode(text, false)?;
        let texts = [tokenizer.decode(&ids, false)?, tokenizer.decode(&ids, true)?];
        writeln!(out, "{}", json!([ids, plain, texts[0], texts[1]]))?;
    }
    Ok(())
}
