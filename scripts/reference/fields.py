#!/usr/bin/env python3
"""Writes tests/fixtures/fields: small networks with header fields that no golden model has, and their logits by network.py.

NAME.json holds `arch`, the tensors, the tokens, and variants of the network: merge patches (RFC 7396) of `arch` and of the
tensors. NAME.logits is f32: one row per token, then one row per variant, for the last token. Each variant lists in `about`
the fields that it changes. Its logits must differ clearly from those of the network, so that an engine that ignores one of
these fields cannot match both.

Weights are not stored. Element i of tensor `name`, described as [shape, base, exponent], is base + (u_i - 512) * 2^exponent,
where u_i is the upper 10 bits of the output of SplitMix64 for the state fnv1a(seed/name) + (i + 1) * 0x9E3779B97F4A7C15.
These values are exact in f16.
"""
import json
from pathlib import Path

import numpy as np

from network import Network

FIXTURES = Path(__file__).resolve().parents[2] / "tests/fixtures/fields"
TOKENS = 21
VOCAB = 72
# The smallest difference between the logits of a network and of a variant; tests compare with a tolerance of 1e-3.
APART = 0.05
# The smallest gap between the scores of experts; f32 sums change scores by up to 1e-6.
CLOSEST_ROUTE = 1e-3


def values(seed, name, shape, base, exponent):
    state = 0xCBF29CE484222325
    for byte in f"{seed}/{name}".encode():
        state = (state ^ byte) * 0x100000001B3 % 2**64
    with np.errstate(over="ignore"):
        z = np.uint64(state) + np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    u = (z ^ (z >> np.uint64(31))) >> np.uint64(54)
    result = base + (u.astype(np.float64) - 512) * 2.0**exponent
    assert np.array_equal(result, result.astype(np.float16)), name
    return result.reshape(shape)


def matrix(rows, cols, louder=0):
    """A matrix whose output has about the magnitude of its input, times 2^louder."""
    return [[rows, cols], 0, round(np.log2(1 / (np.sqrt(cols) * 296))) + louder]


def noise(*shape):
    return [list(shape), 0, -10]


