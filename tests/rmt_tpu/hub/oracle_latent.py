"""Kimi Linear and DeepSeek-V3 in NumPy and float64, by their equations and the names of tensors."""

import numpy as np

DEFAULTS = {
    "kimi_linear": {
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "layer_types": None,
        "linear_attn_config": None,
        "linear_conv_kernel_dim": 4,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "mla_use_nope": True,
        "mlp_layer_types": None,
        "model_max_length": 1_048_576,
        "moe_intermediate_size": 1024,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.446,
        "topk_group": 1,
        "use_grouped_topk": True,
        "v_head_dim": 128,
    },
    "deepseek_v3": {
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_interleave": True,
        "rope_scaling": None,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
    },
}


def of_experts(c):
    """The numbers of experts, of those chosen, of shared ones and of groups; and normalisation."""
    kimi = "num_experts num_experts_per_token num_shared_experts num_expert_group moe_renormalize"
    other = "n_routed_experts num_experts_per_tok n_shared_experts n_group norm_topk_prob"
    return [c[name] for name in (kimi if is_kimi(c) else other).split()]


def is_kimi(c):
    return c["model_type"] == "kimi_linear"


def linear(c):
    """The sizes of linear attention, and the layers that have it, from 0."""
    given = c["linear_attn_config"] or {}
    pairs = (
        ("num_heads", "linear_num_heads"),
        ("head_dim", "linear_head_dim"),
        ("short_conv_kernel_size", "linear_conv_kernel_dim"),
    )
    sizes = [given.get(name, c[other]) for name, other in pairs]
    layers = range(c["num_hidden_layers"])
    if "kda_layers" in given:
        return *sizes, [layer - 1 for layer in given["kda_layers"]]
    if c["layer_types"] is not None:
        return *sizes, [layer for layer in layers if c["layer_types"][layer] == "linear_attention"]
    return *sizes, [layer for layer in layers if layer == 0 or layer % 4]


def is_linear(c, layer):
    return is_kimi(c) and layer in linear(c)[-1]


def has_experts(c, layer):
    if c.get("mlp_layer_types") is not None:
        return c["mlp_layer_types"][layer] == "sparse"
    return layer >= c["first_k_dense_replace"] and layer % c["moe_layer_freq"] == 0


