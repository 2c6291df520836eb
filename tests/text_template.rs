//! Chat templates: every golden conversation byte for byte, Python's behaviour where templates rely on it, and the
//! limits that keep a hostile template from costing more than a moment.

use cmf_gpu::Kind;
use cmf_gpu::text::{ChatTemplate, RenderOptions};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, UNIX_EPOCH};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat")
}

/// 2025-06-15 09:05:07, the moment at which the golden renderings were made.
const GOLDEN_NOW: Duration = Duration::from_secs(1_749_978_307);

/// Splits the golden keyword arguments into options.
fn options(case: &Value) -> RenderOptions {
    let mut options = RenderOptions {
        special_tokens: case["special_tokens"].as_object().unwrap().clone(),
        now: Some(UNIX_EPOCH + GOLDEN_NOW),
        ..RenderOptions::default()
    };
    for (key, value) in case["kwargs"].as_object().unwrap() {
        match key.as_str() {
            "add_generation_prompt" => options.add_generation_prompt = value.as_bool().unwrap(),
            "continue_final_message" => options.continue_final_message = value.as_bool().unwrap(),
            "tools" => options.tools = Some(value.clone()),
            "documents" => options.documents = Some(value.clone()),
            _ => {
                options.kwargs.insert(key.clone(), value.clone());
            }
        }
    }
    options
}

#[test]
fn golden_conversations_render_byte_for_byte() {
    let golden: Value =
        serde_json::from_str(&std::fs::read_to_string(fixtures().join("cases.json")).unwrap()).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 252);
    let mut failures = Vec::new();
    for case in cases {
        let id = case["id"].as_str().unwrap();
        let source = std::fs::read_to_string(fixtures().join(case["template"].as_str().unwrap())).unwrap();
        let result = ChatTemplate::new(&source)
            .and_then(|template| template.render(case["messages"].as_array().unwrap(), &options(case)));
        let error = &case["error"];
        match result {
            Ok(text) if Some(text.as_str()) == case["expected"].as_str() => {}
            Ok(text) => failures.push(format!("{id}: got {text:?}, expected {} {}", case["expected"], error)),
            Err(err) if error.is_null() => failures.push(format!("{id}: {err}")),
            Err(err) => {
                assert_eq!(err.kind, Kind::Template, "{id}");
                if error["kind"] == "raise_exception" && err.message != error["message"].as_str().unwrap() {
                    failures.push(format!("{id}: raised {:?}, expected {}", err.message, error["message"]));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} of {} failed:\n{}", failures.len(), cases.len(), failures.join("\n"));
}