class Layers:
    """The tensors of a network, layer by layer."""

    def __init__(self, arch):
        self.arch, self.tensors = arch, {}
        hidden = arch["hidden_size"]
        self.tensors["model.embed_tokens.weight"] = [[VOCAB, hidden], 0, -9]
        self.tensors["model.norm.weight"] = self.norm(hidden)
        if not arch.get("tie_word_embeddings"):
            self.tensors["lm_head.weight"] = matrix(VOCAB, hidden, 1)

    def norm(self, count):
        return [[count], 0 if self.arch["norm_style"] == "gemma" else 1, -10]

    def norms(self, layer, around=False):
        names = ["input_layernorm", "post_attention_layernorm"]
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if around else []
        for name in names:
            self.tensors[f"model.layers.{layer}.{name}.weight"] = self.norm(self.arch["hidden_size"])

    def attention(self, layer, heads, kv_heads, gate=False, head_norms=False, bias=False):
        hidden, dim = self.arch["hidden_size"], self.arch["head_dim"]
        full = lambda name: f"model.layers.{layer}.self_attn.{name}"
        rows = {"q_proj": heads * dim * (2 if gate else 1), "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        for name, count in rows.items():
            self.tensors[full(name) + ".weight"] = matrix(count, hidden, 0 if head_norms or name == "v_proj" else 1)
            if bias:
                self.tensors[full(name) + ".bias"] = noise(count)
        self.tensors[full("o_proj.weight")] = matrix(hidden, heads * dim)
        if head_norms:
            for name in ("q_norm", "k_norm"):
                self.tensors[full(name) + ".weight"] = self.norm(dim)

    def delta_net(self, layer):
        hidden, get = self.arch["hidden_size"], lambda key: self.arch["linear_" + key]
        keys, values = get("num_key_heads") * get("key_head_dim"), get("num_value_heads") * get("value_head_dim")
        parts = {
            "in_proj_qkv.weight": matrix(2 * keys + values, hidden),
            "in_proj_z.weight": matrix(values, hidden),
            "in_proj_b.weight": matrix(get("num_value_heads"), hidden),
            "in_proj_a.weight": matrix(get("num_value_heads"), hidden),
            "conv1d.weight": [[2 * keys + values, 1, get("conv_kernel_dim")], 0, -9],
            "A_log": noise(get("num_value_heads")),
            "dt_bias": noise(get("num_value_heads")),
            "norm.weight": [[get("value_head_dim")], 1, -10],
            "out_proj.weight": matrix(hidden, values),
        }
        self.tensors |= {f"model.layers.{layer}.linear_attn.{name}": spec for name, spec in parts.items()}

    def gated(self, prefix, width):
        hidden = self.arch["hidden_size"]
        for name, rows, cols in [("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)]:
            self.tensors[f"{prefix}.{name}_proj.weight"] = matrix(rows, cols, 0 if name == "down" else 1)

    def dense(self, layer, width):
        self.gated(f"model.layers.{layer}.mlp", width)

    def mixture(self, layer, experts, bias=False, shared=False, shared_gate=False):
        at, moe, hidden = f"model.layers.{layer}.mlp", self.arch["moe"], self.arch["hidden_size"]
        self.tensors[f"{at}.gate.weight"] = matrix(experts, hidden, 1)
        for expert in range(experts):
            self.gated(f"{at}.experts.{expert}", moe["moe_intermediate_size"])
        if bias:
            self.tensors[f"{at}.expert_bias"] = noise(experts)
        if shared:
            self.gated(f"{at}.shared_expert", moe["shared_expert_intermediate_size"])
        if shared_gate:
            self.tensors[f"{at}.shared_expert_gate.weight"] = matrix(1, hidden)


def base(name, layers, **more):
    arch = {
        "arch_name": name,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": layers,
        "num_attention_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "layer_types": ["FullAttention"] * layers,
        "rms_norm_eps": 1e-6,
        "norm_style": "qwen",
        # A small base, so that every pair rotates visibly within a few tokens.
        "rope_theta": 100.0,
    }
    return arch | more


def without(*fields, **tensors):
    """A variant without the given header fields."""
    return {"about": list(fields), "arch": dict.fromkeys(fields), "tensors": tensors}


def attention():
    """Fields of attention: heads per layer, rotation, norms, gates, score changes; factors of embedding and logits."""
    heads, kv_heads = [4, 2, 6, 2], [2, 1, 3, 2]
    arch = base(
        "attention", 4,
        hidden_size=48,
        num_attention_heads=4,
        num_kv_heads=2,
        layer_types=["FullAttention", "SlidingAttention"] * 2,
        attention_heads_per_layer=heads,
        kv_heads_per_layer=kv_heads,
        partial_rotary_factor=0.5,
        local_partial_rotary_factor=1.0,
        rope_local_base_freq=20.0,
        yarn={"factor": 4.0, "original_max_position_embeddings": 16},
        sliding_window=5,
        embed_multiplier=3.0,
        query_pre_attn_scalar=5.0,
        attn_logit_softcapping=1.5,
        logit_multiplier=1.75,
        attn_v_norm=True,
        qk_norm_after_rope=True,
    )

    def network(heads, kv_heads, gates):
        net = Layers(arch)
        for layer in range(4):
            net.norms(layer)
            net.attention(layer, heads[layer], kv_heads[layer], layer in gates, head_norms=layer < 2, bias=layer in (1, 3))
            net.dense(layer, 48)
        return net.tensors

    tensors = network(heads, kv_heads, (1, 2))
    differ = lambda other: {name: spec for name, spec in other.items() if spec != tensors[name]}
    head_norms = {name: None for name in tensors if name.endswith(("q_norm.weight", "k_norm.weight"))}
    variants = [without(field) for field in (
        "partial_rotary_factor", "local_partial_rotary_factor", "rope_local_base_freq", "yarn", "embed_multiplier",
        "query_pre_attn_scalar", "attn_logit_softcapping", "logit_multiplier", "attn_v_norm", "qk_norm_after_rope",
    )]
    variants += [
        without("attention_heads_per_layer", "kv_heads_per_layer") | {"tensors": differ(network([4] * 4, [2] * 4, (1, 2)))},
        without("kv_heads_per_layer") | {"tensors": differ(network(heads, [2] * 4, (1, 2)))},
        {"about": ["output gate"], "arch": {}, "tensors": differ(network(heads, kv_heads, ()))},
        {"about": ["q_norm", "k_norm"], "arch": {}, "tensors": head_norms},
        # Without the factor of YaRN the order of norm and rotation matters only through the weights of the norm.
        {"about": ["qk_norm_after_rope"], "arch": {"qk_norm_after_rope": None, "yarn": None}, "tensors": {}},
    ]
    return arch, tensors, variants


def mixture():
    """Layers with and without experts, different numbers of experts per layer, and the fields of the router."""
    moe = {
        "num_experts": 8,
        "top_k": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 40,
        "router_sigmoid": True,
        "routed_scaling_factor": 2.5,
    }
    arch = base("mixture", 6, moe=moe, sliding_window=4, sliding_window_pattern=2)
    net = Layers(arch)
    for layer in range(6):
        net.norms(layer)
        net.attention(layer, 2, 1)
    net.dense(0, 48)
    net.mixture(1, 5, bias=True, shared=True)
    net.dense(2, 32)
    net.mixture(3, 7, bias=True, shared=True, shared_gate=True)
    # Fewer experts than top_k.
    net.mixture(4, 2)
    net.mixture(5, 8, shared=True)
    removed = lambda end: {name: None for name in net.tensors if end in name}
    other = lambda **changes: {"about": list(changes), "arch": {"moe": changes}, "tensors": {}}
    variants = [
        other(router_sigmoid=None),
        other(routed_scaling_factor=None),
        other(norm_topk_prob=False),
        other(router_sigmoid=False, norm_topk_prob=False),
        other(top_k=1),
        {"about": ["expert_bias"], "arch": {}, "tensors": removed("expert_bias")},
        {"about": ["expert_bias", "router_sigmoid"], "arch": {"moe": {"router_sigmoid": None}}, "tensors": removed("expert_bias")},
        {"about": ["shared_expert_gate"], "arch": {}, "tensors": removed("shared_expert_gate")},
        {"about": ["shared_expert"], "arch": {}, "tensors": removed("shared_expert")},
        {"about": ["layers without experts"], "arch": {}, "tensors": removed("layers.3.mlp") | dense_in_place(net, 3)},
        without("sliding_window_pattern"),
    ]
    return arch, net.tensors, variants


def dense_in_place(net, layer):
    other = Layers(net.arch)
    other.dense(layer, 24)
    return {name: spec for name, spec in other.tensors.items() if ".layers." in name}


def passes():
    """A looped network: three iterations over its layers, among them a recurrent and a mixture layer, with post norms in two."""
    moe = {
        "num_experts": 4,
        "top_k": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 24,
    }
    arch = base(
        "passes", 3,
        norm_style="gemma",
        layer_types=["SlidingAttention", "LinearAttention", "FullAttention"],
        sliding_window=6,
        tie_word_embeddings=True,
        hidden_act="gelu_tanh",
        embed_multiplier=5.5,
        final_logit_softcapping=6.0,
        num_loops=3,
        loop_final_norm=True,
        linear_conv_kernel_dim=4,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        moe=moe,
    )
    net = Layers(arch)
    net.norms(0, around=True)
    net.attention(0, 2, 1, gate=True)
    net.dense(0, 48)
    net.norms(1)
    net.delta_net(1)
    net.mixture(1, 4)
    net.norms(2, around=True)
    net.attention(2, 2, 1, head_norms=True)
    net.mixture(2, 3, shared=True)
    variants = [without(field) for field in (
        "num_loops", "loop_final_norm", "hidden_act", "embed_multiplier", "final_logit_softcapping",
    )]
    variants += [
        {"about": ["num_loops"], "arch": {"num_loops": 2}, "tensors": {}},
        {"about": ["num_loops", "loop_final_norm"], "arch": {"num_loops": 2, "loop_final_norm": None}, "tensors": {}},
        {"about": ["norm_style"], "arch": {"norm_style": "qwen"}, "tensors": {}},
        {
            "about": ["norms around a mixture"],
            "arch": {},
            "tensors": {f"model.layers.2.{name}_feedforward_layernorm.weight": None for name in ("pre", "post")},
        },
    ]
    return arch, net.tensors, variants


def patched(value, patch):
    """Applies a merge patch (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    value = dict(value) if isinstance(value, dict) else {}
    for key, change in patch.items():
        if change is None:
            value.pop(key, None)
        else:
            value[key] = patched(value.get(key), change)
    return value


def run(seed, arch, tensors, tokens):
    network = Network(arch, {name: values(seed, name, *spec) for name, spec in tensors.items()})
    logits = network.logits(tokens)
    return logits, network.closest_route


def attempt(seed, arch, tensors, variants, tokens):
    """The logits for a seed, or `None` if the scores of two experts are too close."""
    logits, closest = run(seed, arch, tensors, tokens)
    rows, apart = list(logits), []
    for variant in variants:
        other, route = run(seed, patched(arch, variant["arch"]), patched(tensors, variant["tensors"]), tokens)
        closest = min(closest, route)
        apart.append(np.max(np.abs(other[-1] - logits[-1])))
        rows.append(other[-1])
    if closest < CLOSEST_ROUTE:
        return None
    for variant, distance in zip(variants, apart):
        print(f"  differs by {distance:6.3f}: {', '.join(variant['about'])}")
        assert distance >= APART, variant["about"]
    return np.array(rows, dtype="<f4")


def main():
    FIXTURES.mkdir(parents=True, exist_ok=True)
    for make in (attention, mixture, passes):
        arch, tensors, variants = make()
        name = make.__name__
        tokens = [(i * i * 7 + 3 * i + 11) % VOCAB for i in range(TOKENS)]
        for number in range(1000):
            seed = f"{name}-{number}"
            rows = attempt(seed, arch, tensors, variants, tokens)
            if rows is not None:
                break
        print(f"{name}: seed {seed}, standard deviation of the logits {np.std(rows):.2f}")
        text = {"seed": seed, "tokens": tokens, "arch": arch, "tensors": tensors, "variants": variants}
        (FIXTURES / f"{name}.json").write_text(json.dumps(text, separators=(",", ":")) + "\n")
        (FIXTURES / f"{name}.logits").write_bytes(rows.tobytes())


if __name__ == "__main__":
    main()
