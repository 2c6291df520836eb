#!/usr/bin/env python3
"""Compares how random chat templates are rendered here and by jinja2, in the environment that transformers sets up.

    pip install jinja2==3.1.6 transformers
    cargo build --example render-templates
    scripts/reference/templates.py [--count 2000] [--seed 0] [--show 20]
    scripts/reference/templates.py --record tests/fixtures/chat/random.json

Prints the differences and counts those that have a reason, see `reason`. `--record` writes templates with their values
as a fixture; templates with a reason are left out.
"""
import argparse
import datetime
import json
import random
import re
import subprocess
import sys
import unicodedata
import warnings
from pathlib import Path

from transformers.utils import chat_template_utils

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "target/debug/examples/render-templates"
NOW = datetime.datetime(2025, 6, 15, 9, 5, 7)

VARIABLES = {
    "text": "  Hello, World! ",
    "word": "alpha",
    "lines": "one two\r\nthree\x0bfour\u2028five\x1d\n\nend ",
    "blanks": "\x1c\x1f a\u3000b\x85 ",
    "uni": "hé€lo ß ÀÉ ǆ ﬁ ١٢ 漢字 \U0001f600\u200b",
    "html": "<b>a & 'b'</b> \"c\" <!-- x --> &amp; d",
    "digits": "42",
    "number": 7,
    "negative": -3,
    "zero": 0,
    "big": 2**63,
    "real": 2.5,
    "tiny": 1e-07,
    "huge": 1e16,
    "yes": True,
    "no": False,
    "nothing": None,
    "empty": "",
    "nums": [3, 1, 2, 10, -4],
    "reals": [0.5, 2, -1.25, 1e3],
    "words": ["b", "A", "c", "a", "Bb"],
    "mixed": [1, "x", None, True, 2.5, ["y", {"k": "v"}]],
    "void": [],
    "conf": {"name": "n1", "size": 3, "items": "hidden", "nested": {"deep": [1, 2]}, "get": 5},
    "blank": {},
    "people": [
        {"name": "Ann", "age": 31, "tags": ["x", "y"], "address": {"city": "Oslo"}},
        {"name": "bob", "age": 25, "tags": [], "address": {"city": "Łódź"}},
        {"name": "Cid", "age": 31, "tags": ["z"], "address": None},
    ],
    "turns": [
        {"role": "user", "content": "Hi <there>\n"},
        {"role": "assistant", "content": "Hello 'you'", "calls": [{"name": "f", "arguments": {"a": 1.0, "b": None}}]},
        {"role": "tool", "content": "7"},
    ],
}
NAMES = {
    "str": ["text", "word", "lines", "blanks", "uni", "html", "digits", "empty"],
    "int": ["number", "negative", "zero"],
    "float": ["real", "tiny", "huge"],
    "bool": ["yes", "no"],
    "list": ["nums", "words", "void", "reals", "mixed"],
    "dict": ["conf", "blank"],
    "dicts": ["people", "turns"],
}
# Filters for values of any type.
GENERAL = [
    "string", "tojson", "tojson(indent=2)", "tojson(sort_keys=true)", "tojson(ensure_ascii=True)", "e", "upper", "trim",
    "pprint", "urlencode", "capitalize", "title", "length|string", "tojson(separators=(',', ':'))", "replace('1', 'one')",
    "wordcount", "striptags",
]
TYPES = ["str", "int", "float", "bool", "list", "dict", "dicts", "none"]


