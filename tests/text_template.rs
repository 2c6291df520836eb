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
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(fixtures().join("cases.json")).unwrap()).unwrap();
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
    assert!(
        failures.is_empty(),
        "{} of {} failed:\n{}",
        failures.len(),
        cases.len(),
        failures.join("\n")
    );
}

fn render(source: &str, messages: &[Value]) -> cmf_gpu::Result<String> {
    ChatTemplate::new(source)?.render(messages, &RenderOptions::default())
}

/// Templates that would cost time, memory or stack without limits.
fn hostile() -> Vec<(&'static str, String)> {
    let nested = |open: &str, body: &str, close: &str, n: usize| format!("{}{body}{}", open.repeat(n), close.repeat(n));
    let grow = "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}";
    let bomb = "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}";
    vec![
        ("nested loops", "{% for i in range(25000) %}{% for j in range(25000) %}x{% endfor %}{% endfor %}".into()),
        ("repeated string", "{{ 'x'*1000000000 }}".into()),
        ("repeated list", "{{ [1]*1000000000 }}".into()),
        ("repeated tuple", "{{ ((1,)*90000000)|length }}".into()),
        ("range list", "{{ range(10**9)|list }}".into()),
        ("format width", "{{ '%1000000000d'|format(1) }}".into()),
        ("format precision", "{{ '%.1000000000f'|format(1.5) }}".into()),
        ("str.format width", "{{ '{:>1000000000}'.format('x') }}".into()),
        ("json indent", "{{ [1]|tojson(indent=1000000000) }}".into()),
        ("indent filter", "{{ 'a\\nb'|indent(1000000000) }}".into()),
        ("ljust", "{{ 'a'.ljust(1000000000) }}".into()),
        ("center", "{{ 'a'.center(9000000000000000000) }}".into()),
        ("zfill", "{{ 'a'.zfill(1000000000) }}".into()),
        ("power", "{{ 10**100000000 }}".into()),
        ("big power", "{{ (10**30)**(10**9) }}".into()),
        ("replace", "{{ ('a'*100000).replace('a', 'b'*100000) }}".into()),
        ("join", "{{ ('b'*100000).join(['x']*100000) }}".into()),
        ("join filter", "{{ (['x']*100000)|join('b'*100000) }}".into()),
        ("join of a shared list", format!("{bomb}{{{{ ','.join([ns.x]) }}}}")),
        ("doubling", "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}".into()),
        ("doubling list", "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x|length }}{{ ns.x|list }}".into()),
        ("shared list printed", format!("{bomb}{{{{ ns.x }}}}")),
        ("shared list concatenated", format!("{bomb}{{{{ 'a' ~ ns.x }}}}")),
        ("shared list as json", format!("{bomb}{{{{ ns.x|tojson }}}}")),
        ("shared list formatted", format!("{bomb}{{{{ '%s'|format(ns.x) }}}}")),
        ("shared list in str.format", format!("{bomb}{{{{ '{{}}'.format(ns.x) }}}}")),
        ("shared list as string", format!("{bomb}{{{{ ns.x|string }}}}")),
        ("shared list pretty", format!("{bomb}{{{{ ns.x|pprint }}}}")),
        ("shared list raised", format!("{bomb}{{{{ raise_exception(ns.x) }}}}")),
        ("deep list printed", format!("{grow}{{{{ ns.x }}}}")),
        ("deep list as json", format!("{grow}{{{{ ns.x|tojson }}}}")),
        ("macro recursion", "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}".into()),
        ("macro recursion through call", "{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}{{ f() }}".into()),
        ("recursive loop", "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}".into()),
        ("parentheses", format!("{{{{ {} }}}}", nested("(", "1", ")", 5000))),
        ("brackets", format!("{{{{ {} }}}}", nested("[", "1", "]", 5000))),
        ("braces", format!("{{{{ {} }}}}", nested("{'a':", "1", "}", 2000))),
        ("if blocks", nested("{% if 1 %}", "x", "{% endif %}", 5000)),
        ("for blocks", nested("{% for i in [1] %}", "x", "{% endfor %}", 5000)),
        ("with blocks", nested("{% with %}", "x", "{% endwith %}", 5000)),
        ("set blocks", nested("{% set x %}", "x", "{% endset %}", 5000)),
        ("filter blocks", nested("{% filter upper %}", "x", "{% endfilter %}", 5000)),
        ("macros", nested("{% macro x() %}", "x", "{% endmacro %}", 5000)),
        ("elif", format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(50_000))),
        ("many nots", format!("{{{{ {}1 }}}}", "not ".repeat(100_000))),
        ("huge source", "x".repeat(10 << 20)),
        ("include", "{% include '/etc/passwd' %}".into()),
        ("import", "{% import '/etc/passwd' as x %}".into()),
        ("from", "{% from '/etc/passwd' import x %}".into()),
        ("extends", "{% extends '/etc/passwd' %}".into()),
        ("quadratic sort", "{% for i in range(100000) %}{{ range(99999)|sort(reverse=true)|first }}{% endfor %}".into()),
        ("split", "{% for i in range(10000) %}{% set x = (' a'*1000000).split() %}{% endfor %}".into()),
        ("endless chain of lazy lists", "{% set ns = namespace(x=[1]) %}{% for i in range(100000) %}{% set ns.x = ns.x[:1] %}{% endfor %}{{ ns.x }}".into()),
        ("map chain", "{% set ns = namespace(x=[1]) %}{% for i in range(100000) %}{% set ns.x = ns.x|map('string') %}{% endfor %}{{ ns.x|list }}".into()),
        ("dates", "{{ strftime_now('%A' * 1000000) }}".into()),
    ]
}

#[test]
fn zz_probe() {
    for (name, source) in hostile() {
        if std::env::var("ONLY").is_ok_and(|only| only != name) {
            continue;
        }
        let start = Instant::now();
        eprint!("{name}: ");
        let result = render(&source, &[]);
        let rss = std::fs::read_to_string("/proc/self/status").unwrap();
        let hwm = rss.lines().find(|l| l.starts_with("VmHWM")).unwrap().to_string();
        eprintln!(
            "{:?} {} {:?}",
            start.elapsed(),
            hwm,
            result.map(|s| format!("OK {} bytes", s.len())).map_err(|e| e
                .message
                .chars()
                .take(120)
                .collect::<String>())
        );
    }
}
