//! Chat templates: golden conversations byte for byte, Python's results where templates rely on them, errors, and the
//! fuel that long conversations need.

use cmf_gpu::Kind;
use cmf_gpu::text::{ChatTemplate, RenderOptions};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, UNIX_EPOCH};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat")
}

/// 2025-06-15 09:05:07, the time of the golden renderings.
const GOLDEN_NOW: Duration = Duration::from_secs(1_749_978_307);

/// Converts the keyword arguments of a golden case to options.
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

#[test]
fn expressions_have_pythons_values() {
    let golden: Value =
        serde_json::from_str(&std::fs::read_to_string(fixtures().join("expressions.json")).unwrap()).unwrap();
    let options = RenderOptions {
        kwargs: golden["variables"].as_object().unwrap().clone(),
        ..RenderOptions::default()
    };
    let expressions = golden["expressions"].as_array().unwrap().iter();
    let expressions = expressions.map(|case| (format!("{{{{ {} }}}}", case[0].as_str().unwrap()), &case[1]));
    let templates = golden["templates"].as_array().unwrap().iter();
    let templates = templates.map(|case| (case[0].as_str().unwrap().to_string(), &case[1]));
    let mut failures = Vec::new();
    for (source, expected) in expressions.chain(templates) {
        let result = ChatTemplate::new(&source).and_then(|template| template.render(&[], &options));
        match result {
            Ok(text) if Some(text.as_str()) == expected.as_str() => {}
            Err(_) if expected.is_null() => {}
            other => failures.push(format!("{source}: {other:?}, expected {expected}")),
        }
    }
    assert!(
        failures.is_empty(),
        "{} differ:\n{}",
        failures.len(),
        failures.join("\n")
    );
}

#[test]
fn random_templates_have_the_text_that_python_recorded() {
    let golden: Value =
        serde_json::from_str(&std::fs::read_to_string(fixtures().join("random.json")).unwrap()).unwrap();
    let options = RenderOptions {
        kwargs: golden["variables"].as_object().unwrap().clone(),
        now: Some(UNIX_EPOCH + GOLDEN_NOW),
        ..RenderOptions::default()
    };
    let cases = golden["templates"].as_array().unwrap();
    assert_eq!(cases.len(), 200);
    for case in cases {
        let source = case[0].as_str().unwrap();
        let result = ChatTemplate::new(source).and_then(|template| template.render(&[], &options));
        match (result, case[1].as_str()) {
            (Ok(text), Some(expected)) => assert_eq!(text, expected, "{source}"),
            (Err(err), None) => assert_eq!(err.kind, Kind::Template, "{source}"),
            (other, expected) => panic!("{source}: {other:?}, expected {expected:?}"),
        }
    }
}

/// Templates and conversations that users of other programs reported, with what transformers makes of them.
#[test]
fn reported_templates_render_as_in_transformers() {
    let user = json!([{"role": "user", "content": "x"}]);
    let blanks = json!([
        {"role": "user", "content": "\u{1c}\u{1f}a\u{1e}"},
        {"role": "user", "content": "a\rb\u{b}c\u{85}d\u{2028}e\u{1d}f"},
    ]);
    let documents = json!({"documents": [{"title": "a", "text": "b"}]});
    for (source, messages, kwargs, expected) in [
        (
            "{% for m in messages %}\r\n{{ m.role }}: {{ m.content }}\r\n{% endfor %}\r\n\
             {% if add_generation_prompt %}\r\nassistant:\r\n{% endif %}\r\n",
            &user,
            json!({}),
            "user: x\nassistant:\n",
        ),
        (
            "{{ foo|default('a', boolean=true) }}{{ ''|default('b', boolean=True) }}{{ foo|default(default_value='c') }}",
            &user,
            json!({}),
            "abc",
        ),
        (
            "{% if documents %}{% for d in documents %}[{{ d.title }}: {{ d.text }}]{% endfor %}{% endif %}",
            &user,
            documents,
            "[a: b]",
        ),
        (
            "{{ messages|join(', ', attribute='role') }}|{{ ['a','b']|join(d='-') }}",
            &user,
            json!({}),
            "user|a-b",
        ),
        (
            "{% macro f(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1,2,z=3) }}",
            &user,
            json!({}),
            "1(2,){'z': 3}",
        ),
        (
            "{{ 'a b'|wordcount }}{{ 'hello world foo'|truncate(9) }}{{ '<b>x</b>'|striptags }}{{ '1f'|int(base=16) }}\
             {{ strftime_now is callable }}{{ [7]|random }}",
            &user,
            json!({}),
            "2hello...x31True7",
        ),
        (
            "[{{ messages[0].content.strip() }}]{{ messages[1].content.splitlines()|length }}\
             {{ messages[1].content.split()|length }}",
            &blanks,
            json!({}),
            "[a]66",
        ),
    ] {
        let options = RenderOptions {
            add_generation_prompt: true,
            kwargs: kwargs.as_object().unwrap().clone(),
            ..RenderOptions::default()
        };
        let template = ChatTemplate::new(source).unwrap();
        let text = template.render(messages.as_array().unwrap(), &options).unwrap();
        assert_eq!(text, expected, "{source}");
    }
}

