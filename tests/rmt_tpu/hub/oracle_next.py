"""Qwen3-Next and Qwen3.5 in NumPy and float64, token by token, by its equations and tensors."""

import numpy as np

DEFAULTS = {
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "layer_types": None,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32_768,
    "mlp_only_layers": None,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
}

_OF_QWEN3_5 = {
    name: value
    for name, value in DEFAULTS.items()
    if name not in ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob")
}
DEFAULTS_3_5 = {
    "qwen3_5_text": {n: x for n, x in _OF_QWEN3_5.items() if "expert" not in n and "moe" not in n}
    | {"num_key_value_heads": 4},
    "qwen3_5_moe_text": _OF_QWEN3_5 | {"num_experts": 256, "num_experts_per_tok": 8},
}
DEFAULTS_3_5["qwen3_5_text"].pop("router_aux_loss_coef")
KINDS = ("qwen3_next", *DEFAULTS_3_5)


def is_full(c, layer):
    """Whether a layer has attention, and no linear one."""
    if c["layer_types"] is not None:
        return c["layer_types"][layer] == "full_attention"
    return (layer + 1) % c["full_attention_interval"] == 0


def has_experts(c, layer):
    """Whether a layer has experts: in Qwen3.5 all layers or none."""
    if c["model_type"] in DEFAULTS_3_5:
        return c["model_type"] == "qwen3_5_moe_text"
    return layer not in (c["mlp_only_layers"] or []) and (layer + 1) % c["decoder_sparse_step"] == 0