class Generator:
    def __init__(self, seed):
        self.r = random.Random(seed)
        self.scope = []
        self.macros = []
        self.loops = 0

    def pick(self, *options):
        return self.r.choice(options)

    def chance(self, p):
        return self.r.random() < p

    # Expressions

    def expr(self, kind=None, depth=0):
        if self.chance(0.04):
            kind = self.pick(*TYPES)
        kind = kind or self.pick("str", "str", "str", "int", "int", "float", "bool", "list", "dict", "dicts", "none")
        if depth > 3 or self.chance(0.2):
            return self.leaf(kind)
        if self.chance(0.06):
            test, a, b = self.expr("bool", depth + 1), self.expr(kind, depth + 1), self.expr(kind, depth + 1)
            return self.pick(f"({a} if {test} else {b})", f"({a} if {test})", f"({a} or {b})", f"({a} and {b})")
        return getattr(self, "make_" + kind, self.leaf_of)(depth + 1, kind)

    def leaf_of(self, depth, kind):
        return self.leaf(kind)

    def leaf(self, kind):
        if self.scope and self.chance(0.25):
            return self.pick(*self.scope)
        if self.chance(0.03):
            return self.pick("missing", "nothing", "word.missing", "conf.missing", "loop", "number.x")
        if kind == "none":
            return self.pick("none", "nothing", "None", "missing")
        if kind in NAMES and self.chance(0.6):
            return self.pick(*NAMES[kind])
        return getattr(self, "literal_" + kind)()

    def literal_str(self):
        return self.pick(
            "'x'", '"it\'s"', "'a\\nb'", "'\\u00e9\\t'", "'a-b_c d'", "' pad '", "''", "'%s'", "'a' 'b'", "'\\x41\\101'",
            "'1,2,,3'", "'ÄÖü'", "'3.7'", "' 12 '", "'0x1f'", "'1_000'", "'a\\d\\\\'", "'Hello World foo bar'", "'é\\é'",
            "'aXbXc'", "'{}'", "'tab\\tx'", "'-7'", "'nan'", "'<&>'", "'x\\\ny'", "'well-known a-b--c x---y'",
        )

    def literal_int(self):
        return self.pick("0", "1", "2", "3", "5", "-1", "-2", "10", "1_000", "0x1F", "0b101", "0o17", "100", "9223372036854775807")

    def literal_float(self):
        return self.pick("0.5", "1.0", "2.25", "1e3", "-0.0", "3.14159", "1e-5", "1.5e300", "100.0", "2.675", "1_0.5")

    def literal_bool(self):
        return self.pick("true", "false", "True", "False")

    def literal_list(self):
        return self.pick("[]", "[1, 2, 3]", "['b', 'a']", "(1, 'x')", "(1,)", "()", "[none, true]", "[[1, 2], [3]]", "range(4)", "[1, 1.0, true]", "range(5, 0, -2)")

    def literal_dict(self):
        return self.pick("{}", "{'a': 1}", "{'b': 2, 'a': [1]}", "{1: 'x', none: 2}", "dict(p=1, q='z')", "{'k': {'l': 'm'}}", "{'B': 1, 'a': 2}", "dict([('u', 1)])")

    def literal_dicts(self):
        return self.pick("[{'name': 'q', 'age': 1}]", "[]", "people[1:]", "turns[:2]")

    def small(self):
        return self.pick("0", "1", "2", "3", "-1", "-2", "5", "number", "negative")

    def make_str(self, depth, _):
        s = lambda: self.expr("str", depth)
        n = self.small
        return self.pick(
            lambda: f"({self.expr(None, depth)} ~ {self.expr(None, depth)})",
            lambda: f"({s()} + {s()})",
            lambda: f"({s()} * {n()})",
            lambda: f"{s()}[{n()}]",
            lambda: f"{s()}[{self.bound()}:{self.bound()}]",
            lambda: f"{s()}[::{self.pick('-1', '2', '-2')}]",
            lambda: f"{s()}.{self.str_method()}",
            lambda: f"{s()}.{self.str_method()}",
            lambda: f"{s()}|{self.str_filter()}",
            lambda: f"{s()}|{self.str_filter()}",
            lambda: f"{self.expr(None, depth)}|{self.pick(*GENERAL)}",
            lambda: f"{self.expr('list', depth)}|join({self.pick('', s(), 'd=' + s(), s() + ', attribute=0')})",
            lambda: f"{self.expr('dicts', depth)}|join(', ', attribute={self.attr()})",
            lambda: f"{s()}.join({self.expr('list', depth)})",
            lambda: f"{self.percent()}|format({self.args(depth)})",
            lambda: f"({self.percent()} % {self.expr(None, depth)})",
            lambda: f"({self.percent()} % ({self.expr(None, depth)}, {self.expr(None, depth)}))",
            lambda: f"{self.braces()}.format({self.args(depth)})",
            lambda: f"{self.braces()}.format({self.args(depth)})",
            lambda: f"{self.expr('int', depth)}|filesizeformat",
            lambda: f"{self.expr('float', depth)}|filesizeformat(binary=true)",
            lambda: f"{self.expr('dict', depth)}|xmlattr",
            lambda: self.call(depth),
            lambda: f"strftime_now('%Y-%m-%d %H:%M %A %j')",
            lambda: f"{self.expr(None, depth)}|default({s()}{self.pick('', ', true', ', boolean=true', ', boolean=false')})",
            lambda: f"{self.expr(None, depth)}|d(default_value={s()})",
            lambda: f"{self.expr('dicts', depth)}[{n()}].name",
            lambda: f"{self.expr('dict', depth)}.{self.pick('name', 'a', 'items', 'missing', 'size')}",
            lambda: f"{self.expr('dict', depth)}[{self.pick(s(), repr('name'), repr('a'), '1')}]",
            lambda: f"{self.expr('list', depth)}|{self.pick('first', 'last', 'min', 'max')}",
        )()

    def bound(self):
        return self.pick("", "", self.small())

    def attr(self):
        return self.pick("'name'", "'age'", "'address.city'", "'tags'", "'tags.0'", "'role'", "'content'", "'missing'", "attr" if False else "'name'")

    def str_method(self):
        r = self.pick
        s = self.literal_str
        n = self.small
        return r(
            "strip()", "lstrip()", "rstrip()", f"strip({s()})", "split()", "split(',')", f"split({s()}, {n()})", "split(none, 1)",
            "rsplit()", f"rsplit({s()}, 1)", "rsplit(none, 2)", "splitlines()", "splitlines(true)", "splitlines(keepends=true)", "upper()", "lower()",
            "title()", "capitalize()", "swapcase()", "casefold()", f"replace({s()}, {s()})", f"replace('a', 'b', {n()})",
            f"startswith({s()})", f"endswith({s()})", "startswith(('a', ' '))", f"startswith('l', {n()})", f"find({s()})", f"rfind({s()})", f"find('l', {n()})", f"index({s()})",
            f"count({s()})", f"count('l', {n()}, {n()})", "center(20)", f"center({n()}, '*')", "ljust(12, '.')", "rjust(9)", "zfill(8)", "isdigit()", "isalpha()", "isalnum()", "isspace()",
            "isupper()", "islower()", "istitle()", "isdecimal()", "isnumeric()", "isidentifier()", "isprintable()", "isascii()", f"partition({s()})", f"rpartition({s()})",
            f"removeprefix({s()})", f"removesuffix({s()})", "expandtabs()", "expandtabs(3)", "nosuch()", "split(sep=' ', maxsplit=1)", "strip(chars=' ')", "encode", "format_map({'x': 1})",
        )

    def str_filter(self):
        s = self.literal_str
        n = self.small
        return self.pick(
            "upper", "lower", "title", "capitalize", "trim", f"trim({s()})", "length", "wordcount", "reverse", "list", "first", "last", "e", "escape", "forceescape",
            f"replace({s()}, {s()})", f"replace('l', 'L', {n()})", "replace(old='a', new='b')", "indent", "indent(2)", "indent(width=3, first=true)", "indent('> ', true, true)", "indent(blank=True)",
            "truncate(9)", "truncate(5, true)", "truncate(8, end='~')", "truncate(length=10, leeway=0)", "striptags", "urlencode", "center(16)", "center(width=7)", "int", "int(3)", "int(default=1, base=16)",
            "int(base=0)", "float", "float(1.5)", "float(default=0.5)", "string", "default('z')", "wordwrap(6)", "wordwrap(10, false)", "wordwrap(width=7, wrapstring='|')", "abs", "unknownfilter", "batch(2)|list",
            "sort|join", "unique|join", "map('upper')|join", "select('in', 'abc')|join('.')", "slice(2)|list", "tojson", "attr('upper')", "safe", "min", "max", "count", "pprint", "round",
        )

    def percent(self):
        return self.pick("'%s'", "'%d'", "'%5.2f'", "'%-6s|'", "'%r'", "'%05d'", "'%x'", "'%s %s'", "'%d%%'", "'%+d'", "'%e'", "'%g'", "'%(a)s'", "'%10.3e'", "'%c'", "'%#x %o'", "'% d'", "'%.2s'", "'%*d'", "'%08.3f'", "'%i|%s'", "'%G'", "'%X'")

    def braces(self):
        return self.pick(
            "'{}'", "'{0} {1}'", "'{x}'", "'{:>8}'", "'{:.2f}'", "'{:05d}'", "'{!r}'", "'{:,}'", "'{:<6}|{:^7}'", "'{0!s:*^9}'", "'{:x}'", "'{:#b}'", "'{:+.1e}'", "'{:%}'", "'{{}} {}'", "'{:g}'", "'{x[a]}'",
            "'{0.name}'", "'{:_}'", "'{:08.2f}'", "'{:>{}}'", "'{:=+6}'", "'{:n}'", "'{:d}'", "'{:s}'", "'{:06}'", "'{:,.2f}'", "'{:.3}'", "'{:012,}'", "'{:G}'", "'{'", "'{:c}'", "'{!a}'", "'{:z.1f}'",
        )

    def args(self, depth):
        parts = [self.expr(self.pick(None, "int", "float", "str"), depth) for _ in range(self.r.randint(0, 3))]
        if self.chance(0.25):
            parts.append(f"{self.pick('x', 'a')}={self.expr(None, depth)}")
        return ", ".join(parts)

    def make_int(self, depth, _):
        i = lambda: self.expr("int", depth)
        return self.pick(
            lambda: f"({i()} {self.pick('+', '-', '*', '//', '%')} {i()})",
            lambda: f"({i()} ** {self.pick('2', '3', '0', '-1', '10')})",
            lambda: f"-{self.leaf('int')}",
            lambda: f"{self.expr(None, depth)}|length",
            lambda: f"{self.expr('str', depth)}|int",
            lambda: f"{self.expr('float', depth)}|int",
            lambda: f"{i()}|abs",
            lambda: f"{self.expr('list', depth)}|{self.pick('sum', 'length', 'max', 'min', 'count', 'first')}",
            lambda: f"{self.expr('dicts', depth)}|sum(attribute='age'{self.pick('', ', start=5')})",
            lambda: f"{i()}|round({self.pick('', '1', '-1', '2')})",
            lambda: f"{self.expr('list', depth)}.{self.pick('count(1)', 'index(1)', 'append(1)', 'pop()')}",
            lambda: f"{i()}.{self.pick('bit_length()', 'real', 'numerator', 'imag')}",
            lambda: f"({self.expr('bool', depth)} + {i()})",
        )()

    def make_float(self, depth, _):
        f = lambda: self.expr(self.pick("float", "int"), depth)
        return self.pick(
            lambda: f"({f()} {self.pick('+', '-', '*', '/', '//', '%')} {f()})",
            lambda: f"({f()} / {f()})",
            lambda: f"{f()}|round({self.pick('', '1', '2', '-1', '3', 'precision=2')})",
            lambda: f"{f()}|round({self.pick('0', '1')}, '{self.pick('ceil', 'floor', 'common')}')",
            lambda: f"{self.expr('str', depth)}|float",
            lambda: f"{f()}|abs",
            lambda: f"(+{self.leaf('float')})",
            lambda: f"({f()} ** 2)",
            lambda: f"{self.expr('float', depth)}.is_integer()",
        )()

    def make_bool(self, depth, _):
        a = lambda kind=None: self.expr(kind, depth)
        kind = self.pick("int", "str", "float", "list")
        return self.pick(
            lambda: f"({a(kind)} {self.pick('==', '!=', '<', '<=', '>', '>=')} {a(kind)})",
            lambda: f"({a()} {self.pick('==', '!=')} {a()})",
            lambda: f"({a('int')} < {a('int')} <= {a('int')})",
            lambda: f"({a()} {self.pick('in', 'not in')} {a('list')})",
            lambda: f"({a('str')} in {a('str')})",
            lambda: f"({a('str')} in {a('dict')})",
            lambda: f"(not {a()})",
            lambda: f"({a('bool')} {self.pick('and', 'or')} {a('bool')})",
            lambda: f"({a()} is {self.pick('', 'not ')}{self.test(depth)})",
            lambda: f"({a()} is {self.pick('', 'not ')}{self.test(depth)})",
        )()

    def test(self, depth):
        return self.pick(
            "defined", "undefined", "none", "string", "number", "integer", "float", "boolean", "true", "false", "mapping", "sequence", "iterable", "odd", "even", "lower", "upper", "callable", "escaped",
            "divisibleby 3", "divisibleby(2)", f"in {self.literal_list()}", f"eq {self.literal_int()}", f"equalto({self.literal_str()})", f"gt 2", "lt(5)", "ge 1", "le 3", "ne none", "sameas none", "sameas true",
            "filter", "test", "unknowntest", "greaterthan 1", "lessthan 1",
        )

    def make_list(self, depth, _):
        l = lambda: self.expr(self.pick("list", "list", "list", "str", "dict"), depth)
        d = lambda: self.expr("dicts", depth)
        return self.pick(
            lambda: f"[{self.expr(None, depth)}, {self.expr(None, depth)}]",
            lambda: f"({self.expr(None, depth)}, {self.expr(None, depth)})",
            lambda: f"({self.expr('list', depth)} + {self.expr('list', depth)})",
            lambda: f"({self.expr('list', depth)} * {self.small()})",
            lambda: f"{self.expr('list', depth)}[{self.bound()}:{self.bound()}{self.pick('', ':2', ':-1')}]",
            lambda: f"{l()}|sort{self.pick('', '(reverse=true)', '(case_sensitive=true)', '(true)')}",
            lambda: f"{l()}|unique{self.pick('', '(case_sensitive=true)')}|list",
            lambda: f"{l()}|map({self.pick('repr' if False else repr('upper'), repr('string'), repr('length'), repr('default') + ', 1', repr('tojson'), repr('int'), repr('first'), 'attribute=0', repr('round') + ', 1', repr('nope'))}){self.pick('|list', '|list', '|list', '|first', '')}",
            lambda: f"{l()}|{self.pick('select', 'reject')}({self.pick('', repr('odd'), repr('string'), repr('gt') + ', 1', repr('in') + ', [1, 2]', repr('defined'), repr('none'))})|list",
            lambda: f"{d()}|{self.pick('selectattr', 'rejectattr')}({self.attr()}{self.pick('', ', ' + repr('defined'), ', ' + repr('equalto') + ', 31', ', ' + repr('gt') + ', 26', ', ' + repr('string'), ', ' + repr('==') + ', ' + repr('user'))})|list",
            lambda: f"{d()}|map(attribute={self.attr()}{self.pick('', ', default=0', ', default=none')})|list",
            lambda: f"{l()}|batch({self.pick('2', '3', '2, 0', 'linecount=2, fill_with=none', '0')})|list",
            lambda: f"{l()}|slice({self.pick('2', '3', '3, fill_with=9', 'slices=4')})|list",
            lambda: f"{l()}|reverse|list",
            lambda: f"{l()}|list",
            lambda: f"{self.expr('str', depth)}.{self.pick('split()', 'splitlines()', 'split(chr)' if False else 'split(' + repr(' ') + ')')}",
            lambda: f"{self.expr('dict', depth)}.{self.pick('items()', 'keys()', 'values()')}{self.pick('|list', '|list', '')}",
            lambda: f"{self.expr('dict', depth)}|{self.pick('items|list', 'dictsort', 'dictsort(reverse=true)', 'dictsort(by=' + repr('value') + ')', 'dictsort(true)', 'list')}",
            lambda: f"range({self.pick('3', '1, 5', '0, 9, 3', '5, 1, -1', '0')}){self.pick('|list', '')}",
            lambda: f"{d()}|sort(attribute={self.attr()}{self.pick('', ', reverse=true')})|map(attribute='name')|list",
            lambda: f"{d()}|sort(attribute='age,name')|map(attribute='name')|list",
            lambda: f"{d()}|groupby({self.attr()}{self.pick('', ', default=' + repr('-'), ', case_sensitive=true')}){self.pick('', '|map(' + repr('first') + ')|list', '|map(attribute=' + repr('grouper') + ')|list')}",
        )()

    def make_dict(self, depth, _):
        return self.pick(
            lambda: f"{{{self.literal_str()}: {self.expr(None, depth)}, {self.pick('1', repr('z'), 'none', '(1, 2)', '1.0', 'true')}: {self.expr(None, depth)}}}",
            lambda: f"dict({self.expr('dict', depth)}, w={self.expr(None, depth)})",
            lambda: f"{self.expr('dicts', depth)}[0]",
            lambda: f"{self.expr('dict', depth)}.copy()",
            lambda: f"{self.expr('dicts', depth)}|{self.pick('first', 'last')}",
            lambda: f"{self.expr('dict', depth)}.get({self.literal_str()}{self.pick('', ', {}')})",
        )()

    def call(self, depth):
        if not self.macros:
            return self.leaf("str")
        return f"{self.pick(*self.macros)}({self.call_args(depth)})"

    def call_args(self, depth):
        parts = [self.expr(None, depth) for _ in range(self.r.randint(0, 3))]
        if self.chance(0.4):
            parts.append(f"{self.pick('a', 'b', 'extra')}={self.expr(None, depth)}")
        if self.chance(0.1):
            parts.append(f"*{self.expr('list', depth)}")
        if self.chance(0.1):
            parts.append(f"**{self.expr('dict', depth)}")
        return ", ".join(parts)

    # Statements

    def tag(self, inside):
        return "{%" + self.pick("", "", "", "-", "+") + f" {inside} " + self.pick("", "", "", "-") + "%}"

    def data(self):
        return self.pick("", " ", "\n", "\n  ", "x", " y\n", "text ", "\n\n", "\t", "<|im_start|>", "\r\n", "a{b}", "  \n z ", "}}" if False else "}", "\x1c\n")

    def block(self, depth):
        out = self.data()
        saved = list(self.scope)
        for _ in range(self.r.randint(1, 3)):
            out += self.statement(depth + 1) + self.data()
        self.scope = saved
        return out

    def statement(self, depth=0):
        if depth > 3 or self.chance(0.45):
            sign = self.pick("", "", "", "-")
            return "{{" + sign + " " + self.expr() + " " + self.pick("", "", "", "-") + "}}"
        return self.pick(
            self.set, self.set, self.set_block, self.if_, self.if_, self.for_, self.for_, self.for_, self.with_, self.macro, self.macro, self.call_block, self.filter, self.raw, self.comment,
            self.namespace, self.generation, self.stray, self.raises, self.named_block, self.autoescape,
        )(depth)

    def set(self, depth):
        name = self.pick("v1", "v2", "v3", "word", "number")
        text = self.tag(f"set {name} = {self.expr()}")
        if self.chance(0.1):
            text = self.tag(f"set v1, v2 = {self.expr()}, {self.expr()}")
            name = "v1"
        self.scope.append(name)
        return text

    def set_block(self, depth):
        name = self.pick("v1", "v2")
        text = self.tag(f"set {name}{self.pick('', ' | upper', ' | trim', ' | replace(' + repr('a') + ', ' + repr('b') + ')')}") + self.block(depth) + self.tag("endset")
        self.scope.append(name)
        return text

    def if_(self, depth):
        text = self.tag(f"if {self.expr(self.pick('bool', None))}") + self.block(depth)
        if self.chance(0.3):
            text += self.tag(f"elif {self.expr('bool')}") + self.block(depth)
        if self.chance(0.5):
            text += self.tag("else") + self.block(depth)
        return text + self.tag("endif")

    def for_(self, depth):
        saved = list(self.scope)
        what = self.pick("list", "list", "dicts", "items", "str", "pairs")
        if what == "items":
            head, names = f"k, val in {self.expr('dict')}.items()", ["k", "val"]
        elif what == "pairs":
            head, names = f"k, val in {self.expr('dict')}|{self.pick('dictsort', 'items')}", ["k", "val"]
        elif what == "dicts":
            head, names = f"item in {self.expr('dicts')}", ["item.name", "item", "item.role", "item['content']"]
        else:
            head, names = f"item in {self.expr(what)}", ["item"]
        self.scope = self.scope + names
        if self.chance(0.2):
            head += f" if {self.expr('bool')}"
        recursive = self.chance(0.06)
        if recursive:
            head += " recursive"
        self.scope += ["loop.index", "loop.first", "loop.last", "loop.length", "loop.revindex0", "loop.previtem", "loop.nextitem", "loop.cycle('a', 'b')", "loop.changed(item)", "loop.depth"][self.r.randint(0, 8):]
        self.loops += 1
        body = self.block(depth)
        if recursive and self.chance(0.6):
            body += "{{ loop([1]) if loop.depth < 3 }}"
        if self.chance(0.2):
            body += self.tag(f"if {self.expr('bool')}") + self.tag(self.pick("break", "continue")) + self.tag("endif") + self.data()
        self.loops -= 1
        self.scope = saved
        text = self.tag("for " + head) + body
        if self.chance(0.2):
            text += self.tag("else") + self.block(depth)
        return text + self.tag("endfor")

    def with_(self, depth):
        saved = list(self.scope)
        text = self.tag(f"with w1 = {self.expr()}, w2 = {self.expr()}")
        self.scope += ["w1", "w2"]
        text += self.block(depth) + self.tag("endwith")
        self.scope = saved
        return text

    def macro(self, depth):
        saved, macros = list(self.scope), list(self.macros)
        name = self.pick("m1", "m2")
        signature = self.pick("", "a", "a, b", "a, b=2", "a=1, b='q'", "b=text")
        self.scope = self.scope + ["a", "b"]
        self.scope += self.pick([], [], ["varargs"], ["kwargs"], ["varargs", "kwargs"], ["caller()"], ["varargs|length"], ["kwargs.extra"])
        body = self.block(depth)
        self.scope, self.macros = saved, macros + [name]
        text = self.tag(f"macro {name}({signature})") + body + self.tag("endmacro")
        return text + ("{{ " + f"{name}({self.call_args(2)})" + " }}" if self.chance(0.8) else "")

    def call_block(self, depth):
        head = self.pick("call", "call", "call(c1)", "call(c1='d')")
        name = self.pick(*(self.macros or ["m1"]))
        text = "{% macro m3(a) %}[{{ caller(" + self.pick("", "", "a", "1") + ") }}{{ a }}]{% endmacro %}" if self.chance(0.7) else ""
        name = "m3" if text else name
        return text + self.tag(f"{head} {name}({self.call_args(2)})") + self.block(depth) + self.tag("endcall")

    def filter(self, depth):
        return self.tag(f"filter {self.str_filter()}") + self.block(depth) + self.tag("endfilter")

    def raw(self, depth):
        return self.pick("{% raw %}", "{%- raw -%}", "{%+ raw %}", "{% raw -%}") + self.data() + self.pick("{{ x }}", "{% if %}", "{#", "") + self.data() + self.pick("{% endraw %}", "{%- endraw -%}", "{%+ endraw +%}")

    def comment(self, depth):
        return self.pick("{# c #}", "{#- c -#}", "{# {{ x }} #}\n", "{#+ d +#}", "{##}")

    def namespace(self, depth):
        text = self.tag(f"set ns = namespace({self.pick('', 'x=1', 'x=' + self.expr(), '{' + repr('x') + ': 2}')})")
        self.scope += ["ns.x", "ns.y"]
        text += self.tag("for i in range(3)") + self.tag(f"set ns.x = {self.pick('i', 'ns.x ~ i', 'loop.last', self.expr())}") + self.tag("endfor") + "{{ ns.x }}"
        return text

    def generation(self, depth):
        return self.tag("generation") + self.block(depth) + self.tag("endgeneration")

    def named_block(self, depth):
        saved, self.scope = self.scope, []
        text = self.tag(f"block b{self.r.randint(0, 99)}") + self.data() + "{{ " + self.expr() + " }}" + self.tag("endblock")
        self.scope = saved
        return text

    def autoescape(self, depth):
        return self.tag("autoescape false") + self.block(depth) + self.tag("endautoescape")

    def stray(self, depth):
        if self.chance(0.85):
            return self.data()
        return self.pick("{{ 1 + }}", "{% endfor %}", "{{ 'a }}", "{% if %}", "{{ (1 }}", "{% unknown %}", "{{ a b }}", "{% set 1 = 2 %}", "{{ f(a=1, 2) }}", "{% do 1 %}", "{# x", "{{ 1.. }}", "{{ }}", "{% break %}")

    def raises(self, depth):
        return self.tag(f"if {self.expr('bool')} and false") + "{{ raise_exception(" + self.expr("str") + ") }}" + self.tag("endif") if self.chance(0.7) else "{{ raise_exception(" + self.expr("str") + ") }}"

    def template(self):
        return "".join(self.data() + self.statement() for _ in range(self.r.randint(1, 5))) + self.pick("", "", "\n", "\n\n", "\r\n")