#[test]
fn large_integers_are_exact_or_an_error() {
    let render =
        |source: &str| ChatTemplate::new(source).and_then(|template| template.render(&[], &Default::default()));
    assert_eq!(
        render("{{ 2**126 }} {{ 10**38 // 3 }} {{ (2**100 + 1) / 2**100 }} {{ (2**53 + 1) / 3 }} {{ 2**63 % 10 }}")
            .unwrap(),
        "85070591730234615865843651857942052864 33333333333333333333333333333333333333 1.0 3002399751580331.0 8"
    );
    for source in [
        "{{ 2**127 }}",
        "{{ 10**38 * 10 }}",
        "{{ 1e40|int }}",
        "{{ 170141183460469231731687303715884105728 }}",
    ] {
        assert_eq!(render(source).unwrap_err().kind, Kind::Template, "{source}");
    }
}

#[test]
fn invalid_and_unsupported_code_is_an_error_with_its_line() {
    for (source, part) in [
        ("\n{{ 'a'|no_such_filter }}", "line 2: unknown filter"),
        ("\n\n{{ 'a' is no_such_test }}", "line 3: unknown test"),
        ("{{ no_such_function() }}", "line 1: unknown function"),
        ("{{ 'a'.no_such_method() }}", "line 1: unknown method"),
        ("\n{% no_such_tag %}", "line 2: syntax error"),
        ("a\n{% if x %}\nb", "line 3: syntax error"),
        ("{% if", "line 1: syntax error"),
        ("{% for x in [1] %}\n{{ [x, \n{% endfor %}", "line 3: syntax error"),
        ("{{ messages.__class__.__mro__ }}", "line 1: undefined value"),
        ("{{ 'a' + nothing }}", "line 1: invalid operation"),
        ("{{ strftime_now('%Q') }}", "'%Q' is not a known directive"),
        (
            "{% generation x %}{% endgeneration %}",
            "line 1: 'generation' takes no arguments",
        ),
        ("{{ [1].append(2) }}", "cannot be changed in place"),
        ("{{ debug() }}", "unknown function"),
        ("{{ [1]|zip([2]) }}", "unknown filter"),
    ] {
        let result = ChatTemplate::new(source).and_then(|template| template.render(&[], &RenderOptions::default()));
        let err = result.expect_err(source);
        assert_eq!(err.kind, Kind::Template, "{source}");
        assert!(err.message.contains(part), "{source}: {err}");
    }
}

#[test]
fn the_message_of_raise_exception_is_passed_on_unchanged() {
    let nested = "{% macro check(m) %}{{ raise_exception('No \"' ~ m.role ~ '\" here!') }}{% endmacro %}\
                  {% for m in messages %}{{ check(m) }}{% endfor %}";
    let template = ChatTemplate::new(nested).unwrap();
    let err = template
        .render(&[json!({"role": "tool"})], &RenderOptions::default())
        .unwrap_err();
    assert_eq!((err.kind, err.message.as_str()), (Kind::Template, "No \"tool\" here!"));
}

