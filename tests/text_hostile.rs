//! Templates that try to exhaust time, memory or the stack. Each is an error within a second, with little memory.
//!
//! A test program of its own, so that only these renderings are measured.

use cmf_gpu::Kind;
use cmf_gpu::text::{ChatTemplate, RenderOptions};
use serde_json::Value;
use std::time::{Duration, Instant};

fn render(source: &str, messages: &[Value]) -> cmf_gpu::Result<String> {
    ChatTemplate::new(source)?.render(messages, &RenderOptions::default())
}

/// Templates that would exhaust time, memory or the stack without limits.
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
        ("json of a repeated list", "{{ ([('b'*10000)]*1000000)|tojson }}".into()),
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
        ("one huge concatenation", "{{ 'a' ~ [('b'*1000000)]*1000000 }}".into()),
        ("deep list concatenated", format!("{grow}{{{{ 'a' ~ ns.x }}}}")),
        ("namespace in itself", "{% set ns = namespace() %}{% set ns.a = ns %}{{ 'a' ~ ns }}".into()),
        ("namespace in a list in itself", "{% set ns = namespace() %}{% set ns.a = [{'b': ns}] %}{{ ns.a == ns.a }}".into()),
        ("chain of namespaces", "{% set o = namespace(n=namespace()) %}{% for i in range(100000) %}{% set o.n = namespace(n=o.n) %}{% endfor %}".into()),
        ("shared list through a macro", "{% macro f(x, n) %}{% if n %}{{ f([x, x], n - 1) }}{% else %}{{ 'a' ~ x }}{% endif %}{% endmacro %}{{ f(1, 40) }}".into()),
        ("shared list through loops", format!("{{% set x = 1 %}}{}", nested("{% for x in [[x, x]] %}", "{{ 'a' ~ x }}", "{% endfor %}", 60))),
        ("shared list through with", format!("{{% set x = 1 %}}{}", nested("{% with y = [x, x] %}{% with x = [y, y] %}", "{{ x|upper }}", "{% endwith %}{% endwith %}", 30))),
        ("shared map through cycler", "{% set c = cycler(1) %}{% for i in range(100000) %}{% set c = cycler(c) %}{% endfor %}{{ 'a' ~ c }}".into()),
        ("shared map", "{% macro f(x, n) %}{{ f({'a': x, 'b': x}, n - 1) if n else x|upper }}{% endmacro %}{{ f(1, 40) }}".into()),
        ("shared tuple", "{% macro f(x, n) %}{{ f((x, x), n - 1) if n else x|upper }}{% endmacro %}{{ f(1, 40) }}".into()),
        ("compared lists", format!("{bomb}{{% set a = ns.x %}}{bomb}{{{{ a == ns.x }}}}")),
        ("repeated list in a filter", "{{ ([('b'*1000000)]*1000000)|upper }}".into()),
        ("repeated list in a test", "{{ ([('b'*1000000)]*1000000) is startingwith('b') }}".into()),
        ("repeated list in a string", "{{ ([('b'*1000000)]*1000000) in 'abc' }}".into()),
        ("repeated list as an argument", "{{ 'abc'|replace('a', ([('b'*1000000)]*1000000)) }}".into()),
        ("repeated lists compared", "{{ ([1]*100000000) == ([1]*100000000) }}".into()),
        ("doubling list through a macro", "{% macro f(x, n) %}{{ f(x + x, n - 1) if n else x|upper }}{% endmacro %}{{ f([1], 40) }}".into()),
        ("names and branches", (0..5000).map(|i| format!("{{% set a{i} = 1 %}}{{% if 0 %}}{{% endif %}}")).collect()),
        ("named arguments", format!("{{{{ dict({}) }}}}", (0..50_000).map(|i| format!("a{i}=1")).collect::<Vec<_>>().join(","))),
        ("identity of long strings", "{% set a = 'x'*1000000 %}{% set b = 'x'*1000000 %}{% for i in range(100000) %}{{ a is sameas b }}{% endfor %}".into()),
        ("long keys", "{% set t = (1,)*9000 %}{% for i in range(100000) %}{{ {t: 1}[t] }}{% endfor %}".into()),
        ("wrapped hyphens", "{% for i in range(100) %}{{ ('-'*1000000)|wordwrap(100) }}{% endfor %}".into()),
        ("wrapped letters", "{% for i in range(100) %}{{ ('x'*1000000)|wordwrap(1) }}{% endfor %}".into()),
        ("lists of iterators", "{% set ns = namespace(x=[1]) %}{% for i in range(100000) %}{% set ns.x = [ns.x|map('string')] %}{% endfor %}".into()),
        ("chain of loops", "{% set ns = namespace(l=1) %}{% for i in range(100000) %}{% for x in [ns.l] %}{% set ns.l = loop %}{% endfor %}{% endfor %}".into()),
        ("chain of joiners", "{% set ns = namespace(j=1) %}{% for i in range(100000) %}{% set ns.j = joiner(ns.j) %}{% endfor %}".into()),
        ("a loop that keeps itself", "{% for i in range(100000) %}{% for x in range(9) %}{{ loop.changed(loop) }}{% endfor %}{% endfor %}".into()),
        ("many variables in a loop", format!("{{% for i in range(100000) %}}{}{{% endfor %}}", "{% set a = i %}".repeat(5000))),
        ("macros that refer to each other", "{% set ns = namespace() %}{% for i in range(100000) %}{% macro f() %}{{ f }}{% endmacro %}{% set ns.f = f %}{% endfor %}".into()),
        ("nested blocks of a template", "{% block a %}{{ self.a() }}{% endblock %}".into()),
        ("dates", "{{ strftime_now('%A' * 1000000) }}".into()),
    ]
}

/// Peak resident memory of this process in MiB.
#[cfg(target_os = "linux")]
fn peak_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
}

#[test]
fn hostile_templates_are_errors_within_a_second() {
    for (name, source) in hostile() {
        let start = Instant::now();
        let result = render(&source, &[]);
        let elapsed = start.elapsed();
        // Helps to find a template that hangs.
        println!("{name}: {elapsed:?}");
        match result {
            Ok(text) => panic!("'{name}' gave {} bytes", text.len()),
            Err(err) => assert_eq!(err.kind, Kind::Template, "{name}: {err}"),
        }
        assert!(elapsed < Duration::from_secs(1), "{name}: {elapsed:?}");
        #[cfg(target_os = "linux")]
        assert!(peak_mib() < 100, "{name}: {} MiB", peak_mib());
    }
}