def source(seed):
    """A template. Most of those that fail are dropped, because one failure hides everything after it."""
    generator = Generator(seed)
    for _ in range(12):
        template = generator.template()
        if "text" in by_python(template) or generator.chance(0.06):
            break
    return template


class Frozen(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def by_python(source):
    """The text, or an error with its type and its message."""
    try:
        template = chat_template_utils._compile_jinja_template(source)
        given = dict(VARIABLES, messages=[], tools=None, documents=None, add_generation_prompt=False)
        return {"text": template.render(**given)}
    except Exception as err:
        return {"error": str(err), "type": type(err).__name__}


def reason(expected, found):
    """Why a difference is accepted, or None."""
    text = expected.get("text", "")
    if re.search(r"<[^<>]* at 0x[0-9a-f]+>|&lt;.* at 0x", text, re.I | re.S):
        return "Python prints an address"
    if any(0xD800 <= ord(c) < 0xE000 for c in text):
        return "a lone surrogate"
    for part, why in [
        ("127 bits", "an integer of more than 127 bits"),
        ("longer than 80 characters", "pprint of a long value"),
        ("limits of time and memory", "the budget"),
        ("is not supported", "an unsupported method or entity"),
        ("precision of at most", "an extreme precision"),
        ("'LoopContext' object is not iterable", "iteration over the variable loop itself"),
        ("unknown filter", "an unknown filter in a part that Jinja folds away"),
        # Jinja writes `-7 ** x` for `(-7) ** x`, which Python reads as `-(7 ** x)`.
        ("complex numbers", "a power of a negative number"),
        # Jinja folds these before it renders, with other rules.
        ("a slice: expected", "a slice of a constant that has none"),
    ]:
        if part in found.get("error", ""):
            return why
    return None


def shown(message):
    """A message as errors show it: without control characters."""
    names = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return "".join(names.get(c, f"\\u{{{ord(c):x}}}") if unicodedata.category(c) == "Cc" else c for c in message)


def same(expected, found):
    if "text" in expected:
        return expected["text"] == found.get("text")
    if "text" in found:
        return False
    # `raise_exception` is a bare TemplateError.
    return expected["type"] != "TemplateError" or shown(expected["error"]) == found["error"]


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--count", type=int, default=2000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--show", type=int, default=20)
    options.add_argument("--record", type=Path)
    options = options.parse_args()
    chat_template_utils.datetime = Frozen
    warnings.simplefilter("ignore")
    sources = [source(options.seed * 1_000_003 + i) for i in range(options.count)]
    cases = [json.dumps({"template": source, "variables": VARIABLES}) for source in sources]
    answers = subprocess.run([PROGRAM], input="\n".join(cases), capture_output=True, text=True, check=True).stdout
    answers = [json.loads(line) for line in answers.split("\n") if line]
    reasons, differences, kept, errors = {}, [], [], 0
    for template, found in zip(sources, answers, strict=True):
        expected = by_python(template)
        errors += "error" in expected
        why = reason(expected, found)
        if same(expected, found):
            kept.append((template, expected))
        elif why:
            reasons[why] = reasons.get(why, 0) + 1
        else:
            differences.append((template, expected, found))
    for template, expected, found in differences[: options.show]:
        print(f"template {template!r}\n  python {expected}\n  here   {found}\n")
    print(f"{len(sources)} templates, {errors} of them errors in Python; {len(differences)} differences; with a reason: {reasons}")
    if options.record:
        record(options.record, kept)
    return bool(differences)


def record(path, kept):
    """Writes 200 templates, each at most 600 characters long: mostly those with a text."""
    short = [(s, e) for s, e in kept if len(s) < 600 and len(e.get("text", "")) < 600 and " at 0x" not in e.get("text", "")]
    texts = [case for case in short if "text" in case[1]][:170]
    errors = [case for case in short if "error" in case[1]][:30]
    cases = [[source, expected.get("text")] for source, expected in texts + errors]
    lines = ",\n".join(json.dumps(case, ensure_ascii=True) for case in cases)
    variables = json.dumps(VARIABLES, ensure_ascii=True)
    path.write_text(f'{{"variables": {variables},\n"templates": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    sys.exit(main())