#[test]
fn tool_call_arguments_given_as_text_become_objects() {
    let template = ChatTemplate::new(
        "{% for m in messages %}{% for c in m.tool_calls %}{% set f = c.function or c %}{{ f.arguments is string }} \
         {{ f.arguments|tojson }};{% endfor %}{% endfor %}",
    )
    .unwrap();
    let call = |arguments: Value| json!({"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]});
    let messages = [
        call(json!("{\"b\": 1, \"a\":[2.0]}")),
        call(json!({"x": "y"})),
        call(json!("not json")),
        call(json!("5")),
        json!({"role": "assistant", "tool_calls": [{"name": "flat", "arguments": "{\"k\":null}"}]}),
    ];
    assert_eq!(
        template.render(&messages, &RenderOptions::default()).unwrap(),
        "False {\"b\": 1, \"a\": [2.0]};False {\"x\": \"y\"};True \"not json\";True \"5\";False {\"k\": null};"
    );
}

#[test]
fn the_fallback_template_is_chatml() {
    let options = RenderOptions {
        add_generation_prompt: true,
        ..RenderOptions::default()
    };
    let messages = [
        json!({"role": "system", "content": "s"}),
        json!({"role": "user", "content": " <b> "}),
    ];
    assert_eq!(
        ChatTemplate::chatml().unwrap().render(&messages, &options).unwrap(),
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n <b> <|im_end|>\n<|im_start|>assistant\n"
    );
}

#[test]
fn invalid_requests_are_usage_errors() {
    let template = ChatTemplate::chatml().unwrap();
    let user = json!({"role": "user", "content": "x"});
    let check = |messages: &[Value], options: RenderOptions| template.render(messages, &options).unwrap_err().kind;
    let default = RenderOptions::default;
    assert_eq!(check(&[json!("text")], default()), Kind::Usage);
    let both = RenderOptions {
        add_generation_prompt: true,
        continue_final_message: true,
        ..default()
    };
    assert_eq!(check(std::slice::from_ref(&user), both), Kind::Usage);
    let cont = || RenderOptions {
        continue_final_message: true,
        ..default()
    };
    assert_eq!(
        check(&[json!({"role": "assistant", "content": null})], cont()),
        Kind::Usage
    );
    assert_eq!(check(&[], cont()), Kind::Usage);
    let kwargs = json!({"messages": []}).as_object().unwrap().clone();
    assert_eq!(
        check(std::slice::from_ref(&user), RenderOptions { kwargs, ..default() }),
        Kind::Usage
    );
    let deep = (0..1000).fold(json!(1), |inner, _| json!([inner]));
    assert_eq!(
        check(&[json!({"role": "user", "content": deep})], default()),
        Kind::Usage
    );
}

#[test]
fn ordinary_long_conversations_stay_within_the_budget() {
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(fixtures().join("cases.json")).unwrap()).unwrap();
    let tools = golden["cases"]
        .as_array()
        .unwrap()
        .iter()
        .find_map(|case| case["kwargs"].get("tools"))
        .unwrap();
    let turn = |i: usize| {
        let role = ["user", "assistant"][i % 2];
        json!({"role": role, "content": "some words of a conversation ".repeat(20)})
    };
    for name in std::fs::read_dir(fixtures().join("templates")).unwrap() {
        let path = name.unwrap().path();
        let template = ChatTemplate::new(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let options = RenderOptions {
            add_generation_prompt: true,
            tools: Some(tools.clone()),
            special_tokens: json!({"bos_token": "<s>", "eos_token": "</s>"})
                .as_object()
                .unwrap()
                .clone(),
            ..RenderOptions::default()
        };
        for count in [1, 99, 2001] {
            let messages: Vec<Value> = (0..count).map(turn).collect();
            let start = Instant::now();
            let text = template
                .render(&messages, &options)
                .unwrap_or_else(|err| panic!("{path:?} {count}: {err}"));
            assert!(text.len() > 500.min(count * 500), "{path:?}");
            assert!(
                start.elapsed() < Duration::from_secs(2),
                "{path:?} {count}: {:?}",
                start.elapsed()
            );
        }
    }
}