def shapes(c):
    width, heads = c["hidden_size"], c["num_attention_heads"]
    latent, own, part = (c[n] for n in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"))
    full = {
        "kv_a_proj_with_mqa.weight": (latent + part, width),
        "kv_a_layernorm.weight": (latent,),
        "kv_b_proj.weight": (2 * heads * own, latent),
        "o_proj.weight": (width, heads * own),
    }
    rank = c["q_lora_rank"]
    if rank is None:
        full["q_proj.weight"] = (heads * (own + part), width)
    else:
        full |= {"q_a_proj.weight": (rank, width), "q_a_layernorm.weight": (rank,)}
        full["q_b_proj.weight"] = (heads * (own + part), rank)

    def mlp(name, hidden):
        found = {f"{name}{matrix}_proj.weight": (hidden, width) for matrix in ("gate", "up")}
        return found | {f"{name}down_proj.weight": (width, hidden)}

    norms = {f"{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    found = {"model.embed_tokens.weight": (c["vocab_size"], width), "model.norm.weight": (width,)}
    if not c["tie_word_embeddings"]:
        found["lm_head.weight"] = (c["vocab_size"], width)
    for layer in range(c["num_hidden_layers"]):
        mixing = linear_shapes(c) if is_linear(c, layer) else full
        of_layer = norms | {f"self_attn.{name}": shape for name, shape in mixing.items()}
        of_layer |= expert_shapes(c, mlp) if has_experts(c, layer) else {}
        of_layer |= {} if has_experts(c, layer) else mlp("mlp.", c["intermediate_size"])
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return found


def linear_shapes(c):
    heads, size, taps, _ = linear(c)
    width, inner = c["hidden_size"], heads * size
    found = {f"{letter}_proj.weight": (inner, width) for letter in "qkv"}
    found |= {f"{letter}_conv1d.weight": (inner, 1, taps) for letter in "qkv"}
    for letter in "fg":
        found |= {
            f"{letter}_a_proj.weight": (size, width),
            f"{letter}_b_proj.weight": (inner, size),
        }
    return found | {
        "b_proj.weight": (heads, width),
        "A_log": (1, 1, heads, 1),
        "dt_bias": (inner,),
        "o_norm.weight": (size,),
        "o_proj.weight": (width, inner),
    }


def expert_shapes(c, mlp):
    count, _, shared, *_ = of_experts(c)
    width, hidden = c["hidden_size"], c["moe_intermediate_size"]
    name = prefix(c)
    found = {f"{name}gate.weight": (count, width), f"{name}gate.e_score_correction_bias": (count,)}
    for e in range(count):
        gate, up, down = matrices(c, e)
        found |= {gate: (hidden, width), up: (hidden, width), down: (width, hidden)}
    return found | (mlp(f"{name}shared_experts.", shared * hidden) if shared else {})


def prefix(c):
    return "block_sparse_moe." if is_kimi(c) else "mlp."


def matrices(c, e):
    names = ("w1", "w3", "w2") if is_kimi(c) else ("gate_proj", "up_proj", "down_proj")
    return [f"{prefix(c)}experts.{e}.{name}.weight" for name in names]


def logits(t, c, tokens, tools):
    """`tools` are the functions of other kinds: norm, turned, yarn, attended and silu."""
    h = t["model.embed_tokens.weight"][tokens]
    for layer in range(c["num_hidden_layers"]):
        begin = f"model.layers.{layer}."
        own = {n.removeprefix(begin): x for n, x in t.items() if n.startswith(begin)}
        inner = {n.removeprefix("self_attn."): x for n, x in own.items() if n.startswith("self_")}
        mixing = delta_attention if is_linear(c, layer) else latent_attention
        x = tools.norm(h, own["input_layernorm.weight"], c)
        h = h + mixing(x, inner, c, tools) @ inner["o_proj.weight"].T
        x = tools.norm(h, own["post_attention_layernorm.weight"], c)
        gated = lambda x, name, own=own: swiglu(
            x, *(own[f"{name}{matrix}_proj.weight"] for matrix in ("gate", "up", "down")), tools
        )
        if not has_experts(c, layer):
            h = h + gated(x, "mlp.")
            continue
        h = h + experts(x, own, c, tools)
        if of_experts(c)[2]:
            h = h + gated(x, f"{prefix(c)}shared_experts.")
    unembedding = "model.embed_tokens" if c["tie_word_embeddings"] else "lm_head"
    return tools.norm(h, t["model.norm.weight"], c) @ t[f"{unembedding}.weight"].T


def swiglu(x, gate, up, down, tools):
    return (tools.silu(x @ gate.T) * (x @ up.T)) @ down.T


def latent_attention(x, own, c, tools):
    """DeepSeek-AI (2024), equations 1 to 11. The epsilon of its norms is always 1e-6."""
    latent, size = c["kv_lora_rank"], c["qk_nope_head_dim"]
    norm = lambda y, name: tools.norm(y, own[f"{name}.weight"], c | {"rms_norm_eps": 1e-6})
    split = lambda y: y.reshape(len(x), c["num_attention_heads"], -1)
    if c["q_lora_rank"] is None:
        q = split(x @ own["q_proj.weight"].T)
    else:
        q = norm(x @ own["q_a_proj.weight"].T, "q_a_layernorm")
        q = split(q @ own["q_b_proj.weight"].T)
    down = x @ own["kv_a_proj_with_mqa.weight"].T
    up = split(norm(down[:, :latent], "kv_a_layernorm") @ own["kv_b_proj.weight"].T)
    k, v = up[..., :size], up[..., size:]
    k_part, q_part, divisor = down[:, None, latent:], q[..., size:], 1
    if not is_kimi(c):
        frequencies, factor, divisor = rope(c, tools)

        def turned(y):
            if c["rope_interleave"]:
                y = np.concatenate([y[..., 0::2], y[..., 1::2]], -1)
            return tools.turned(y, np.arange(len(x)), frequencies, factor)

        k_part, q_part = turned(k_part), turned(q_part)
    k = np.concatenate([k, np.broadcast_to(k_part, q_part.shape)], -1)
    return tools.attended(np.concatenate([q[..., :size], q_part], -1), k, v, divisor)


def rope(c, tools):
    """The frequencies, the factor of what is turned, and what divides logits."""
    half, base, scaling = c["qk_rope_head_dim"] // 2, c["rope_theta"], c["rope_scaling"]
    plain = base ** (-np.arange(half) / half)
    if scaling is None:
        return plain, 1, 1
    magnitude = lambda scale: 0.1 * scale * np.log(scaling["factor"]) + 1
    of_turned, of_all = (scaling.get(name, 0) for name in ("mscale", "mscale_all_dim"))
    both = of_turned and of_all
    factor = magnitude(of_turned) / magnitude(of_all) if both else magnitude(1)
    factor = scaling.get("attention_factor", factor)
    frequencies, _ = tools.yarn(plain, base, scaling, c)
    return frequencies, factor, magnitude(of_all) ** -2


def delta_attention(x, own, c, tools):
    """Kimi Team (2025), equation 1, a state at a time."""
    heads, size, taps, _ = linear(c)
    length = len(x)
    split = lambda y: y.reshape(length, heads, size)

    def convolved(letter):
        y = x @ own[f"{letter}_proj.weight"].T
        before = np.concatenate([np.zeros_like(y[: taps - 1]), y])
        weights = own[f"{letter}_conv1d.weight"][:, 0].T
        return split(tools.silu(sum(w * before[n : n + length] for n, w in enumerate(weights))))

    unit = lambda y: y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6)
    q, k, v = unit(convolved("q")), unit(convolved("k")), convolved("v")
    low_rank = lambda letter: (
        x @ own[f"{letter}_a_proj.weight"].T @ own[f"{letter}_b_proj.weight"].T
    )
    rate = np.exp(own["A_log"].reshape(heads, 1))
    decay = np.exp(-rate * np.log1p(np.exp(split(low_rank("f") + own["dt_bias"]))))
    beta, state, read = sigmoid(x @ own["b_proj.weight"].T), np.zeros((heads, size, size)), []
    for n in range(length):
        state = decay[n][..., None] * state
        missing = v[n] - np.einsum("hk,hkv->hv", k[n], state)
        state = state + np.einsum("h,hk,hv->hkv", beta[n], k[n], missing)
        read.append(np.einsum("hk,hkv->hv", q[n], state) / np.sqrt(size))
    y = tools.norm(np.array(read), own["o_norm.weight"], c) * sigmoid(split(low_rank("g")))
    return y.reshape(length, -1)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def experts(x, own, c, tools):
    """DeepSeek-V3, section 2.1.2: biases choose groups and experts, and weigh none."""
    count, top_k, _, groups, normalized = of_experts(c)
    name, y = prefix(c), np.zeros_like(x)
    scores = sigmoid(x @ own[f"{name}gate.weight"].T)
    for place, score in enumerate(scores):
        biased = score + own[f"{name}gate.e_score_correction_bias"]
        of_groups = [sum(sorted(group)[-2:]) for group in np.split(biased, groups)]
        best = np.argsort(of_groups)[-c["topk_group"] :]
        legal = [e for e in range(count) if e // (count // groups) in best]
        chosen = sorted(legal, key=lambda e, biased=biased: -biased[e])[:top_k]
        total = score[chosen].sum() if normalized else 1
        for e in chosen:
            part = swiglu(x[place], *(own[n] for n in matrices(c, e)), tools)
            y[place] += c["routed_scaling_factor"] * score[e] / total * part
    return y