def shapes(c):
    width, size = c["hidden_size"], c["head_dim"]
    heads, groups = c["num_attention_heads"], c["num_key_value_heads"]
    values, keys, own = (
        c[f"linear_{name}"] for name in ("num_value_heads", "num_key_heads", "key_head_dim")
    )
    full = {
        "self_attn.q_proj.weight": (2 * heads * size, width),
        **{f"self_attn.{letter}_proj.weight": (groups * size, width) for letter in "kv"},
        **{f"self_attn.{letter}_norm.weight": (size,) for letter in "qk"},
        "self_attn.o_proj.weight": (width, heads * size),
    }
    linear = {
        "linear_attn.in_proj_qkvz.weight": (2 * (keys + values) * own, width),
        "linear_attn.in_proj_ba.weight": (2 * values, width),
        "linear_attn.conv1d.weight": ((2 * keys + values) * own, 1, c["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (values,),
        "linear_attn.dt_bias": (values,),
        "linear_attn.norm.weight": (own,),
        "linear_attn.out_proj.weight": (width, values * own),
    }

    if c["model_type"] in DEFAULTS_3_5:
        for name in ("in_proj_qkvz", "in_proj_ba"):
            del linear[f"linear_attn.{name}.weight"]
        rows = {"qkv": (2 * keys + values) * own, "z": values * own, "b": values, "a": values}
        linear |= {f"linear_attn.in_proj_{name}.weight": (n, width) for name, n in rows.items()}

    def mlp(name, hidden):
        found = {f"{name}{matrix}_proj.weight": (hidden, width) for matrix in ("gate", "up")}
        return found | {f"{name}down_proj.weight": (width, hidden)}

    experts, count = {}, c.get("num_experts", 0)
    if count:
        hidden = c["moe_intermediate_size"]
        experts = {"mlp.gate.weight": (count, width), "mlp.shared_expert_gate.weight": (1, width)}
        experts |= mlp("mlp.shared_expert.", c["shared_expert_intermediate_size"])
        if c["model_type"] in DEFAULTS_3_5:
            experts["mlp.experts.gate_up_proj"] = (count, 2 * hidden, width)
            experts["mlp.experts.down_proj"] = (count, width, hidden)
        else:
            for e in range(count):
                experts |= mlp(f"mlp.experts.{e}.", hidden)
    norms = {f"{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    found = {"model.embed_tokens.weight": (c["vocab_size"], width), "model.norm.weight": (width,)}
    if not c["tie_word_embeddings"]:
        found["lm_head.weight"] = (c["vocab_size"], width)
    for layer in range(c["num_hidden_layers"]):
        second = experts if has_experts(c, layer) else mlp("mlp.", c["intermediate_size"])
        own_layer = norms | (full if is_full(c, layer) else linear) | second
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in own_layer.items()}
    return found


def logits(t, c, tokens, tools):
    """`tools` are the functions of other kinds: norm, turned, attended, softmax and silu."""
    norm = lambda x, gain: tools.norm(x, 1 + gain, c)
    h = t["model.embed_tokens.weight"][tokens]
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        own = {n.removeprefix(prefix): x for n, x in t.items() if n.startswith(prefix)}
        mixing = attention if is_full(c, layer) else delta_net
        h = h + mixing(norm(h, own["input_layernorm.weight"]), own, c, tools)
        second = experts if has_experts(c, layer) else mlp
        h = h + second(norm(h, own["post_attention_layernorm.weight"]), own, c, tools)
    unembedding = "model.embed_tokens" if c["tie_word_embeddings"] else "lm_head"
    return norm(h, t["model.norm.weight"]) @ t[f"{unembedding}.weight"].T


def attention(x, own, c, tools):
    """A query and its gate follow each other; the first numbers of a head are turned."""
    size, heads = c["head_dim"], c["num_attention_heads"]
    split = lambda name, *last: (x @ own[f"self_attn.{name}_proj.weight"].T).reshape(
        len(x), -1, *last
    )
    q, gates = np.moveaxis(split("q", 2, size), 2, 0)
    k, v = split("k", size), split("v", size)
    dims = int(size * c["partial_rotary_factor"])
    frequencies = c["rope_theta"] ** (-np.arange(dims // 2) / (dims // 2))

    def rotated(y, letter):
        y = tools.norm(y, 1 + own[f"self_attn.{letter}_norm.weight"], c)
        part = tools.turned(y[..., :dims], np.arange(len(x)), frequencies)
        return np.concatenate([part, y[..., dims:]], -1)

    q, k = rotated(q, "q"), rotated(k, "k")
    k, v = (np.repeat(y, heads // y.shape[1], axis=1) for y in (k, v))
    y = tools.attended(q, k, v) / (1 + np.exp(-gates.reshape(len(x), -1)))
    return y @ own["self_attn.o_proj.weight"].T


def delta_net(x, own, c, tools):
    """Yang, Kautz and Hatamizadeh (2024), equation 10, a state at a time."""
    own = {name.removeprefix("linear_attn."): y for name, y in own.items()}
    keys, values, size = (
        c[f"linear_{name}"] for name in ("num_key_heads", "num_value_heads", "key_head_dim")
    )
    each, length = values // keys, len(x)
    if "in_proj_qkv.weight" in own:
        channels, z, b, a = (x @ own[f"in_proj_{n}.weight"].T for n in ("qkv", "z", "b", "a"))
        z = z.reshape(length, -1, size)
    else:
        by_key_head = (x @ own["in_proj_qkvz.weight"].T).reshape(length, keys, -1)
        ends = size, 2 * size, (2 + each) * size
        q, k, v, z = (y.reshape(length, -1, size) for y in np.split(by_key_head, ends, axis=2))
        both = (x @ own["in_proj_ba.weight"].T).reshape(length, keys, 2, each)
        b, a = (both[:, :, n].reshape(length, values) for n in range(2))
        channels = np.concatenate([y.reshape(length, -1) for y in (q, k, v)], axis=1)
    taps = own["conv1d.weight"][:, 0].T
    before = np.concatenate([np.zeros_like(channels[: len(taps) - 1]), channels])
    mixed = tools.silu(sum(tap * before[n : n + length] for n, tap in enumerate(taps)))
    split = np.split(mixed, [keys * size, 2 * keys * size], axis=1)
    q, k, v = (y.reshape(length, -1, size) for y in split)
    unit = lambda y: y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6)
    q, k = (np.repeat(unit(y), each, axis=1) for y in (q, k))
    decay = np.exp(-np.exp(own["A_log"]) * np.log1p(np.exp(a + own["dt_bias"])))
    beta, state, read = 1 / (1 + np.exp(-b)), np.zeros((values, size, size)), []
    for n in range(length):
        state = decay[n][:, None, None] * state
        missing = v[n] - np.einsum("hk,hkv->hv", k[n], state)
        state = state + np.einsum("h,hk,hv->hkv", beta[n], k[n], missing)
        read.append(np.einsum("hk,hkv->hv", q[n], state) / np.sqrt(size))
    y = tools.norm(np.array(read), own["norm.weight"], c) * tools.silu(z)
    return y.reshape(length, -1) @ own["out_proj.weight"].T


def mlp(x, own, c, tools, name="mlp."):
    gate, up = (x @ own[f"{name}{matrix}_proj.weight"].T for matrix in ("gate", "up"))
    return (tools.silu(gate) * up) @ own[f"{name}down_proj.weight"].T


def experts(x, own, c, tools):
    if "mlp.experts.gate_up_proj" in own:
        stacked = zip(own["mlp.experts.gate_up_proj"], own["mlp.experts.down_proj"], strict=True)
        for e, (both, down) in enumerate(stacked):
            name = f"mlp.experts.{e}."
            gate, up = np.split(both, 2)
            own = own | {f"{name}gate_proj.weight": gate, f"{name}up_proj.weight": up}
            own[f"{name}down_proj.weight"] = down
    shared = mlp(x, own, c, tools, "mlp.shared_expert.")
    y = shared / (1 + np.exp(-x @ own["mlp.shared_expert_gate.weight"].T))
    for place, share in enumerate(tools.softmax(x @ own["mlp.gate.weight"].T)):
        chosen = np.argsort(-share)[: c["num_experts_per_tok"]]
        total = share[chosen].sum() if c.get("norm_topk_prob", True) else 1
        for e in chosen:
            y[place] += share[e] / total * mlp(x[place], own, c, tools, f"mlp.experts.{e}.")
    return y
