#!/usr/bin/env python3
"""Compares how random texts are tokenized here and by the Python package `tokenizers`.

    pip install tokenizers
    cargo build --example tokenize-texts
    scripts/reference/token_ids.py [--count 2000] [--seed 0] [--show 20] [tokenizer.json ...]

Without files, all tokenizers of tests/fixtures are compared. Prints the differences: ids with and without special tokens
around the text, and the text of the ids with and without special tokens.
"""
import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "target/debug/examples/tokenize-texts"

WORDS = (
    "the of and hello World don't we'll I'M it's IT'S 2024 1234567 3.14 foo_bar fooBar http://a.b/c?d=e&f=g x=1; naïve "
    "Straße ÀÉÎ Łódź привет ΑΒΓς 漢字かなカナ 한국어 العربية עברית हिन्दी ไทย 👩‍👩‍👧 🇩🇪 😀 e\u0301 ﬁ ½ ² ① Ⅷ <s> </s> <unk> <|im_start|> "
    "<|endoftext|> <bos> <0x0A> ▁ ▁x [INST] \\n {} () [] \"q\" 'q' «q» — … “x” ，。！ if(x){return;} \u200b \ufeff \u00ad"
).split(" ")
BLANKS = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "\u00a0", "\u3000", "\u2028", "\x0b", "\x85", "\x1c", ""]
RANGES = [(0, 0x7F), (0x80, 0x24F), (0x300, 0x52F), (0x590, 0x6FF), (0x900, 0xE7F), (0x1E00, 0x2BFF), (0x3000, 0x9FFF),
          (0xAC00, 0xD7A3), (0xE000, 0xFFFD), (0x10000, 0x1FAFF), (0x20000, 0x2A6DF), (0xE0000, 0xE01EF)]


def random_text(r, special):
    parts = []
    for _ in range(r.randint(0, 12)):
        kind = r.random()
        if kind < 0.5:
            parts.append(r.choice(WORDS))
        elif kind < 0.6 and special:
            parts.append(r.choice(special))
        elif kind < 0.7:
            parts.append(str(r.randint(0, 10 ** r.randint(1, 12))))
        elif kind < 0.8:
            parts.append(r.choice("abcdefghij -'.,!?_\n") * r.randint(1, 9))
        else:
            low, high = r.choice(RANGES)
            parts.append("".join(chr(r.randint(low, high)) for _ in range(r.randint(1, 5))))
        parts.append(r.choice(BLANKS) if r.random() < 0.7 else "")
    return "".join(parts)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--count", type=int, default=2000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--show", type=int, default=20)
    options.add_argument("files", nargs="*", type=Path)
    options = options.parse_args()
    fixtures = ROOT / "tests/fixtures"
    files = options.files or sorted([*fixtures.glob("tokenizers/*/tokenizer.json"), *fixtures.glob("models/*/tokenizer.json")])
    cases, expected = [], []
    for file in files:
        r = random.Random(f"{options.seed}/{file.parent.name}")
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        for _ in range(options.count):
            text = random_text(r, special)
            ids = tokenizer.encode(text).ids
            plain = tokenizer.encode(text, add_special_tokens=False).ids
            texts = [tokenizer.decode(ids, skip_special_tokens=skip) for skip in (False, True)]
            cases.append(json.dumps({"file": str(file.resolve()), "text": text}))
            expected.append([ids, plain, *texts])
    answers = subprocess.run([PROGRAM], input="\n".join(cases), capture_output=True, text=True, check=True).stdout
    found = [json.loads(line) for line in answers.split("\n") if line]
    differences = [case for case in zip(cases, expected, found, strict=True) if case[1] != case[2]]
    for case, wanted, got in differences[: options.show]:
        print(f"{case}\n  python {wanted}\n  here   {got}\n")
    print(f"{len(files)} tokenizers, {len(cases)} texts, {len(differences)} differences")
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
