#!/usr/bin/env python3
"""Compares network.py with recorded results of Hugging Face transformers: goldens.py [NAME...]

Reads tests/fixtures/models; tests/golden/mod.rs documents their layout.
"""
import json, struct, sys
from pathlib import Path

import numpy as np

from network import Network

MODELS = Path(__file__).resolve().parents[2] / "tests/fixtures/models"
NAMES = ["llama_tied", "llama_bias", "qwen2", "qwen3", "qwen3_yarn", "mistral_swa", "gemma2", "gemma3", "qwen3_5", "qwen2_moe", "qwen3_moe"]
TOLERANCE = 1e-3


def split(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def weights(path):
    header, data = split(path)
    header.pop("__metadata__", None)
    tensors, at = {}, 0
    for name, info in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
        count = int(np.prod(info["shape"]))
        (n,) = struct.unpack_from("<H", data, at)
        highs = np.frombuffer(data, "<u2", n, at + 2).astype(np.uint32)
        at += 2 + 2 * n
        width = 7 + (n - 1).bit_length()
        nbytes = -(-count * width // 8)
        bits = np.unpackbits(np.frombuffer(data, np.uint8, nbytes, at), bitorder="little")[: count * width]
        at += nbytes
        codes = bits.reshape(count, width) @ (1 << np.arange(width, dtype=np.uint32))
        words = (highs[codes >> 7] << 7 | codes & 127).astype(np.uint32) << 16
        tensors[name] = words.view(np.float32).astype(np.float64).reshape(info["shape"])
    return tensors


def recorded(path):
    """Name -> (values, largest rounding error of their packing)."""
    header, data = split(path)
    tensors, at = {}, 0
    for name, info in header.items():
        rows, cols = int(np.prod(info["shape"][:-1])), info["shape"][-1]
        raw = data[at : at + info["bytes"]]
        at += info["bytes"]
        if info["kind"] == "steps":
            table = np.frombuffer(raw, np.dtype([("step", "<f4"), ("codes", "<i2", cols)]), rows)
            step = table["step"].astype(np.float64)[:, None]
            tensors[name] = table["codes"] * step, step / 2 * 1.001
        elif info["dtype"] == "F32":
            tensors[name] = np.frombuffer(raw, "<f4").astype(np.float64).reshape(rows, cols), 0.0
    return tensors


def arch_of(config):
    """The header `arch` for the config of one of the models in NAMES."""
    family, layers = config["model_type"], config["num_hidden_layers"]
    gemma = family.startswith("gemma")
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    heads = config["num_attention_heads"]
    arch = {
        "hidden_size": config["hidden_size"],
        "num_layers": layers,
        "num_attention_heads": heads,
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "layer_types": ["FullAttention"] * layers,
        "rms_norm_eps": config["rms_norm_eps"],
        "norm_style": "gemma" if gemma or family == "qwen3_5_text" else "qwen",
        "rope_theta": rope.get("rope_theta", config.get("rope_theta")),
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1),
        "tie_word_embeddings": config.get("tie_word_embeddings", gemma),
        "hidden_act": "gelu_tanh" if gemma else "silu",
        "embed_multiplier": np.sqrt(config["hidden_size"]) if gemma else 1,
    }
    for key in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "rope_local_base_freq"):
        arch[key] = config.get(key)
    if family == "gemma2":
        arch["layer_types"] = ["FullAttention" if i % 2 else "SlidingAttention" for i in range(layers)]
    if family == "mistral":
        arch["layer_types"] = ["SlidingAttention"] * layers
    if family in ("gemma2", "gemma3_text", "mistral"):
        arch["sliding_window"] = config["sliding_window"]
        arch["sliding_window_pattern"] = config.get("sliding_window_pattern")
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind == "linear":
        arch["rope_freq_factors"] = [scaling["factor"]] * (arch["head_dim"] // 2)
    if kind == "yarn":
        arch["yarn"] = scaling
    if "num_experts" in config:
        arch["moe"] = {
            "num_experts": config["num_experts"],
            "top_k": config["num_experts_per_tok"],
            "moe_intermediate_size": config["moe_intermediate_size"],
            "norm_topk_prob": config["norm_topk_prob"],
        }
    return arch | {key: value for key, value in config.items() if key.startswith("linear_")}


def check(name):
    here = MODELS / name
    arch = arch_of(json.loads((here / "config.json").read_text()))
    network = Network(arch, weights(here / "model.packed"))
    values = recorded(here / "golden.packed")
    worst = 0.0
    for p, prompt in enumerate(json.loads((here / "golden.json").read_text())["prompts"]):
        path = prompt["prompt"] + prompt["greedy"][:-1]
        found = network.logits(path)
        for key, rows in [(f"logits.p{p}", found[: len(prompt["prompt"])]), (f"greedy.p{p}.logits", found[len(prompt["prompt"]) - 1 :])]:
            wanted, slack = values[key]
            assert rows.shape == wanted.shape, (name, key)
            worst = max(worst, np.max(np.abs(rows - wanted) + slack))
    print(f"{name:<12} largest difference {worst:.1e}")
    assert worst <= TOLERANCE, name


if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        check(name)
