"""A decoder language model in float64, implemented from the text of the format specification.

An independent check of the engine: it has no cache and no chunks, and follows the specification line by line. `arch` is
the object of that name in the header of a model file; `tensors` maps names to arrays. Needs numpy.
"""
import numpy as np


def normalise(x, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def softmax(x):
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def capped(x, cap):
    return cap * np.tanh(x / cap) if cap else x


class Network:
    def __init__(self, arch, tensors):
        self.arch = {key: value for key, value in arch.items() if value is not None}
        self.tensors = tensors
        # The smallest gap between the ranking values of the last chosen expert and the first expert not chosen.
        self.closest_route = np.inf

    def get(self, key, default=None):
        return self.arch.get(key, default)

    def has(self, name):
        return name in self.tensors

    def linear(self, x, name):
        y = x @ self.tensors[name + ".weight"].T
        return y + self.tensors[name + ".bias"] if self.has(name + ".bias") else y

    def norm(self, x, name):
        weight = self.tensors[name + ".weight"]
        x = normalise(x, self.arch["rms_norm_eps"])
        return x * {"qwen": weight, "gemma": 1 + weight}[self.arch["norm_style"]]

    def act(self, x):
        return {"silu": silu, "gelu_tanh": gelu_tanh}[self.get("hidden_act", "silu")](x)

    def logits(self, tokens):
        """Logits, one row per token."""
        embedding = self.tensors["model.embed_tokens.weight"]
        x = embedding[tokens] * self.get("embed_multiplier", 1)
        loops = self.get("num_loops", 1)
        for loop in range(loops):
            for layer in range(self.arch["num_layers"]):
                x = self.layer(x, layer)
            if self.get("loop_final_norm") and loop + 1 < loops:
                x = self.norm(x, "model.norm")
        x = self.norm(x, "model.norm")
        head = embedding if self.get("tie_word_embeddings") else self.tensors["lm_head.weight"]
        # The specification does not say which of these is applied first, so no network here has both.
        assert not (self.get("logit_multiplier") and self.get("final_logit_softcapping"))
        return capped(x @ head.T * self.get("logit_multiplier", 1), self.get("final_logit_softcapping"))

    def layer(self, x, layer):
        at = f"model.layers.{layer}."
        mixer = self.delta_net if self.has(at + "linear_attn.in_proj_qkv.weight") else self.attention
        added = mixer(self.norm(x, at + "input_layernorm"), layer)
        if self.has(at + "pre_feedforward_layernorm.weight"):
            x = x + self.norm(added, at + "post_attention_layernorm")
            added = self.feed_forward(self.norm(x, at + "pre_feedforward_layernorm"), at + "mlp.")
            return x + self.norm(added, at + "post_feedforward_layernorm")
        x = x + added
        return x + self.feed_forward(self.norm(x, at + "post_attention_layernorm"), at + "mlp.")

    def slides(self, layer):
        types, pattern = self.arch["layer_types"], self.get("sliding_window_pattern")
        if pattern and self.get("sliding_window") and all(one == "FullAttention" for one in types):
            return (layer + 1) % pattern != 0
        return types[layer] == "SlidingAttention"

    def frequencies(self, slides):
        """The angle per position of each rotated pair, in radians, and the factor of cos and sin."""
        share, theta = self.get("partial_rotary_factor", 1), self.get("rope_theta", 10000)
        local = slides and ("rope_local_base_freq" in self.arch or "local_partial_rotary_factor" in self.arch)
        if local:
            share = self.get("local_partial_rotary_factor", share)
            theta = self.get("rope_local_base_freq", theta)
        rotated = int(self.arch["head_dim"] * share)
        pairs = np.arange(rotated // 2)
        inv_freq = theta ** (-2.0 * pairs / rotated)
        if local:
            return inv_freq, 1.0
        if "rope_freq_factors" in self.arch:
            inv_freq = inv_freq / np.array(self.arch["rope_freq_factors"])
        yarn = self.get("yarn")
        if not yarn:
            return inv_freq, 1.0
        factor, original = yarn["factor"], yarn["original_max_position_embeddings"]
        # The pair that makes `beta` full turns within the original context.
        pair = lambda beta: rotated * np.log(original / (beta * 2 * np.pi)) / (2 * np.log(theta))
        low = max(np.floor(pair(yarn.get("beta_fast", 32))), 0)
        high = min(np.ceil(pair(yarn.get("beta_slow", 1))), rotated - 1)
        ramp = np.clip((pairs - low) / max(high - low, 0.001), 0, 1)
        inv_freq = inv_freq / factor * ramp + inv_freq * (1 - ramp)
        return inv_freq, yarn.get("attention_factor", 0.1 * np.log(factor) + 1)

    def rotate(self, x, slides):
        """x [token, head, element]: rotates element k together with element k + half the rotated width."""
        inv_freq, factor = self.frequencies(slides)
        half = len(inv_freq)
        angles = np.arange(len(x))[:, None] * inv_freq
        cos, sin = [factor * f(angles)[:, None, :] for f in (np.cos, np.sin)]
        a, b = x[..., :half], x[..., half : 2 * half]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], axis=-1)

    def attention(self, x, layer):
        at = f"model.layers.{layer}.self_attn."
        count, dim, slides = len(x), self.arch["head_dim"], self.slides(layer)
        heads = self.get("attention_heads_per_layer", [self.arch["num_attention_heads"]] * (layer + 1))[layer]
        kv_heads = self.get("kv_heads_per_layer", [self.arch["num_kv_heads"]] * (layer + 1))[layer]
        q = self.linear(x, at + "q_proj").reshape(count, heads, -1)
        k = self.linear(x, at + "k_proj").reshape(count, kv_heads, dim)
        v = self.linear(x, at + "v_proj").reshape(count, kv_heads, dim)
        # With an output gate, q_proj has twice as many rows: for each head its query, then its gate.
        q, gate = q[..., :dim], q[..., dim:]
        steps = [lambda y, name: self.norm(y, name) if self.has(name + ".weight") else y, lambda y, _: self.rotate(y, slides)]
        if self.get("qk_norm_after_rope"):
            steps.reverse()
        for step in steps:
            q, k = step(q, at + "q_norm"), step(k, at + "k_norm")
        if self.get("attn_v_norm"):
            v = normalise(v, self.arch["rms_norm_eps"])
        scale = 1 / np.sqrt(self.get("query_pre_attn_scalar", dim))
        ages = np.arange(count)[:, None] - np.arange(count)
        hidden = (ages < 0) | (ages >= self.arch["sliding_window"]) if slides else ages < 0
        read = np.empty((count, heads, dim))
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores = capped(q[:, head] @ k[:, kv_head].T * scale, self.get("attn_logit_softcapping"))
            read[:, head] = softmax(np.where(hidden, -np.inf, scores)) @ v[:, kv_head]
        if gate.size:
            read = read * sigmoid(gate)
        return self.linear(read.reshape(count, -1), at + "o_proj")

    def delta_net(self, x, layer):
        """Gated DeltaNet with separate input projections."""
        at = f"model.layers.{layer}.linear_attn."
        count = len(x)
        keys, key_dim = self.arch["linear_num_key_heads"], self.arch["linear_key_head_dim"]
        values, value_dim = self.arch["linear_num_value_heads"], self.arch["linear_value_head_dim"]
        qkv, z = self.linear(x, at + "in_proj_qkv"), self.linear(x, at + "in_proj_z")
        taps = self.tensors[at + "conv1d.weight"][:, 0, :]
        past = np.concatenate([np.zeros((taps.shape[1] - 1, qkv.shape[1])), qkv])
        qkv = silu(sum(past[tap : tap + count] * taps[:, tap] for tap in range(taps.shape[1])))
        q, k, v = np.split(qkv, [keys * key_dim, 2 * keys * key_dim], axis=1)
        unit = lambda y: y / np.sqrt(np.sum(y * y, axis=-1, keepdims=True) + 1e-6)
        q, k = [unit(y.reshape(count, keys, key_dim)).repeat(values // keys, axis=1) for y in (q, k)]
        v = v.reshape(count, values, value_dim)
        beta = sigmoid(self.linear(x, at + "in_proj_b"))
        step = np.log1p(np.exp(self.linear(x, at + "in_proj_a") + self.tensors[at + "dt_bias"]))
        decay = np.exp(-np.exp(self.tensors[at + "A_log"]) * step)
        state, read = np.zeros((values, key_dim, value_dim)), np.empty((count, values, value_dim))
        for t in range(count):
            state = state * decay[t][:, None, None]
            error = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t][:, :, None] * error[:, None, :]
            read[t] = np.einsum("hkv,hk->hv", state, q[t]) / np.sqrt(key_dim)
        read = normalise(read, self.arch["rms_norm_eps"]) * self.tensors[at + "norm.weight"]
        return self.linear((read * silu(z.reshape(read.shape))).reshape(count, -1), at + "out_proj")

    def gated(self, x, at):
        return self.linear(self.act(self.linear(x, at + "gate_proj")) * self.linear(x, at + "up_proj"), at + "down_proj")

    def feed_forward(self, x, at):
        if not self.has(at + "gate.weight"):
            return self.gated(x, at)
        moe = self.arch["moe"]
        logits = self.linear(x, at + "gate")
        scores = sigmoid(logits) if moe.get("router_sigmoid") else softmax(logits)
        ranked = scores + self.tensors[at + "expert_bias"] if self.has(at + "expert_bias") else scores
        order = np.argsort(-ranked, axis=1, kind="stable")
        experts = logits.shape[1]
        top_k = min(moe["top_k"], experts)
        y = np.zeros_like(x)
        for t, x_t in enumerate(x):
            chosen = order[t, :top_k]
            if top_k < experts:
                gap = ranked[t, order[t, top_k - 1]] - ranked[t, order[t, top_k]]
                self.closest_route = min(self.closest_route, gap)
            weights = scores[t, chosen]
            if moe["norm_topk_prob"]:
                weights = weights / np.sum(weights)
            weights = weights * moe.get("routed_scaling_factor", 1)
            for expert, weight in zip(chosen, weights):
                y[t] += weight * self.gated(x_t, f"{at}experts.{expert}.")
        if self.has(at + "shared_expert.gate_proj.weight"):
            gated = self.has(at + "shared_expert_gate.weight")
            weight = sigmoid(self.linear(x, at + "shared_expert_gate")) if gated else 1
            y += weight * self.gated(x, at + "shared_expert.")
        return y
