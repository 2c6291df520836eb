#!/usr/bin/env python3
"""Random blocks of every GGUF block type with the values that the Python package `gguf` (with numpy) decodes them to.

    gguf_blocks.py OUT.json [BLOCKS]

writes {type: {"bytes": hex, "values": hex of f32}}. The repository has the result of `gguf_blocks.py
tests/fixtures/gguf/blocks.json`. A larger number of BLOCKS, 2 by default, makes a longer check of the same test.
"""
import json
import sys

import numpy
from gguf import GGMLQuantizationType as Type
from gguf import GGML_QUANT_SIZES, quants

# Byte offsets of the f16 of a block. They get finite values.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [], "TQ1_0": [52], "TQ2_0": [64], "PQ2_0": [0], "PTQ1_0": [26],
}
# Types that the package does not have: weights and bytes of a block.
OTHERS = {"PQ2_0": (128, 34), "PTQ1_0": (128, 28)}


def digits(column, count):
    """Base-3 digits of the bytes of each row, the first digits of all bytes first."""
    powers = [column * numpy.uint8(3**digit) for digit in range(count)]
    return numpy.concatenate([(power.astype(numpy.uint16) * 3 >> 8) for power in powers], axis=1)


def ternary(name, blocks):
    """Two and base-3 digits, the values 0, 1, 2 (and 3) of which mean -1, 0, 1 (and 2) times an f16."""
    at = HALVES[name][0]
    scale = blocks[:, at : at + 2].copy().view(numpy.float16).astype(numpy.float32)
    if name == "PQ2_0":
        shifts = numpy.array([0, 2, 4, 6], dtype=numpy.uint8)
        codes = (blocks[:, 2:, None] >> shifts & 3).reshape(len(blocks), 128)
    else:
        codes = numpy.concatenate(
            [digits(blocks[:, :16], 5), digits(blocks[:, 16:24], 5), digits(blocks[:, 24:26], 4)], axis=1
        )
    return (codes.astype(numpy.float32) - 1) * scale


def main(out, count=2):
    random = numpy.random.default_rng(1)
    found = {}
    for name, halves in HALVES.items():
        weights, size = OTHERS[name] if name in OTHERS else GGML_QUANT_SIZES[Type[name]]
        blocks = random.integers(0, 256, (count, size), dtype=numpy.uint8)
        for at in halves:
            infinite = blocks[:, at + 1] & 0x7C == 0x7C
            blocks[infinite, at + 1] &= 0x83
        with numpy.errstate(over="ignore"):
            values = ternary(name, blocks) if name in OTHERS else quants.dequantize(blocks, Type[name])
        assert values.shape == (count, weights) and values.dtype == numpy.float32
        found[name] = {"bytes": blocks.tobytes().hex(), "values": values.tobytes().hex()}
    with open(out, "w") as file:
        json.dump(found, file, separators=(",", ":"))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
