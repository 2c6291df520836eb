#!/usr/bin/env python3
"""Perplexity of a GGUF file of the architecture llama: a forward pass in numpy over the dequantised weights (package `gguf`).

    llama_perplexity.py MODEL.gguf TOKENS.json [CONTEXT]

TOKENS.json is a list of token ids; the tokens of each window of CONTEXT (512) tokens are predicted from those before them in
the window, as `cmf-gpu ppl --ctx CONTEXT --stride CONTEXT` does. Prints the mean negative log-likelihood and the perplexity.
"""
import json
import sys

import numpy
from gguf import GGUFReader, quants


class Llama:
    def __init__(self, path):
        reader = GGUFReader(path)
        key = lambda name: reader.fields[f"llama.{name}"].contents()
        self.layers, self.heads, self.kv_heads = (
            key("block_count"), key("attention.head_count"), key("attention.head_count_kv")
        )
        self.hidden, self.eps, self.base = (
            key("embedding_length"), key("attention.layer_norm_rms_epsilon"), key("rope.freq_base")
        )
        self.head = self.hidden // self.heads
        self.weights = {
            tensor.name: quants.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float64)
            for tensor in reader.tensors
        }

    def weight(self, name, layer=None):
        prefix = "" if layer is None else f"blk.{layer}."
        return self.weights[f"{prefix}{name}.weight"]

    def norm(self, x, weight):
        return x / numpy.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * weight

    def rotate(self, x):
        """Files have the two halves of a head interleaved."""
        positions = numpy.arange(len(x))[:, None]
        angles = positions * self.base ** (-numpy.arange(0, self.head, 2) / self.head)
        cos, sin = numpy.cos(angles)[:, None], numpy.sin(angles)[:, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        return numpy.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    def attention(self, x, layer):
        tokens = len(x)
        split = lambda name, heads: (x @ self.weight(name, layer).T).reshape(tokens, heads, self.head)
        q, k = self.rotate(split("attn_q", self.heads)), self.rotate(split("attn_k", self.kv_heads))
        v = split("attn_v", self.kv_heads)
        k, v = (numpy.repeat(part, self.heads // self.kv_heads, axis=1) for part in (k, v))
        scores = numpy.einsum("qhd,khd->hqk", q, k) / numpy.sqrt(self.head)
        scores += numpy.triu(numpy.full((tokens, tokens), -numpy.inf), 1)
        scores = numpy.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        out = numpy.einsum("hqk,khd->qhd", scores, v).reshape(tokens, -1)
        return out @ self.weight("attn_output", layer).T

    def feed_forward(self, x, layer):
        gate, up = (x @ self.weight(name, layer).T for name in ("ffn_gate", "ffn_up"))
        return (gate / (1 + numpy.exp(-gate)) * up) @ self.weight("ffn_down", layer).T

    def logits(self, tokens):
        x = self.weight("token_embd")[tokens]
        for layer in range(self.layers):
            x = x + self.attention(self.norm(x, self.weight("attn_norm", layer)), layer)
            x = x + self.feed_forward(self.norm(x, self.weight("ffn_norm", layer)), layer)
        head = "output" if "output.weight" in self.weights else "token_embd"
        return self.norm(x, self.weight("output_norm")) @ self.weight(head).T


def main(path, tokens, context=512):
    model, tokens = Llama(path), json.load(open(tokens))
    total, count = 0.0, 0
    for first in range(0, len(tokens), int(context)):
        window = tokens[first : first + int(context)]
        logits = model.logits(window)[:-1]
        top = logits.max(-1, keepdims=True)
        normal = top[:, 0] + numpy.log(numpy.exp(logits - top).sum(-1))
        total += (normal - logits[numpy.arange(len(logits)), window[1:]]).sum()
        count += len(logits)
    print(f"nll {total / count:.6f} ppl {numpy.exp(total / count):.6f} tokens {count}")


if __name__ == "__main__":
    main(*sys.argv[1:])
